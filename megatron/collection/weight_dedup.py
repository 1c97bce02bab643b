"""Save each weight only once per iteration, in the first forward pass that uses it.

A weight is the same in every micro-batch of an iteration and in a recomputed forward pass. If a
program changes it in between, as LBFGS and SAM do, only the first weights are saved, with a warning
in the log.
"""

import logging
from typing import Any

from megatron.fake_quant.names import get_format
from megatron.fake_quant.rounding_modes import ROUNDINGS
from megatron.tensor_record import OF_ITERATION

logger = logging.getLogger(__name__)


class WeightDedup:
    """Set of keys of the weights already saved in the current iteration."""

    def __init__(self) -> None:
        self._saved: set[tuple[int, str, str, str | None]] = set()
        self._versions: dict[str, int] = {}  #: version of the weight of each module
        self._warned = False

    def begin_iteration(self) -> None:
        """Forget which weights were saved in the previous iteration."""
        self._saved.clear()
        self._versions.clear()

    def warn_of_change(self, fields: dict[str, Any], version: int) -> None:
        """Warn once if a weight has changed since it was saved in this iteration.

        Args:
            fields: fields of the tensor's record.
            version: number that changes if the tensor is changed in place.
        """
        if fields["tensor_name"] != "weight" or not fields["module"]:
            return
        if self._versions.setdefault(fields["module"], version) != version and not self._warned:
            self._warned = True
            logger.warning(
                "the weight of %s has changed within iteration %d; only the first weights of an "
                "iteration are saved, so verify and study are correct only for the micro-batches "
                "before the change",
                fields["module"],
                fields["iteration"],
            )

    def is_new(self, fields: dict[str, Any]) -> bool:
        """Return False if this weight or its codes were already saved in this iteration.

        Codes from stochastic rounding differ each time, so they are always saved. The same applies
        to codes of a dequantized forward copy, which may have been rounded stochastically, and to
        codes with delayed scaling, whose scale may change between micro-batches. The format of a
        code tensor includes the seed of the random Hadamard signs, if any.

        Args:
            fields: fields of the tensor's record.
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
        key = (fields["iteration"], fields["module"], name, fmt)
        if key in self._saved:
            return False
        self._saved.add(key)
        return True
