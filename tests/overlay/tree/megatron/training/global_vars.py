"""The arguments of the run, in the place where Megatron-LM keeps them."""

_GLOBAL_ARGS = None


def get_args():
    return _GLOBAL_ARGS


def set_args(args) -> None:
    global _GLOBAL_ARGS
    _GLOBAL_ARGS = args
