"""Which layers are collected: `all`, or a comma-separated list of numbers, ranges, `first` and
`last`.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerSelection:
    """A set of 0-based global layer numbers; `None` is every layer, and those outside of a layer
    (-1) too.
    """

    numbers: frozenset[int] | None = None

    def __contains__(self, layer_idx: int) -> bool:
        return self.numbers is None or layer_idx in self.numbers

    @classmethod
    def parse(cls, spec: str, num_layers: int | None) -> "LayerSelection":
        """Read e.g. `all`, `first,last`, `0,2-4`.

        Raises:
            ValueError: no such form, or a layer that the model does not have.
        """
        if spec == "all":
            return cls()
        numbers: set[int] = set()
        for part in spec.split(","):
            low, high = _range(part.strip(), spec, num_layers)
            if high < low or (num_layers is not None and high >= num_layers):
                raise ValueError(
                    f"--collect-layers {spec}: {part.strip()} is not within the model's layers"
                    + (f" 0 to {num_layers - 1}" if num_layers is not None else "")
                )
            numbers.update(range(low, high + 1))
        return cls(frozenset(numbers))


def _range(part: str, spec: str, num_layers: int | None) -> tuple[int, int]:
    """The first and the last layer of one part."""
    if part == "first":
        return 0, 0
    if part == "last" and num_layers is not None:
        return num_layers - 1, num_layers - 1
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if match is None:
        raise ValueError(
            f"--collect-layers {spec}: {part!r} is not understood; give all, or a list such as "
            "first,last or 0,2-4"
        )
    return int(match[1]), int(match[2] or match[1])
