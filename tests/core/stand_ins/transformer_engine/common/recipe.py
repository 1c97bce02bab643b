class DelayedScaling:
    """The name that megatron-core subclasses."""
