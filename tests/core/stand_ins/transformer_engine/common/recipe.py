class DelayedScaling:
    """A class for megatron-core to subclass."""
