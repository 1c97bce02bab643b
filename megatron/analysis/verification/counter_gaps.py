"""Find gaps in the record numbers (counters) of each rank, which show that records were lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

Range = tuple[int, int]  #: first and last number of a range, both included


def gaps(records: pd.DataFrame) -> dict[int, list[Range]]:
    """Return the missing counters of each rank, as ranges keyed by rank.

    The counters of a rank start at 1 and end at the highest counter in its records. Ranks without
    gaps are left out.
    """
    missing = {}
    numbered = records[records["counter"].notna()]
    for rank, of_rank in numbered.groupby("rank"):
        numbers = np.sort(of_rank["counter"].to_numpy(dtype=np.int64))
        before = np.concatenate([[0], numbers[:-1]])
        ends = np.flatnonzero(numbers - before > 1)
        lost = [(int(before[end]) + 1, int(numbers[end]) - 1) for end in ends]
        if lost:
            missing[int(str(rank))] = lost
    return missing


def within(records: pd.DataFrame, rank: int, ranges: Sequence[Range], iteration: int) -> bool:
    """Return whether a rank lost no records of the iterations before `iteration`.

    This is the case if every missing counter is higher than the counters of those iterations.

    Args:
        ranges: missing counters of the rank, from `gaps`.
    """
    earlier = records[(records["rank"] == rank) & (records["iteration"] < iteration)]
    last = earlier["counter"].max()
    return bool(pd.isna(last) or min(low for low, _ in ranges) > last)


def in_words(ranges: Sequence[Range], most: int = 8) -> str:
    """Format ranges as text, for example (1, 1), (2, 3), (7, 7) as "1-3, 7".

    At most `most` ranges are listed.
    """
    runs: list[list[int]] = []
    for low, high in ranges:
        if runs and low == runs[-1][1] + 1:
            runs[-1][1] = high
        else:
            runs.append([low, high])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")
