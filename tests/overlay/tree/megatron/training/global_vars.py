"""The arguments of the run, kept in the same module as in Megatron-LM."""

_GLOBAL_ARGS = None


def get_args():
    return _GLOBAL_ARGS


def set_args(args) -> None:
    global _GLOBAL_ARGS
    _GLOBAL_ARGS = args
