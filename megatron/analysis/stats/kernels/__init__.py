"""Compiled loops over the values of a tensor, and the code that prepares and calls them."""
