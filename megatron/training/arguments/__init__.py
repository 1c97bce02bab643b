"""The command line: its flags, their defaults, and the checks of their values."""
