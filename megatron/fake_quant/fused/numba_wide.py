"""CPU kernel for formats with `BlockScaling` whose blocks have many neighboring columns.

It computes what `numba_blocks.blocks` computes. Because a row of a block consists of whole chunks
of `CHUNK` values, its loops run over one chunk. Their length is a constant, so starting a loop
takes no time, and the factors of a block need not be copied to each of its columns.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from megatron.fake_quant.fused.numba_bits import (
    INFINITY,
    ONE,
    ZERO,
    as_float,
    kernel,
    magnitude,
    nearest,
    widen,
    with_sign,
)
from megatron.fake_quant.fused.numba_blocks import Tile, fill_special
from megatron.fake_quant.fused.numba_compile import inlined
from megatron.fake_quant.fused.numba_elementwise import HALF_16, HIGH_16
from megatron.fake_quant.fused.numba_scales import block_scales

CHUNK = 128  #: number of values in a chunk, enough for several vector registers
LOW_16 = np.int32(0xFFFF)  #: mask of the low half of a word


@inlined
def chunk_maximum(chunk: Any) -> Any:
    """Return the bits of the largest magnitude in a chunk."""
    largest = magnitude(chunk[0])
    for j in range(CHUNK):
        largest = max(largest, magnitude(chunk[j]))
    return widen(largest)


def in_words(values: Any) -> Any:
    """Return an array as int32 words; a word has one float32 value or two bfloat16 values."""
    raise NotImplementedError("only in compiled code")


@overload(in_words, inline="always", strict=False)
def _in_words(values: Any) -> Any:
    if values.dtype == types.int16:
        return lambda values: values.view(np.int32)
    return lambda values: values


@inlined
def quantized(bits: Any, down: Any, up: Any, decode: Any, element: Any) -> Any:
    """Return the float32 bits of the quantized value of `bits`."""
    rounded = nearest(as_float(bits) * down, element)
    return with_sign(np.float32(np.float32(rounded * up) * decode), bits, element)


@inlined
def rounded_16(bits: Any) -> Any:
    """Return a number whose high half is the bfloat16 value nearest to `bits`, ties to even."""
    return np.int32(np.int32(bits + HALF_16) + np.int32((bits >> 16) & 1))


@inlined
def quantize_words(src: Any, dst: Any, down: Any, up: Any, decode: Any, element: Any) -> Any:
    """Quantize the words of a chunk, which have the same factors.

    bfloat16 values stay in the halves of their words, because it takes many operations to move the
    values of a vector register to two registers and back.
    """
    if len(src) == CHUNK:
        for j in range(CHUNK):
            dst[j] = quantized(src[j], down, up, decode, element)
    else:
        for j in range(CHUNK // 2):
            word = src[j]
            low = quantized(np.int32(word << 16), down, up, decode, element)
            high = quantized(np.int32(word & HIGH_16), down, up, decode, element)
            low_half = np.int32(np.int32(rounded_16(low) >> 16) & LOW_16)
            dst[j] = np.int32(low_half | np.int32(rounded_16(high) & HIGH_16))


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
    words = in_words(src).reshape(outers, n, inner // CHUNK, -1)
    written = in_words(dst).reshape(outers, n, inner // CHUNK, -1)
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
                for b in range(count):
                    largest = maxima[b]
                    for c in range(b * together, min((b + 1) * together, chunks)):
                        largest = max(largest, chunk_maximum(row[c]))
                    maxima[b] = largest
            block_scales(maxima, encode, decode, ratio, down, up, count, element, rule)
            for i in range(first, last):
                row = words[outer, i, from_chunk : from_chunk + chunks]
                out = written[outer, i, from_chunk : from_chunk + chunks]
                for b in range(count):
                    for c in range(b * together, min((b + 1) * together, chunks)):
                        quantize_words(row[c], out[c], down[b], up[b], last_factor, element)
            tile = Tile(first, last, left, right, count)
            for b in range(count):
                if maxima[b] >= INFINITY:
                    fill_special(dst[outer], tile, maxima, width)
                    break
