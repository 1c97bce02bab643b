"""A weight is the same in every micro-batch of an iteration, and when a forward pass is recomputed:
it is saved where it is first shown.
"""

from typing import Any

from megatron.tensor_record import OF_ITERATION


class WeightDedup:
    """What the iteration under way has shown."""

    def __init__(self) -> None:
        self._shown: set[tuple[int, str, str]] = set()

    def begin_iteration(self) -> None:
        """Weights are new."""
        self._shown.clear()

    def is_new(self, fields: dict[str, Any]) -> bool:
        """Whether a tensor with these fields is not a weight that this iteration has shown before.
        Codes that were rounded stochastically differ each time.
        """
        name, rounding = fields["tensor_name"], (fields.get("codes") or {}).get("rounding")
        if name not in OF_ITERATION or rounding == "stochastic" or not fields["module"]:
            return True
        key = (fields["iteration"], fields["module"], name)
        if key in self._shown:
            return False
        self._shown.add(key)
        return True
