"""Compiled loops over the values of a tensor, and the code that calls these loops."""
