import contextlib


class CudaRNGStatesTracker:
    """The name that megatron-core subclasses."""


@contextlib.contextmanager
def activation_recompute_forward(**_):
    yield
