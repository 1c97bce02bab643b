"""The output folder of a drawing: what is in it, and how it is written."""
