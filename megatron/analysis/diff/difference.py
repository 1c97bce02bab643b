"""Measure how two tensors differ, in pieces, so that memory does not grow with their size.

Values are compared as numbers: -0 equals +0, NaN equals NaN, and Inf equals Inf of the same sign.
Whether all bits are equal, too, is a separate result. Where a NaN or Inf differs from the value of
the other tensor, the difference is not finite. Such pairs of values are counted, but left out of
all norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.analysis.dump.reassembly import bits

PIECE = 1 << 21  #: number of values that are compared at a time


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed difference of a tensor B from its counterpart A; a limit of None is not checked.

    If nothing is given, the values must be equal.
    """

    relative: float | None = None  #: limit of the relative error in the Euclidean norm
    #: A value b may differ from a by `atol + rtol * |a|`.
    rtol: float | None = None
    atol: float | None = None

    @property
    def of_values(self) -> bool:
        """True if `rtol` or `atol` limits the difference of each value."""
        return self.rtol is not None or self.atol is not None

    def __str__(self) -> str:
        """Return the limits as text for a message."""
        limits = {"relative error": self.relative, "rtol": self.rtol, "atol": self.atol}
        texts = [f"{name} {limit:g}" for name, limit in limits.items() if limit is not None]
        return ", ".join(texts) or "equal values"


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of a tensor B from its counterpart A of the same shape."""

    count: int  #: number of values
    same_bits: bool  #: True if dtypes and all bits are equal
    unequal: int = 0  #: number of values that differ
    beyond: int = 0  #: number of values that differ by more than rtol and atol allow
    special: int = 0  #: number of differing pairs of values with a NaN or Inf
    norm_a: float = math.nan  #: Euclidean norm of A; NaN if all values are equal
    norm_b: float = math.nan
    norm: float = 0.0  #: Euclidean norm of B - A
    largest: float = 0.0  #: largest magnitude of B - A
    #: Index of the largest difference, or of the first NaN or Inf that differs; None if all values
    #: are equal.
    at: tuple[int, ...] | None = None
    values: tuple[float, float] = (math.nan, math.nan)  #: values of A and B at `at`

    @property
    def relative_error(self) -> float:
        """Euclidean norm of B - A, divided by that of A; infinite if NaN or Inf differ."""
        if not self.unequal:
            return 0.0
        if self.special or not self.norm_a > 0:
            return math.inf
        error = self.norm / self.norm_a
        return error if math.isfinite(error) else math.inf

    @property
    def cosine(self) -> float:
        """Cosine of the angle between A and B, computed from the values that are finite in both."""
        if not self.unequal:
            return 1.0
        product = self.norm_a * self.norm_b
        if not product > 0:
            return math.nan
        # products instead of powers, because `x**2` raises an OverflowError for a large x
        a, b, delta = (norm * norm for norm in (self.norm_a, self.norm_b, self.norm))
        cosine = (a + b - delta) / (2 * product)
        return max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else math.nan

    @property
    def gain(self) -> float:
        """Slope of a least-squares fit of B to A, minus 1."""
        if not self.unequal:
            return 0.0
        if not self.norm_a > 0:
            return math.nan
        return self.cosine * self.norm_b / self.norm_a - 1

    def within(self, tolerance: Tolerance) -> bool:
        """Return whether `tolerance` allows the difference."""
        if not self.unequal:
            return True
        limited = tolerance.relative is not None or tolerance.of_values
        if self.special or not limited:
            return False
        if tolerance.of_values and self.beyond:
            return False
        return tolerance.relative is None or self.relative_error <= tolerance.relative


def compare(a: Tensor, b: Tensor, tolerance: Tolerance) -> Difference:
    """Return the difference of `b` from `a`.

    Raises:
        ValueError: if the shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"shape {list(b.shape)} in B, but {list(a.shape)} in A")
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    if a.dtype == b.dtype and _same_bits(flat_a, flat_b):
        return Difference(a.numel(), same_bits=True)
    sums = _Sums(tolerance)
    for start in range(0, a.numel(), PIECE):
        piece = slice(start, start + PIECE)
        sums.add(flat_a[piece], flat_b[piece], start)
    return sums.difference(tuple(a.shape))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    pieces = range(0, a.numel(), PIECE)
    return all(
        torch.equal(bits(a[start : start + PIECE]), bits(b[start : start + PIECE]))
        for start in pieces
    )


def widened(x: Tensor) -> Tensor:
    """Return `x` as float32 if its values are floats of 8 or 16 bits, and as float64 otherwise."""
    if x.dtype.is_floating_point and x.element_size() <= 2:
        return x.float()
    return x.double()


def square_of_norm(x: Tensor) -> float:
    """Return the sum of the squares of all values in float64; infinite if the sum overflows."""
    norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
    return norm * norm


class _Sums:
    """Sums and extremes over two tensors, whose values are added piece by piece."""

    def __init__(self, tolerance: Tolerance):
        self._tolerance = tolerance
        self._count = self._unequal = self._beyond = self._special = 0
        self._squares = [0.0, 0.0, 0.0]  #: sums of squares of A, B and B - A
        self._largest = -1.0
        self._at: int | None = None
        self._values = (math.nan, math.nan)

    def add(self, a: Tensor, b: Tensor, start: int) -> None:
        """Add a piece of both tensors, which starts at the flat index `start`."""
        a, b = widened(a), widened(b)
        if a.dtype != b.dtype:
            a, b = a.double(), b.double()
        self._count += a.numel()
        differs = ~((a == b) | (a.isnan() & b.isnan()))
        finite = a.isfinite() & b.isfinite()
        all_finite = bool(finite.all())
        special = differs & ~finite
        self._unequal += int(differs.sum())
        if not all_finite:
            if not self._special and bool(special.any()):
                self._remember(int(special.nonzero()[0]), a, b, start)
            self._special += int(special.sum())
            a, b = (torch.where(finite, x, 0.0) for x in (a, b))
        delta = b - a
        for number, x in enumerate((a, b, delta)):
            self._squares[number] += square_of_norm(x)
        magnitudes = delta.abs()
        if self._tolerance.of_values:
            allowed = (self._tolerance.atol or 0.0) + (self._tolerance.rtol or 0.0) * a.abs()
            self._beyond += int((special | ~(magnitudes <= allowed)).sum())
        place = int(magnitudes.argmax())
        largest = float(magnitudes[place])
        if largest > self._largest:
            self._largest = largest
            if not self._special:
                self._remember(place, a, b, start)

    def _remember(self, place: int, a: Tensor, b: Tensor, start: int) -> None:
        self._at = start + place
        self._values = float(a[place]), float(b[place])

    def difference(self, shape: tuple[int, ...]) -> Difference:
        """Return the sums as a `Difference` of two tensors of the given shape."""
        at = None
        if self._at is not None and self._unequal:
            index = torch.unravel_index(torch.tensor(self._at), shape)
            at = tuple(int(number) for number in index)
        a, b, delta = (math.sqrt(square) for square in self._squares)
        return Difference(
            count=self._count,
            same_bits=False,
            unequal=self._unequal,
            beyond=self._beyond,
            special=self._special,
            norm_a=a,
            norm_b=b,
            norm=delta,
            largest=max(self._largest, 0.0),
            at=at,
            values=self._values,
        )
