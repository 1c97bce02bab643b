"""CUDA kernels, which Megatron-LM compiles with nvcc into its own folder."""


def load(args) -> None:
    raise RuntimeError("nvcc is not installed")
