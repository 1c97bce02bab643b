"""Compiled loops over the values of a tensor."""
