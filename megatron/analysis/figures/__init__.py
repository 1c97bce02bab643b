"""One file for each folder below `draw/`: from statistics to figures. `draw.py` saves them."""
