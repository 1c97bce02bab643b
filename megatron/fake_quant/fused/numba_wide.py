"""CPU kernel for formats with `BlockScaling` whose blocks have many neighboring columns.

It computes what `numba_blocks.blocks` computes. As a row of a block consists of whole chunks of
`CHUNK` values, its loops run over one chunk. Their length is a constant, so starting a loop takes
no time, and the factors of a block need not be copied to each of its columns.
"""

from typing import Any

import numpy as np

from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    ONE,
    ZERO,
    as_float,
    kernel,
    magnitude,
    narrow,
    nearest,
    widen,
    with_sign,
)
from megatron.fake_quant.fused.numba_blocks import Tile, fill_special
from megatron.fake_quant.fused.numba_compile import inlined
from megatron.fake_quant.fused.numba_scales import block_scales

CHUNK = 128  #: number of values in a chunk, enough for several vector registers


@inlined
def chunk_maximum(chunk: Any) -> Any:
    """Return the bits of the largest magnitude in a chunk."""
    largest = magnitude(chunk[0])
    for j in range(CHUNK):
        largest = max(largest, magnitude(chunk[j]))
    return widen(largest)


@inlined
def quantize_chunk(src: Any, dst: Any, down: Any, up: Any, decode: Any, element: Any) -> Any:
    """Quantize the values of a chunk, which have the same factors."""
    for j in range(CHUNK):
        bits = widen(src[j])
        rounded = nearest(as_float(bits) * down, element)
        value = np.float32(np.float32(rounded * up) * decode)
        dst[j] = narrow(with_sign(value, bits, element), dst[j])


@kernel
def wide_blocks(
    src: Any, dst: Any, tiling: Any, element: Any, rule: Any, start: Any, stop: Any
) -> None:
    """Quantize the items `start` to `stop - 1` of an `[outer, n, inner]` array.

    Items are those of `numba_blocks.blocks`. `inner` and the widths of blocks and of tiles are
    multiples of `CHUNK`.
    """
    outers, n, inner = src.shape
    read = src.reshape(outers, n, inner // CHUNK, CHUNK)
    written = dst.reshape(outers, n, inner // CHUNK, CHUNK)
    height, width, span = tiling.height, tiling.width, tiling.columns
    limit, together = (span + width - 1) // width, width // CHUNK
    bands = (n + height - 1) // height
    strip = (inner + span * tiling.strips - 1) // (span * tiling.strips) * span
    maxima, ratio = np.empty(limit, np.int32), np.full(limit, ONE)
    encode, decode = np.full(limit, rule.encode), np.full(limit, rule.decode)
    down, up = np.empty(limit, np.float32), np.empty(limit, np.float32)
    last_factor = ONE if rule.apart else rule.decode
    for item in range(start, stop):
        outer, first = item // tiling.strips // bands, item // tiling.strips % bands * height
        last, begin = min(first + height, n), item % tiling.strips * strip
        for left in range(begin, min(begin + strip, inner), span):
            right = min(left + span, inner)
            count = (right - left + width - 1) // width
            chunks, from_chunk = (right - left) // CHUNK, left // CHUNK
            maxima[:count] = ZERO
            for i in range(first, last):
                row = read[outer, i, from_chunk : from_chunk + chunks]
                for c in range(len(row)):
                    block = c // together
                    maxima[block] = max(maxima[block], chunk_maximum(row[c]))
            block_scales(maxima, encode, decode, ratio, down, up, count, element, rule)
            for i in range(first, last):
                row = read[outer, i, from_chunk : from_chunk + chunks]
                out = written[outer, i, from_chunk : from_chunk + chunks]
                for c in range(len(row)):
                    block = c // together
                    quantize_chunk(row[c], out[c], down[block], up[block], last_factor, element)
            tile = Tile(first, last, left, right, count)
            for b in range(count):
                if maxima[b] >= INFINITY:
                    fill_special(dst[outer], tile, maxima, width)
                    break
