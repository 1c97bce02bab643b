"""Parse a selection of layers or ranks, such as `all`, `first,last` or `0,2-4`."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberSelection:
    """Set of layer or rank numbers, which are counted from 0."""

    #: Selected numbers; None selects all, including -1 (modules outside the layers).
    numbers: frozenset[int] | None = None

    def __contains__(self, number: int) -> bool:
        return self.numbers is None or number in self.numbers

    def count(self, total: int) -> int:
        """Return how many of the numbers from 0 to `total` - 1 are selected."""
        return total if self.numbers is None else len(self.numbers)

    @classmethod
    def parse(cls, spec: str, total: int | None, *, flag: str, what: str) -> "NumberSelection":
        """Parse a selection such as `all`, `first,last` or `0,2-4`.

        Args:
            spec: value of the flag.
            total: number of layers or ranks, if known.
            flag: name of the flag, for error messages.
            what: "layers" or "ranks", for error messages.

        Raises:
            ValueError: if `spec` cannot be parsed or a number is out of range.
        """
        if spec == "all":
            return cls()
        numbers: set[int] = set()
        for part in spec.split(","):
            bounds = _range(part.strip(), total)
            if bounds is None:
                raise ValueError(
                    f"{flag} {spec}: {part.strip()!r} is not understood; give all, or a list such "
                    "as first,last or 0,2-4"
                )
            low, high = bounds
            if high < low or (total is not None and high >= total):
                known = "" if total is None else f" 0 to {total - 1}"
                raise ValueError(
                    f"{flag} {spec}: {part.strip()} is not within the {what}{known}; give all, or "
                    "a list of these"
                )
            numbers.update(range(low, high + 1))
        return cls(frozenset(numbers))


def _range(part: str, total: int | None) -> tuple[int, int] | None:
    """Return the first and last number of the range `part`; None if `part` cannot be parsed."""
    if part == "first":
        return 0, 0
    if part == "last" and total is not None:
        return total - 1, total - 1
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    return None if match is None else (int(match[1]), int(match[2] or match[1]))
