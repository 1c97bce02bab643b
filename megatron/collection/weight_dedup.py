"""Deduplicate weights: a weight is saved only in the first forward pass of an iteration.

It is the same in every micro-batch, and when a forward pass is recomputed.
"""

from typing import Any

from megatron.tensor_record import OF_ITERATION


class WeightDedup:
    """The weights that the current iteration has saved."""

    def __init__(self) -> None:
        self._saved: set[tuple[int, str, str]] = set()

    def begin_iteration(self) -> None:
        """Forget the weights of the last iteration."""
        self._saved.clear()

    def is_new(self, fields: dict[str, Any]) -> bool:
        """Return whether a tensor must be saved: all but weights that this iteration has saved.

        Codes of stochastic rounding differ each time and are always saved.
        """
        name, rounding = fields["tensor_name"], (fields.get("codes") or {}).get("rounding")
        if name not in OF_ITERATION or rounding == "stochastic" or not fields["module"]:
            return True
        key = (fields["iteration"], fields["module"], name)
        if key in self._saved:
            return False
        self._saved.add(key)
        return True
