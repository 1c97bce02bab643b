"""The output folder: its table of outputs, and how they are drawn and written."""
