"""Make the norms of the local implementation work under sequence parallelism.

The file is overlaid because the wheel's `WrappedTorchNorm` refuses sequence parallelism. The seam
is `__new__`. The refusal is about gradients, not about the norm: each rank sees its own slice of
the sequence, so the gradient of the norm's weight is a partial sum. `finalize_model_grads`
all-reduces it over the tensor-parallel group for every parameter with `sequence_parallel = True`,
so it is enough to set this attribute.
"""

from megatron.core._overlay import shadowed

_upstream = shadowed(__name__)


class WrappedTorchNorm(_upstream.WrappedTorchNorm):
    """The `WrappedTorchNorm` of megatron-core, extended to work under sequence parallelism."""

    def __new__(cls, config, hidden_size, **kwargs):
        if not config.sequence_parallel:
            return _upstream.WrappedTorchNorm(config, hidden_size, **kwargs)
        norm = _upstream.WrappedTorchNorm(_WithoutSequenceParallel(config), hidden_size, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm


class _WithoutSequenceParallel:
    """A view of a configuration in which sequence parallelism is off.

    `dataclasses.replace` would run the configuration's `__post_init__` a second time.
    """

    sequence_parallel = False

    def __init__(self, config):
        self._config = config

    def __getattr__(self, name):
        return getattr(self._config, name)
