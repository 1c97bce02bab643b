"""Collecting a part of each tensor: `s=0:128 h=0:256:2` keeps the first 128 positions and every
second of the first 256 features.

A dimension is named by its letter in the recorded `dims`, and its numbers are those of the tensor
that this rank has. The part depends on the flag alone, so that the same elements are kept in every
iteration and run. The record says what the file is a part of.
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
    """What is kept of each dimension; all of those that are not named."""

    by_letter: dict[str, range] = field(default_factory=dict)

    def cut(
        self, tensor: torch.Tensor, dims: str
    ) -> tuple[torch.Tensor | None, dict[str, Any] | None]:
        """The part of `tensor` that is kept, and what the record says of it.

        Returns:
            None if nothing of the tensor is in the slice; and None where it is whole.
        """
        letters = [letter[0] for letter in dims.partition("|")[0].split()]
        kept = [
            range(size)[named.start : named.stop : named.step]
            if (named := self.by_letter.get(letter)) is not None
            else range(size)
            for letter, size in zip(letters, tensor.shape, strict=True)
        ]
        if all(part == range(size) for part, size in zip(kept, tensor.shape, strict=True)):
            return tensor, None
        if not all(kept):
            return None, None
        where = {
            "of": list(tensor.shape),
            "start": [part.start for part in kept],
            "step": [part.step for part in kept],
        }
        return tensor[tuple(slice(part.start, part.stop, part.step) for part in kept)], where

    @classmethod
    def parse(cls, parts: Sequence[str]) -> Slices:
        """Read e.g. `s=0:128`, `h=0:256:2`.

        Raises:
            ValueError: no such form, no such dimension, one named twice, or an empty part.
        """
        found: dict[str, range] = {}
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
                    f"--collect-slice: {part} is empty; STOP is above START and not part of the "
                    "slice, STEP is at least 1"
                )
            if match[1] in found:
                raise ValueError(
                    f"--collect-slice: {part} names the dimension {match[1]} a second time; give "
                    "one part a dimension"
                )
            found[match[1]] = range(start, stop, step)
        return cls(found)
