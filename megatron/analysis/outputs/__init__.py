"""Draw the figures, text files and report of a dump, and write them to the output folder."""
