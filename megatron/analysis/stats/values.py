"""Mergeable statistics of a tensor's values, computed without any number format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.analysis.stats.histogram import Histogram
from megatron.analysis.stats.moments import Moments, merge

#: A channel is an outlier if its amax exceeds this multiple of the amax of the median channel.
OUTLIER = 6.0


@dataclass(frozen=True, slots=True)
class Values:
    """Moments and histogram of a tensor, and the largest finite magnitude per token and channel."""

    moments: Moments
    histogram: Histogram
    token_amax: NDArray[np.float64]  #: amax of each token, indexed by the token dimensions
    channel_amax: NDArray[np.float64]  #: amax of each channel, indexed by the channel dimensions
    channel_zero: NDArray[np.bool_]  #: True for each channel that holds only zeros

    @property
    def outliers(self) -> NDArray[np.int64]:
        """Indices of the channels whose amax exceeds OUTLIER times the median channel's amax."""
        amax = self.channel_amax.ravel()
        return np.flatnonzero(amax > OUTLIER * live_median(amax))

    @property
    def dead_channels(self) -> int:
        """Number of channels that hold only zeros."""
        return int(self.channel_zero.sum()) if self.moments.count else 0


def live_median(amax: NDArray[np.float64]) -> float:
    """Return the median of the nonzero elements of `amax`; zero if all elements are zero.

    In a tensor that is mostly padding, the median of all magnitudes would be zero, and every
    nonzero channel would exceed it.
    """
    live = amax[amax > 0]
    return float(np.median(live)) if len(live) else 0.0


def join(parts: Sequence[Values], axis: int | None, *, zigzag: bool = False) -> Values:
    """Merge the statistics of the shards of a tensor, given in the order of their ranks.

    Args:
        axis: dimension along which the tensor is sharded. None if all shards have the same tokens
            and channels; the larger magnitude is then used.
        zigzag: whether shard r holds the chunks r and 2n - 1 - r of the 2n chunks along the axis.
    """
    first = parts[0]
    token_dims = first.token_amax.ndim
    tokens, channels = [p.token_amax for p in parts], [p.channel_amax for p in parts]
    zero = [part.channel_zero for part in parts]
    by_token = axis is not None and axis < token_dims
    by_channel = None if axis is None or by_token else axis - token_dims
    return Values(
        merge(part.moments for part in parts),
        Histogram(np.sum([part.histogram.counts for part in parts], axis=0)),
        _joined(tokens, axis, zigzag) if by_token and axis is not None else _largest(tokens),
        _largest(channels) if by_channel is None else _joined(channels, by_channel, zigzag),
        np.logical_and.reduce(zero) if by_channel is None else _joined(zero, by_channel, zigzag),
    )


def _joined(parts: list[NDArray[Any]], axis: int, zigzag: bool) -> NDArray[Any]:
    if zigzag:
        halves = [np.array_split(part, 2, axis) for part in parts]
        parts = [half[0] for half in halves] + [half[1] for half in reversed(halves)]
    joined: NDArray[Any] = np.concatenate(parts, axis)
    return joined


def _largest(parts: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    largest: NDArray[np.float64] = np.maximum.reduce(parts)
    return largest
