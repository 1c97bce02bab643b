"""Compare the tensors of two runs one by one, in the order of execution.

If both runs shard a tensor in the same way, its parts are compared file by file, and the rank of a
fault is reported. If one run has more replicas of a part, the additional ones are compared with
the first replica of the other run. If the runs shard a tensor differently, its shards are joined in
both runs, partial sums are added, and the whole tensors are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from torch import Tensor

from megatron.analysis.diff import origin as origins
from megatron.analysis.diff.difference import Difference, Tolerance, compare, widened
from megatron.analysis.diff.origin import OPERANDS, Origin, UnknownOriginError
from megatron.analysis.diff.sides import Side, TensorKey
from megatron.analysis.dump.query import is_module
from megatron.analysis.dump.tensor_files import UnreadableTensorError
from megatron.analysis.verification.recorded_formats import (
    NotCheckedError,
    Softmax,
    softmax_of_card,
)

IDENTICAL = "identical"  #: all bits are equal
EQUAL = "equal"  #: the values are equal, but not the signs of zeros, the bits of NaN or the dtypes
CLOSE = "close"  #: the values differ, but not by more than the tolerances allow
DIFFERENT = "different"
UNREADABLE = "unreadable"  #: a file cannot be read, or the tensors cannot be compared
ONLY_A, ONLY_B = "only in A", "only in B"  #: the other run has no such record
PAIRED = (IDENTICAL, EQUAL, CLOSE, DIFFERENT, UNREADABLE)  #: statuses of pairs
STATUSES = (*PAIRED, ONLY_A, ONLY_B)

#: Exceptions that a recomputation may raise if the operands of a damaged dump do not fit together.
_IMPOSSIBLE = (RuntimeError, ValueError, IndexError, MemoryError)


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that decide which pairs of tensors agree."""

    default: Tolerance = field(default_factory=Tolerance)
    #: Limits of the relative error by pattern of `module.tensor_name`; the last match counts.
    relative: tuple[tuple[str, float], ...] = ()
    bitwise: bool = False  #: True if tensors must have equal bits
    ignore_missing: bool = False  #: True to accept records that only one run has

    def of(self, key: TensorKey) -> Tolerance:
        """Return the tolerance for a tensor."""
        tolerance = self.default
        for pattern, limit in self.relative:
            if is_module(key.name, pattern):
                tolerance = Tolerance(limit, tolerance.rtol, tolerance.atol)
        return tolerance

    def fails(self, status: str) -> bool:
        """Return whether a status counts as a difference between the runs."""
        if status in (ONLY_A, ONLY_B):
            return not self.ignore_missing
        return status in (DIFFERENT, UNREADABLE) or (self.bitwise and status == EQUAL)


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome for one pair of tensors, or for a record that only one run has."""

    key: TensorKey
    #: Number of the tensor in the order of execution, counted from 0; its parts share the number.
    position: int
    status: str
    #: Records of A and B, with None for a missing one; the first of each if shards were joined.
    rows: tuple[Any, Any]
    joined: bool = False  #: True if the shards of several ranks were joined
    difference: Difference | None = None
    origin: Origin | None = None  #: None for a tensor that no saved operation computes
    why: str = ""  #: reason of the status, if it is UNREADABLE

    @property
    def row(self) -> Any:
        """Record of A, or of B if A has none."""
        return self.rows[0] if self.rows[0] is not None else self.rows[1]

    @property
    def ranks(self) -> str:
        """Ranks of the compared files as text; empty if both runs have a single rank."""
        if self.joined:
            return "shards joined"
        ranks = [None if row is None else row.rank for row in self.rows]
        sizes = [
            1 if row is None or pd.isna(row.world_size) else row.world_size for row in self.rows
        ]
        known = [rank for rank in ranks if rank is not None and not pd.isna(rank)]
        if max(sizes) == 1 or not known:
            return ""
        if len(set(known)) == 1:
            return f"rank {known[0]}"
        return f"rank {known[0]} of A, rank {known[1]} of B"


@dataclass
class Comparison:
    """The two runs, and the rules by which they are compared."""

    a: Side
    b: Side
    rules: Rules
    #: Factor by which the gradients of B are multiplied, because the runs divide the loss of a
    #: micro-batch by different numbers.
    gradient_scale: float = 1.0
    with_origins: bool = True  #: True to split the differences of results by origin
    #: Latest pass for which `_inherited_by_attention` was computed, and the result.
    _attention: tuple[Any, dict[str, Tensor]] = field(init=False, default=(None, {}))

    def keys(self) -> list[TensorKey]:
        """Return the keys of all tensors in the order of execution."""
        order = {key: self.b.order(key) for key in self.b.tensors}
        order |= {key: self.a.order(key) for key in self.a.tensors}
        return sorted(order, key=lambda key: (order[key], str(key)))

    def run(self, keys: Iterable[TensorKey]) -> Iterator[Result]:
        """Compare the tensors with the given keys, and yield the results in this order."""
        for position, key in enumerate(keys):
            yield from self._tensor(key, position)

    def _tensor(self, key: TensorKey, position: int) -> Iterator[Result]:
        for side, status in ((self.a, ONLY_A), (self.b, ONLY_B)):
            other = self.b if side is self.a else self.a
            if key not in other.tensors:
                for number in side.tensors[key]:
                    yield Result(key, position, status, _alone(status, side.rows[number]))
                return
        layouts = self.a.layouts(key) | self.b.layouts(key)
        if len(layouts - {()}) > 1:
            firsts = tuple(side.rows[side.tensors[key][0]] for side in (self.a, self.b))
            yield self._pair(key, position, (firsts[0], firsts[1]), joined=True)
            return
        cells_a, cells_b = (side.cells(key, by_rank=() in layouts) for side in (self.a, self.b))
        for cell in sorted({*cells_a, *cells_b}):
            of_a, of_b = cells_a.get(cell, []), cells_b.get(cell, [])
            if not (of_a and of_b):
                status = ONLY_A if of_a else ONLY_B
                for row in of_a or of_b:
                    yield Result(key, position, status, _alone(status, row))
                continue
            for number in range(max(len(of_a), len(of_b))):
                first, second = (of[number if number < len(of) else 0] for of in (of_a, of_b))
                yield self._pair(key, position, (first, second), joined=False)

    def _pair(
        self, key: TensorKey, position: int, rows: tuple[Any, Any], *, joined: bool
    ) -> Result:
        """Compare one pair of tensors."""
        tolerance = self.rules.of(key)
        try:
            if not joined and rows[0].slice != rows[1].slice:
                raise ValueError(f"slice {rows[1].slice} in B, but {rows[0].slice} in A")
            a, b = self._load(key, rows, joined=joined)
            difference = compare(a, b, tolerance)
        except (UnreadableTensorError, ValueError, RuntimeError) as error:
            why = str(error).partition("\n")[0]
            return Result(key, position, UNREADABLE, rows, joined=joined, why=why)
        status = IDENTICAL if difference.same_bits else EQUAL
        if difference.unequal:
            status = CLOSE if difference.within(tolerance) else DIFFERENT
        origin = None
        if difference.unequal and key.tensor_name in OPERANDS.get(str(key.layer_type), {}):
            origin = self._origin(key, rows, (a, b), joined=joined)
        return Result(
            key, position, status, rows, joined=joined, difference=difference, origin=origin
        )

    def _load(
        self, key: TensorKey, rows: tuple[Any, Any], *, joined: bool
    ) -> tuple[Tensor, Tensor]:
        """Load the tensors of a pair; gradients of B are multiplied by `gradient_scale`."""
        if joined:
            a, b = self.a.load_whole(key), self.b.load_whole(key)
        else:
            a, b = self.a.load(rows[0]), self.b.load(rows[1])
        if self.gradient_scale != 1.0 and key.operation == "backward":
            b = widened(b) * self.gradient_scale
        return a, b

    def _origin(
        self,
        key: TensorKey,
        rows: tuple[Any, Any],
        results: tuple[Tensor, Tensor],
        *,
        joined: bool,
    ) -> Origin | None:
        """Return the origin of a result's difference; None if origins are not requested."""
        if not self.with_origins:
            return None
        try:
            if any(row.slice is not None for row in rows):
                raise UnknownOriginError("only a slice was collected (--collect-slice)")
            if any(row.implementation is not None for row in rows):
                raise UnknownOriginError("computed by Transformer Engine")
            if key.layer_type == "linear":
                operands = self._operands(key, rows, joined=joined)
                return origins.of_linear(str(key.tensor_name), operands, results)
            inherited = self._inherited_by_attention(key, rows, joined=joined)
            return origins.of_attention(inherited[str(key.tensor_name)], results)
        except (UnknownOriginError, NotCheckedError) as error:
            return Origin(unknown=str(error))
        except _IMPOSSIBLE as error:
            line = str(error).partition("\n")[0]
            return Origin(unknown=f"recomputation fails ({type(error).__name__}: {line})")

    def _operands(self, key: TensorKey, rows: tuple[Any, Any], *, joined: bool) -> origins.Tensors:
        """Return the operands of a result in A and B.

        Raises:
            UnknownOriginError: if a run has not saved one of them.
        """
        operands: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for name in OPERANDS[str(key.layer_type)][str(key.tensor_name)]:
            operand = key._replace(
                tensor_name=name,
                phase="pre",
                operation="backward" if name == "grad_output" else "forward",
                batch=None if name == "weight" else key.batch,
                data_rank=0 if name == "weight" else key.data_rank,
            )
            if joined:
                present = [operand in side.tensors for side in (self.a, self.b)]
                own = rows
            else:
                own = (self.a.on_rank(operand, rows[0].rank), self.b.on_rank(operand, rows[1].rank))
                present = [row is not None for row in own]
            if not all(present):
                raise UnknownOriginError(f"no {name} in {'B' if present[0] else 'A'}")
            pair = self._load(operand, own, joined=joined)
            for tensors, tensor in zip(operands, pair, strict=True):
                tensors[name] = tensor
        return operands

    def _inherited_by_attention(
        self, key: TensorKey, rows: tuple[Any, Any], *, joined: bool
    ) -> dict[str, Tensor]:
        """Return the inherited differences of attention's results in the pass of `key`, by name."""
        parallel = [row.cp_size for row in rows]
        if not joined and any(not pd.isna(size) and int(size) > 1 for size in parallel):
            raise UnknownOriginError("context-parallel attention: other ranks hold keys and values")
        backward = key.operation == "backward"
        ranks = (rows[0].rank, rows[1].rank)
        of_pass = (key._replace(tensor_name=None, phase=None), ranks)
        if self._attention[0] != of_pass:
            iteration = int(key.iteration or 0)
            softmax = softmax_of_card(self.a.card, str(key.module), iteration) or Softmax()
            operands = self._operands(key, rows, joined=joined)
            parts = origins.inherited_by_attention(operands, softmax, backward=backward)
            self._attention = (of_pass, parts)
        return self._attention[1]


def _alone(status: str, row: Any) -> tuple[Any, Any]:
    """Return the records of A and B, where None stands for the missing one."""
    return (row, None) if status == ONLY_A else (None, row)
