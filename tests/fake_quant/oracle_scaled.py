"""An independent implementation of formats with scales other than E8M0, in numpy and ml_dtypes.

If a definition prescribes float32 operations, numpy's are used; rounding to a type is always a
search in the table of its numbers. Nothing here is taken from the package.
"""

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .oracle import (
    ML_DTYPES,
    Array,
    code_points,
    fake_quantize_hifloat8,
    round_element,
    round_stochastically,
    round_to_table,
    to_float64,
)

Float32 = NDArray[np.float32]
LARGEST_FLOAT32 = np.finfo(np.float32).max

_BFLOAT16 = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
_E6M2 = np.array([2.0**exponent * (1 + m / 4) for exponent in range(-48, 16) for m in range(4)])
E6M2 = _E6M2[:-1]  #: the code after the last one is NaN


def to_blocks(x: NDArray[np.floating], size: int, *, square: bool = False) -> NDArray[np.floating]:
    """Return a matrix as `[blocks, values]`, with the last block of a row padded by zeros."""
    rows, columns = x.shape
    height = size if square else 1
    padded = np.zeros((-(-rows // height) * height, -(-columns // size) * size), x.dtype)
    padded[:rows, :columns] = x
    blocks = [
        padded[i : i + height, j : j + size].ravel()
        for i in range(0, padded.shape[0], height)
        for j in range(0, padded.shape[1], size)
    ]
    return np.array(blocks)


def from_blocks(
    blocks: NDArray[np.floating], shape: tuple[int, int], size: int, *, square: bool = False
) -> NDArray[np.floating]:
    """Undo `to_blocks`."""
    height = size if square else 1
    x = np.zeros((-(-shape[0] // height) * height, -(-shape[1] // size) * size), blocks.dtype)
    row_of_blocks = x.shape[1] // size
    for number, block in enumerate(blocks):
        i, j = number // row_of_blocks * height, number % row_of_blocks * size
        x[i : i + height, j : j + size] = block.reshape(height, size)
    return x[: shape[0], : shape[1]]


def tensor_scale(x: NDArray[np.floating], target: float) -> np.float32:
    """Return target / (the largest finite magnitude), in float32."""
    finite = np.abs(x[np.isfinite(x)])
    amax = np.float32(finite.max() if finite.size else 0)
    with np.errstate(over="ignore", divide="ignore"):
        return np.float32(1) if amax == 0 else min(np.float32(target) / amax, LARGEST_FLOAT32)


def nvfp4_blocks(
    blocks: Float32, random: NDArray[np.int64] | None = None
) -> tuple[Array, Array, np.float32]:
    """Return E2M1 elements, E4M3 scales (NaN for blocks with NaN or Inf) and the tensor scale."""
    encode = tensor_scale(blocks, 6 * 448)
    decode = np.float32(1) / encode
    special = ~np.isfinite(blocks).all(axis=1)
    finite = np.where(special[:, None], np.float32(0), blocks)
    with np.errstate(over="ignore", divide="ignore"):
        wanted = np.abs(finite).max(axis=1) * (encode * np.float32(1 / 6))
        scale = round_element(to_float64(wanted), "e4m3")
        multiplier = np.minimum(
            np.float32(1) / (scale.astype(np.float32) * decode), LARGEST_FLOAT32
        )
        scaled = finite * multiplier[:, None]
    return (
        round_element(to_float64(scaled), "e2m1", random),
        np.where(special, np.nan, scale),
        decode,
    )


def fake_quantize_nvfp4(
    x: Float32, *, square: bool = False, random: NDArray[np.int64] | None = None
) -> Float32:
    """Quantize a matrix to NVFP4 in blocks along the last axis."""
    if random is not None:
        random = to_blocks(random, 16, square=square)
    elements, scales, decode = nvfp4_blocks(to_blocks(x, 16, square=square), random)
    values = (elements * scales[:, None]).astype(np.float32) * decode
    return from_blocks(values, x.shape, 16, square=square)


def fake_quantize_hifloat4(
    groups: NDArray[np.floating], random: NDArray[np.int64] | None = None
) -> Array:
    """Quantize one group of 64 per row; a group with a NaN or an Inf becomes NaN.

    The arithmetic is exact: the products of float32 and bfloat16 have 32 bits.
    """
    x = to_float64(groups)
    special = ~np.isfinite(x).all(axis=1, keepdims=True)
    x = np.where(special, 0.0, x)
    seventh = round_to_table(np.array(1 / 7), _BFLOAT16, ties="even")
    wanted = round_to_table(np.abs(x).max(axis=1) * seventh, _BFLOAT16, ties="even")
    e6m2 = round_to_table(wanted, E6M2, ties="even")
    reciprocal = round_to_table(1 / e6m2, _BFLOAT16, ties="even")
    scaled = np.abs(x) * reciprocal[:, None]
    power = np.where(_maxima(scaled, 8) >= 4, 2.0, 1.0)
    power *= np.where(_maxima(scaled, 4) / power >= 2, 2.0, 1.0)
    if random is None:
        elements = np.minimum(np.floor(scaled / power * 4 + 0.5), 7) / 4  # half-way cases go up
    else:
        elements = round_stochastically(scaled / power, np.arange(8) / 4, random)
    value = e6m2[:, None] * power * elements
    return np.where(special, np.nan, np.copysign(value, x))


def _maxima(x: Array, size: int) -> Array:
    """Replace each value by the largest of its `size` neighbors."""
    return np.repeat(x.reshape(len(x), -1, size).max(axis=2), size, axis=1)


def fake_quantize_per_tensor(
    x: Float32, element: str, target: float, *, pow2: bool, random: NDArray[np.int64] | None = None
) -> Float32:
    """Quantize with one float32 scale, to a type of ml_dtypes or by HiFloat8's table of codes."""
    encode = tensor_scale(x, target)
    if pow2:
        encode = np.float32(np.ldexp(1.0, np.frexp(np.float64(encode))[1] - 1))
    decode = np.float32(1) / encode
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x * encode
        if element == "hif8":
            elements = fake_quantize_hifloat8(scaled, overflow="saturate", random=random)
        elif random is not None:
            elements = round_element(to_float64(scaled), element, random)
        else:
            largest = np.float32(code_points(element)[-1])
            elements = scaled.clip(-largest, largest).astype(ML_DTYPES[element])
        return elements.astype(np.float32) * decode
