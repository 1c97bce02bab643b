"""Build the parts of the page as Dash components; all texts are shown as they are."""
