"""Collect only the part of each tensor that `--collect-slice` selects.

For example, `s=0:128 h=0:256:2` keeps the first 128 sequence positions and every second one of the
first 256 features. The letter names a dimension as in the record's `dims`, and the numbers are
indices into this rank's tensor. The part depends only on the flag, so the same elements are kept in
every iteration and every run. The record contains the shape of the whole tensor and the position of
the part in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LETTERS = {
    "s": "sequence",
    "k": "keys",
    "b": "batch",
    "t": "an expert's tokens",
    "h": "input features",
    "o": "output features",
    "a": "attention heads",
    "g": "query groups",
    "d": "head dimension",
}


@dataclass(frozen=True)
class Slices:
    """Ranges of indices to keep in each dimension; a dimension without a range is kept whole."""

    #: Ranges of indices to keep, by the letter that stands for the dimension; see `LETTERS`.
    by_letter: dict[str, range] = field(default_factory=dict)

    def cut(
        self, tensor: torch.Tensor, dims: str
    ) -> tuple[torch.Tensor | None, dict[str, Any] | None]:
        """Return the part of `tensor` to keep, and a description of the part for the metadata.

        Args:
            tensor: tensor to cut.
            dims: letters of the dimensions; see `Capture.save`.

        Returns:
            The part, which is None if it is empty, and the description, which is None if the part
            is empty or the whole tensor is kept.
        """
        letters = [letter[0] for letter in dims.partition("|")[0].split()]
        ranges = [
            range(size)[named.start : named.stop : named.step]
            if (named := self.by_letter.get(letter)) is not None
            else range(size)
            for letter, size in zip(letters, tensor.shape, strict=True)
        ]
        if all(part == range(size) for part, size in zip(ranges, tensor.shape, strict=True)):
            return tensor, None
        if not all(ranges):
            return None, None
        where = {
            "of": list(tensor.shape),
            "start": [part.start for part in ranges],
            "step": [part.step for part in ranges],
        }
        return tensor[tuple(slice(part.start, part.stop, part.step) for part in ranges)], where

    @classmethod
    def parse(cls, parts: Sequence[str]) -> Slices:
        """Parse index ranges such as `s=0:128` and `h=0:256:2`.

        Raises:
            ValueError: if a range cannot be parsed or is empty, or if a dimension is unknown or has
                two ranges.
        """
        by_letter: dict[str, range] = {}
        for part in parts:
            match = re.fullmatch(r"([a-z])=(\d+):(\d+)(?::(\d+))?", part)
            if match is None or match[1] not in LETTERS:
                known = ", ".join(f"{letter} ({name})" for letter, name in LETTERS.items())
                raise ValueError(
                    f"--collect-slice: {part!r} is not understood; give DIM=START:STOP or "
                    f"DIM=START:STOP:STEP, such as s=0:128, where DIM is one of {known}"
                )
            start, stop, step = int(match[2]), int(match[3]), int(match[4] or 1)
            if stop <= start or step < 1:
                raise ValueError(
                    f"--collect-slice: {part} is empty; STOP must be above START and is not part "
                    "of the slice, and STEP must be at least 1"
                )
            if match[1] in by_letter:
                raise ValueError(
                    f"--collect-slice: {part} names the dimension {match[1]} a second time; give "
                    "one part per dimension"
                )
            by_letter[match[1]] = range(start, stop, step)
        return cls(by_letter)
