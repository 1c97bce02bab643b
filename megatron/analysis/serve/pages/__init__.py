"""Build the parts of the page as Dash components, which show texts literally, never as markup."""
