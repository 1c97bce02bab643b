"""A module next to the script, which Python finds only if the script's folder is in `sys.path`."""

NAME = "sibling of the script"
