"""The command line of `pretrain_gpt.py`: its flags, their defaults, and the checks of values."""
