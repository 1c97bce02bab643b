"""The command line of `pretrain_gpt.py`: its flags, their defaults and their checks."""
