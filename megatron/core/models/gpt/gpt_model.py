"""Extend GPTModel: name its layers, and check that they are quantized and collected as requested.

The file is overlaid because a linear layer has no access to its name or its layer's number, which
determine whether it is quantized and how its tensors are recorded. The seam is the end of
`__init__`, where the wheel too iterates over all named modules.
"""

from megatron.collection.module_identity import assign_identities
from megatron.core import tensor_saver
from megatron.core._overlay import shadowed
from megatron.core.low_precision import delayed_scaling, transformer_engine
from megatron.core.low_precision.coverage_check import check_coverage
from megatron.fake_quant import policy

_upstream = shadowed(__name__)


class GPTModel(_upstream.GPTModel):
    """The `GPTModel` of megatron-core; its layers are named and checked after construction."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        collecting = tensor_saver.enabled() or tensor_saver.enabled_by_environment()
        if collecting or policy.current().changes_matmuls:
            transformer_engine.attach(self)
        assign_identities(self)
        check_coverage(self, collecting=collecting)
        delayed_scaling.attach(self)
