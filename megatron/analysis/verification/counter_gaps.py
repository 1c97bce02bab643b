"""Whether each rank's records are numbered without a gap, which shows that none was lost.

Two runs that write into one folder in the same second can want the same file name. Before the
writer took a later second for it, it took its next number: such a number is not a record that was
lost, but one that another run's file has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

Range = tuple[int, int]  #: from the first number to the last


def gaps(records: pd.DataFrame, others: pd.DataFrame | None = None) -> dict[int, list[Range]]:
    """By rank the numbers that no record has, unless a record of another run explains it.

    Args:
        records: of one run.
        others: of other runs.
    """
    found = {}
    numbered = records[records["counter"].notna()]
    for rank, of_rank in numbered.groupby("rank"):
        ordered = of_rank.sort_values("counter")
        numbers = ordered["counter"].to_numpy(dtype=np.int64)
        before = np.concatenate([[0], numbers[:-1]])
        lost: list[Range] = []
        for at in np.flatnonzero(numbers - before > 1):
            gap = (int(before[at]) + 1, int(numbers[at]) - 1)
            around = ordered.iloc[max(at - 1, 0) : at + 1]
            taken = [] if others is None else _taken(gap, int(str(rank)), around, others)
            lost += _without(gap, taken)
        if lost:
            found[int(str(rank))] = lost
    return found


def _taken(gap: Range, rank: int, around: pd.DataFrame, others: pd.DataFrame) -> list[int]:
    """The numbers of a gap that files of other runs have: of the same rank and folder, and of the
    time between the records around the gap.
    """
    times = around["timestamp"].dropna()
    near = others[(others["rank"] == rank) & others["counter"].between(*gap)]
    near = near[near["timestamp"].notna()]
    near = near[near["timestamp"].between(times.min(), times.max())]
    folder = Path(around["path"].iloc[0]).parent
    same = [Path(path).parent == folder for path in near["path"]]
    return sorted({int(number) for number in near["counter"][same]})


def _without(gap: Range, taken: Sequence[int]) -> Iterator[Range]:
    """What is left of a gap."""
    low = gap[0]
    for number in [*taken, gap[1] + 1]:
        if number > low:
            yield low, number - 1
        low = number + 1


def within(records: pd.DataFrame, rank: int, found: Sequence[Range], iteration: int) -> bool:
    """Whether all gaps of a rank lie behind its records of earlier iterations."""
    earlier = records[(records["rank"] == rank) & (records["iteration"] < iteration)]
    last = earlier["counter"].max()
    return bool(pd.isna(last) or min(low for low, _ in found) > last)


def in_words(ranges: Sequence[Range], most: int = 8) -> str:
    """(1, 1), (2, 3), (7, 7) as 1-3, 7."""
    runs: list[list[int]] = []
    for low, high in ranges:
        if runs and low == runs[-1][1] + 1:
            runs[-1][1] = high
        else:
            runs.append([low, high])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")
