"""Serialize results, to cache them or to send them between processes.

The bytes contain only arrays of numbers, so that deserialization cannot run code.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import astuple

import numpy as np
from numpy.typing import NDArray

from megatron.analysis.stats.errors import Errors
from megatron.analysis.stats.histogram import Histogram
from megatron.analysis.stats.moments import Moments
from megatron.analysis.stats.values import Values

MOST = 1 << 32  #: maximum number of elements in one array
VALUES = "values"  #: key of the `Values` of a tensor part; errors have the format name as key


def pack(*arrays: NDArray[np.int64] | NDArray[np.float64]) -> bytes:
    """Serialize arrays to bytes; only nonzero elements are stored if that takes less space."""
    parts = [struct.pack("<I", len(arrays))]
    for array in arrays:
        flat = np.ascontiguousarray(array).ravel()
        nonzero = np.flatnonzero(flat)
        sparse = 12 * len(nonzero) < flat.nbytes
        shape = struct.pack(f"<B{array.ndim}q", array.ndim, *array.shape)
        kind = b"i" if flat.dtype == np.int64 else b"f"
        stored = flat[nonzero] if sparse else flat
        head = struct.pack("<Bq", sparse, len(stored))
        parts += [kind, shape, head, nonzero.astype("<u4").tobytes() if sparse else b""]
        parts.append(stored.tobytes())
    return b"".join(parts)


def unpack(content: bytes) -> list[NDArray[np.int64] | NDArray[np.float64]]:
    """Deserialize the arrays that `pack` serialized."""
    (number,) = struct.unpack_from("<I", content)
    offset, arrays = 4, []
    for _ in range(number):
        dtype = np.dtype(np.int64 if content[offset : offset + 1] == b"i" else np.float64)
        dims = content[offset + 1]
        shape = struct.unpack_from(f"<{dims}q", content, offset + 2)
        offset += 2 + 8 * dims
        sparse, stored = struct.unpack_from("<Bq", content, offset)
        offset += 9
        count = math.prod(shape)
        if min(shape, default=0) < 0 or not 0 <= stored <= count <= MOST:
            raise ValueError(f"{stored} numbers in an array of shape {shape}")
        array = np.zeros(count, dtype)
        index: slice | NDArray[np.uint32] = slice(None)
        if sparse:
            index = np.frombuffer(content, "<u4", stored, offset)
            offset += 4 * stored
        array[index] = np.frombuffer(content, dtype, stored, offset)
        offset += dtype.itemsize * stored
        arrays.append(array.reshape(shape))
    return arrays


def pack_values(values: Values) -> bytes:
    """Serialize the value statistics of a tensor part to bytes."""
    numbers = np.array(astuple(values.moments), np.float64)
    counts = np.array(astuple(values.moments)[:5], np.int64)
    amax = values.token_amax, values.channel_amax
    zero = values.channel_zero.astype(np.int64)
    return pack(counts, numbers[5:], values.histogram.counts, *amax, zero)


def unpack_values(content: bytes) -> Values:
    """Deserialize the statistics that `pack_values` serialized."""
    counts, numbers, histogram, tokens, channels, zero = unpack(content)
    moments = Moments(*counts.tolist(), *numbers.tolist())
    of_channels = channels, zero.astype(np.bool_)
    return Values(moments, Histogram(histogram), tokens, *of_channels)  # type: ignore[arg-type]


def pack_errors(by_axis: dict[str, Errors]) -> bytes:
    """Serialize the errors of one format; `by_axis` is in the order of `format_groups.axes_of`."""
    return pack(*(array for errors in by_axis.values() for array in (errors.ints, errors.floats)))


def unpack_errors(content: bytes, codes: int, axes: Iterable[str]) -> dict[str, Errors]:
    """Deserialize the errors that `pack_errors` serialized.

    Args:
        codes: number of codes of the format's element type.
        axes: axes of the format, in the order of `format_groups.axes_of`.
    """
    arrays = iter(unpack(content))
    return {axis: Errors(codes, next(arrays), next(arrays)) for axis in axes}  # type: ignore[arg-type]
