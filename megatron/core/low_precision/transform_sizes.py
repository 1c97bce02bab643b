"""Whether the Hadamard transforms that were asked for fit a module's sizes.

A transform of size d runs over whole groups of d values along the axis over which a GEMM sums. That
of a weight gradient are tokens, whose number is the data's: they are filled up with zeros (see
`gemm.py`). The others are the model's, and a size that does not divide one is refused before
training. Blocks of a format need no check: the last one may be shorter.
"""

from collections.abc import Iterator

from megatron.core.low_precision.quantized_module import Quantized

#: By operation, what fprop and dgrad sum over.
AXES = {
    "linear": ("input features", "output features"),
    "qk": ("channels of a head", "keys"),
    "pv": ("keys", "channels of a head"),
}


def mistakes(module: Quantized, seq_length: int) -> Iterator[str]:
    """What a named module could not do, at any time of the run.

    Args:
        module: as this rank has it: features are those of its shard.
        seq_length: of the whole sequence, which the keys of attention have under context
            parallelism too.
    """
    assert module.identity is not None
    for operation in module.operations:
        sizes = dict(zip(("fprop", "dgrad"), _sizes(module, operation, seq_length), strict=True))
        axes = dict(zip(sizes, AXES[operation], strict=True))
        for formats, source in module.plan_of(operation).of_all_times():
            for gemm, slot in (("fprop", "fprop_b"), ("dgrad", "dgrad_b")):
                transform = getattr(formats, slot).hadamard
                if transform is not None and sizes[gemm] % transform.size:
                    yield (
                        f"{source}: {module.identity.name}: {gemm} of {operation} has a Hadamard "
                        f"transform of size {transform.size}, which does not divide its "
                        f"{sizes[gemm]} {axes[gemm]}{_of_shard(module, operation)}; choose a size "
                        "that does, or leave this module out"
                    )


def _sizes(module: Quantized, operation: str, seq_length: int) -> tuple[int, int]:
    """Lengths of the axes that fprop and dgrad sum over, on this rank."""
    if operation == "linear":
        inputs = getattr(module, "input_size_per_partition", module.input_size)
        return inputs, getattr(module, "output_size_per_partition", module.output_size)
    config = module.config
    channels = config.kv_channels
    if getattr(config, "multi_latent_attention", False):
        of_scores = config.qk_head_dim + config.qk_pos_emb_head_dim
        channels = of_scores if operation == "qk" else config.v_head_dim
    return (channels, seq_length) if operation == "qk" else (seq_length, channels)


def _of_shard(module: Quantized, operation: str) -> str:
    sharded = operation == "linear" and module.config.tensor_model_parallel_size > 1
    return " (of a tensor-parallel rank)" if sharded else ""
