"""Quantized layers of the overlay, and the checks of what a format or a recipe reaches."""
