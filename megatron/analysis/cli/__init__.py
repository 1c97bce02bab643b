"""The subcommands of `python -m megatron.analysis`."""
