"""Save each weight only once per iteration, in the first forward pass that uses it.

A weight is usually the same in every micro-batch of an iteration and in a recomputed forward pass.
Optimizers such as LBFGS and SAM change it between the forward passes of an iteration. Then it is
saved again, and so are its codes.
"""

from typing import Any

from megatron.fake_quant.names import get_format
from megatron.fake_quant.rounding_modes import ROUNDINGS
from megatron.tensor_record import OF_ITERATION


class WeightDedup:
    """Set of keys of the weights already saved in the current iteration."""

    def __init__(self) -> None:
        self._saved: set[tuple[int, str, str, str | None]] = set()
        self._versions: dict[str, int] = {}  #: version of the weight of each module

    def begin_iteration(self) -> None:
        """Forget which weights were saved in the previous iteration."""
        self._saved.clear()
        self._versions.clear()

    def is_new(self, fields: dict[str, Any], version: int | None = None) -> bool:
        """Return True for a tensor to be saved, False for a weight already saved in this iteration.

        Codes from stochastic rounding differ each time, so they are always saved. The same applies
        to codes of a dequantized forward copy, which may have been rounded stochastically, and to
        codes with delayed scaling, whose scale may change between micro-batches. The format of a
        code tensor names the seed of its random Hadamard signs, if any.

        Args:
            fields: fields of the tensor's record.
            version: number that changes if the tensor is changed in place; None if it is unknown.
        """
        name, rounding = fields["tensor_name"], (fields.get("codes") or {}).get("rounding")
        fmt = fields.get("format")
        varies = rounding is not None and (
            ROUNDINGS[rounding].random
            or fmt.endswith("+dequantized")
            or get_format(fmt.partition("+")[0]).amax_source == "delayed"
        )
        if name not in OF_ITERATION or not fields["module"] or varies:
            return True
        module = fields["module"]
        known = name == "weight" and version is not None
        if known and self._versions.setdefault(module, version) != version:
            self._versions[module] = version
            self._saved = {key for key in self._saved if key[1] != module}
        key = (fields["iteration"], fields["module"], name, fmt)
        if key in self._saved:
            return False
        self._saved.add(key)
        return True
