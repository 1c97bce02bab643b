"""Draw the outputs and write them to the output folder."""
