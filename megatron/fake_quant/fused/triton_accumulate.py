"""GPU kernel that sums dot products as matrix units do; see `accumulate/scalar.py`.

This is the counterpart of `numba_accumulate.py`. A program computes one tile of the result. Sums of
products are integers, so that neither the order of a sum nor the fusion of a product and a sum can
change a result. Once per step, a sum is converted to float64, which represents it exactly, and
rounded there. `triton_float64.py` has the operations on single numbers.

In the design "fused", `near_step` multiplies, aligns and truncates in float32, without rounding
errors. `fused_step` computes with integers, which takes several times as long. It is used for tiles
with elements that are so large, so small or so long that float32 numbers could not represent their
products. Each of the two is compiled into its own kernel, because a kernel with both would need
more registers; both are launched, and each skips the tiles of the other.

Numbers are represented by integers: a number x with F fractional bits is the integer x * 2^F.
"""

import triton.language as tl

from megatron.fake_quant.accumulate import accumulator
from megatron.fake_quant.fused.triton_bits import NAN, as_bits, as_float, compiled
from megatron.fake_quant.fused.triton_float64 import (
    FLOAT32_BITS,
    decode,
    floored,
    power,
    rounded,
    sum_to_odd,
    truncated,
    undefined,
)

LOWEST = tl.constexpr(5 * accumulator.ZERO_EXPONENT)  #: exponent below that of every product
ZERO = tl.constexpr(accumulator.ZERO_EXPONENT)
IGNORED = tl.constexpr(accumulator.IGNORED_EXPONENT)
GROUP = tl.constexpr(accumulator.GROUP)
STAGE_BITS = tl.constexpr(accumulator.STAGE_BITS)
RUNNING_BITS = tl.constexpr(accumulator.RUNNING_BITS)
#: Fractional bits of the significand of a scale, and of the product of two E2M1 elements, which are
#: multiples of one half.
SCALE_BITS, HALVES = tl.constexpr(3), tl.constexpr(2)


@compiled
def loaded(
    a: tl.tensor, b: tl.tensor, inside: tl.tensor, exists: tl.tensor, OTHER: tl.constexpr
) -> tl.tensor:
    """Return the numbers at pointers to both operands; OTHER where there is no row or element."""
    x = tl.load(a, mask=inside[0] & exists, other=OTHER)
    y = tl.load(b, mask=inside[1] & exists, other=OTHER)
    return x, y


@compiled
def largest_exponent(
    a: tl.tensor,
    b: tl.tensor,
    inside: tl.tensor,
    strides: tl.tensor,
    smallest: tl.tensor,
    left: tl.tensor,
    top: tl.tensor,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    STEP: tl.constexpr,
    OF_ZERO: tl.constexpr,
) -> tl.tensor:
    """Return the largest of `top` and the exponents of the products of one part of a step.

    The products are those with the numbers PART, PART + PARTS, ... below `left`, the number of
    products that remain.

    a, b: pointers to the step's first elements; `inside` has the masks of both and `strides` the
        distances to the next elements.
    OF_ZERO: exponent of a zero element.
    """
    a += PART * strides[0]
    b += PART * strides[1]
    for i in range(PART, STEP, PARTS):
        x, y = loaded(a, b, inside, i < left, 0.0)
        p, q = decode(x, smallest[0], 23, OF_ZERO)[1], decode(y, smallest[1], 23, OF_ZERO)[1]
        top = tl.maximum(top, p[:, None] + q[None, :])
        a += PARTS * strides[0]
        b += PARTS * strides[1]
    return top


@compiled
def truncated_sum(
    a: tl.tensor,
    b: tl.tensor,
    inside: tl.tensor,
    strides: tl.tensor,
    smallest: tl.tensor,
    left: tl.tensor,
    top: tl.tensor,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,
    BITS: tl.constexpr,
    OF_ZERO: tl.constexpr,
) -> tl.tensor:
    """Return the sum of the truncated products of one part of a step, in units of 2^(top - ALIGN).

    top: exponents to which the products are aligned. The sum is int64.
    BITS: largest number of mantissa bits of an element. Up to 10, products are int32.
    OF_ZERO: exponent of an element of zero.
    """
    TERM: tl.constexpr = tl.int32 if BITS <= 10 else tl.int64
    UP: tl.constexpr = max(ALIGN - 2 * BITS, 0)
    DOWN: tl.constexpr = max(2 * BITS - ALIGN, 0)
    total = tl.zeros(top.shape, tl.int64)
    a += PART * strides[0]
    b += PART * strides[1]
    for i in range(PART, STEP, PARTS):
        x, y = loaded(a, b, inside, i < left, 0.0)
        u, p = decode(x, smallest[0], BITS, OF_ZERO)
        v, q = decode(y, smallest[1], BITS, OF_ZERO)
        product = (u.to(TERM)[:, None] * v.to(TERM)[None, :]) << UP
        shift = top - (p[:, None] + q[None, :]) + DOWN
        total += truncated(product, shift, 31 if BITS <= 10 else 63).to(tl.int64)
        a += PARTS * strides[0]
        b += PARTS * strides[1]
    return total


@compiled
def decode_sum(running: tl.tensor, SMALLEST: tl.constexpr) -> tl.tensor:
    """Return the integer significands and the exponents of sums, and the exponents for alignment.

    A number below the smallest normal number of the sum's type, 2^SMALLEST, is aligned by SMALLEST.
    Its significand keeps all bits of a float32 number, because the value before the first step can
    be any float32 number.
    """
    start, unit = decode(running, -126, FLOAT32_BITS, ZERO)
    return start, unit, tl.where(start == 0, ZERO, tl.maximum(unit, SMALLEST))


@compiled
def with_running(
    total: tl.tensor, start: tl.tensor, unit: tl.tensor, top: tl.tensor, ALIGN: tl.constexpr
) -> tl.tensor:
    """Return the float64 sum of `total` * 2^(top - ALIGN) and a truncated running sum.

    start: significand of the running sum; `unit` is its exponent.
    """
    UP: tl.constexpr = max(ALIGN - FLOAT32_BITS, 0)
    DOWN: tl.constexpr = max(FLOAT32_BITS - ALIGN, 0)
    total += truncated(start.to(tl.int64) << UP, top - unit + DOWN, 63)
    return total.to(tl.float64) * power(top - ALIGN)


@compiled
def fused_step(
    a: tl.tensor,
    b: tl.tensor,
    inside: tl.tensor,
    strides: tl.tensor,
    smallest: tl.tensor,
    left: tl.tensor,
    start: tl.tensor,
    unit: tl.tensor,
    own: tl.tensor,
    shift: tl.tensor,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """Return the running sum after a step of the design "fused", before it is rounded.

    start, unit, own: the running sum; see `decode_sum`.
    shift: exponents of the block scales; a step has at most one block scale per operand.
    """
    top = largest_exponent(a, b, inside, strides, smallest, left, own - shift, 0, 1, STEP, IGNORED)
    total = truncated_sum(
        a, b, inside, strides, smallest, left, top, 0, 1, STEP, ALIGN, BITS, IGNORED
    )
    return with_running(total, start, unit, top + shift, ALIGN)


@compiled
def near_step(
    a: tl.tensor,
    b: tl.tensor,
    powers_a: tl.tensor,
    powers_b: tl.tensor,
    strides: tl.tensor,
    start: tl.tensor,
    unit: tl.tensor,
    own: tl.tensor,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,
) -> tl.tensor:
    """Return what `fused_step` returns without block scales, for elements that are not far from 1.

    Nonzero elements must have magnitudes from `triton_accumulate_launch.NEAR[0]` to NEAR[1] and at
    most 10 mantissa bits, so that float32 numbers represent their products exactly. A product that
    is multiplied by a power of two remains exact unless it underflows, and then it is less than one
    unit of 2^(top - ALIGN). The conversion to an integer truncates it. The last step must be padded
    with zeros.

    powers_a, powers_b: pointers to 2^e for the exponent e of each element, and to 0 for a zero.
    """
    UNROLL: tl.constexpr = 4 if STEP % 4 == 0 else 1
    highest = tl.zeros(own.shape, tl.float32)
    for _ in range(STEP // UNROLL):
        for _ in tl.static_range(UNROLL):
            highest = tl.maximum(highest, tl.load(powers_a)[:, None] * tl.load(powers_b)[None, :])
            powers_a += strides[0]
            powers_b += strides[1]
    # If all products are zero, `highest` is 0, and its field stands for the exponent -127, which is
    # below every exponent of a running sum.
    top = tl.maximum(own, (as_bits(highest) >> 23) - 127)
    factor = as_float((tl.minimum(ALIGN - top, 127) + 127) << 23)
    # A term is an integer whose magnitude is below 2^(ALIGN + 2).
    total = tl.zeros(own.shape, tl.int32 if STEP <= 1 << (29 - ALIGN) else tl.int64)
    for _ in range(STEP // UNROLL):
        for _ in tl.static_range(UNROLL):
            product = tl.load(a)[:, None] * tl.load(b)[None, :]
            total += (product * factor).to(tl.int32)
            a += strides[0]
            b += strides[1]
    return with_running(total.to(tl.int64), start, unit, top, ALIGN)


@compiled
def group_sum(
    a: tl.tensor, b: tl.tensor, inside: tl.tensor, strides: tl.tensor, left: tl.tensor
) -> tl.tensor:
    """Return the exact sum of a group of products of E2M1 elements, in units of 1/4, as int64."""
    total = tl.zeros([a.shape[0], b.shape[0]], tl.int32)
    for i in range(GROUP):
        x, y = loaded(a, b, inside, i < left, 0.0)
        total += (x * 2).to(tl.int32)[:, None] * (y * 2).to(tl.int32)[None, :]
        a += strides[0]
        b += strides[1]
    return total.to(tl.int64)


@compiled
def grouped_step(
    a: tl.tensor,
    b: tl.tensor,
    scales: tl.tensor,
    shifts: tl.tensor,
    inside: tl.tensor,
    strides: tl.tensor,
    left: tl.tensor,
    start: tl.tensor,
    unit: tl.tensor,
    own: tl.tensor,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the running sum after a step of the design "grouped", before it is rounded.

    scales, shifts: pointers to the significands and exponents of the step's first block scales.
    """
    top = own
    for group in tl.static_range(STEP // GROUP):
        # A group beyond the last product has scales of 0, which have the lowest exponent.
        exists, block = group * GROUP < left, group * GROUP // BLOCK
        p_at, q_at = shifts[0] + block * strides[0], shifts[1] + block * strides[1]
        p, q = loaded(p_at, q_at, inside, exists, ZERO)
        top = tl.maximum(top, p[:, None] + q[None, :])
    total = tl.zeros(own.shape, tl.int64)
    for group in tl.static_range(STEP // GROUP):
        first, block = group * GROUP, group * GROUP // BLOCK
        exists = first < left
        p_at, q_at = shifts[0] + block * strides[0], shifts[1] + block * strides[1]
        p, q = loaded(p_at, q_at, inside, exists, ZERO)
        x_at, y_at = scales[0] + block * strides[0], scales[1] + block * strides[1]
        x, y = loaded(x_at, y_at, inside, exists, 0)
        x_at, y_at = a + first * strides[0], b + first * strides[1]
        term = group_sum(x_at, y_at, inside, strides, left - first)
        term = (term * (x[:, None] * y[None, :])) << (ALIGN - HALVES - 2 * SCALE_BITS)
        total += truncated(term, top - (p[:, None] + q[None, :]), 63)
    return with_running(total, start, unit, top, ALIGN)


@compiled
def two_stage_step(
    a: tl.tensor,
    b: tl.tensor,
    inside: tl.tensor,
    strides: tl.tensor,
    smallest: tl.tensor,
    left: tl.tensor,
    start: tl.tensor,
    unit: tl.tensor,
    own: tl.tensor,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """Return the running sum after a step of the design "two_stage", before it is rounded."""
    top = tl.full(own.shape, LOWEST, tl.int32)
    total = tl.zeros(own.shape, tl.int64)
    for part in tl.static_range(PARTS):
        first = tl.full(own.shape, LOWEST, tl.int32)
        first = largest_exponent(
            a, b, inside, strides, smallest, left, first, part, PARTS, STEP, ZERO
        )
        addend = truncated_sum(
            a, b, inside, strides, smallest, left, first, part, PARTS, STEP, ALIGN, BITS, ZERO
        )
        both = tl.maximum(top, first)
        total = floored(total, both - top) + floored(addend, both - first)
        top = both
    both = tl.maximum(top, own)
    kept = floored(start.to(tl.int64) << (RUNNING_BITS - FLOAT32_BITS), both - unit)
    if PARTS > 1:  # A running sum that is too small counts as 0, even if it is negative.
        kept = tl.where(own < both - (RUNNING_BITS + 1), 0, kept)
    total = floored(total << (STAGE_BITS - ALIGN), both - top)
    total += kept << (STAGE_BITS - RUNNING_BITS)
    return total.to(tl.float64) * power(both - STAGE_BITS)


@compiled
def special_sums(
    a: tl.tensor,
    b: tl.tensor,
    inside: tl.tensor,
    strides: tl.tensor,
    left: tl.tensor,
    running: tl.tensor,
    STEP: tl.constexpr,
) -> tl.tensor:
    """Return two sums over the terms of a step that are NaN or Inf; a sum of no terms is 0.

    The first sum adds the running sum and the products of NaN or Inf elements, the second one the
    products of finite elements that overflow.
    """
    special = tl.where(undefined(running), running, 0.0)
    overflow = tl.zeros(running.shape, tl.float32)
    for i in range(STEP):
        x, y = loaded(a, b, inside, i < left, 0.0)
        product = x[:, None] * y[None, :]
        given = undefined(x)[:, None] | undefined(y)[None, :]
        special += tl.where(given, product, 0.0)
        overflow += tl.where(undefined(product) & (given == 0), product, 0.0)
        a += strides[0]
        b += strides[1]
    return special, overflow


@compiled
def sums(
    a: tl.tensor,
    b: tl.tensor,
    powers_a: tl.tensor,
    powers_b: tl.tensor,
    flags_a: tl.tensor,
    flags_b: tl.tensor,
    scales_a: tl.tensor,
    scales_b: tl.tensor,
    shifts_a: tl.tensor,
    shifts_b: tl.tensor,
    out: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    blocks: tl.tensor,
    smallest_a: tl.tensor,
    smallest_b: tl.tensor,
    DESIGN: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    NEAREST: tl.constexpr,
    SECOND_MANTISSA: tl.constexpr,
    SECOND_SMALLEST: tl.constexpr,
    SECOND_LARGEST: tl.constexpr,
    SECOND_NEAREST: tl.constexpr,
    CONTINUED: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
) -> tl.tensor:
    """Compute one tile of `out` `[batch, M, N]`, where M is `height` and N is `width`.

    Args:
        a, b: elements, `[batch, K', M]` and `[batch, K', N]`; K' is K = `depth` rounded up to a
            multiple of STEP, and the additional elements are zero.
        powers_a, powers_b: float32 arrays like `a` and `b` with 2^e for the exponent e of each
            element, and 0 for zeros; read only by `near_step`.
        flags_a, flags_b: `[batch, M]` and `[batch, N]`: 2 for each row of an operand with an
            element that is NaN, Inf or so large that a product may overflow; 1 for other rows with
            an element that `near_step` does not accept; 0 for all other rows.
        scales_a, scales_b: float32 scales of each promotion, or significands of block scales as
            int32, times 2^SCALE_BITS, `[batch, blocks, M]` and `[batch, blocks, N]`.
        shifts_a, shifts_b: exponents of block scales.
        DESIGN: design of the accumulator; "chained" if terms are not truncated.
        SCALES: use of the block scales; see `Accumulator.scales`. There is a promotion after BLOCK
            products if it is "promotion".
        BLOCK: elements per block scale; 1 if there are none.
        NEAR: True to compute tiles without flags, with `near_step`.
        FAR: True to compute tiles with flags. If both are True, all tiles are computed in the same
            way, without `near_step`.
        CONTINUED: True if the sums begin with the values in `out`, False if they begin with zero.
    """
    tiles_n = tl.cdiv(width, TILE_N)
    tile = tl.program_id(0) // tiles_n
    tiles_m = tl.cdiv(height, TILE_M)
    batch = (tile // tiles_m).to(tl.int64)
    m = (tile % tiles_m) * TILE_M + tl.arange(0, TILE_M)
    n = (tl.program_id(0) % tiles_n) * TILE_N + tl.arange(0, TILE_N)
    inside, strides, smallest = (m < height, n < width), (height, width), (smallest_a, smallest_b)
    flags = tl.max(tl.load(flags_a + batch * height + m, mask=inside[0], other=0), axis=0)
    flags |= tl.max(tl.load(flags_b + batch * width + n, mask=inside[1], other=0), axis=0)
    if not FAR:  # noqa: SIM102 # Triton decides this at compile time
        if flags > 0:
            return
    if not NEAR:  # noqa: SIM102
        if flags == 0:
            return
    padded = tl.cdiv(depth, STEP) * STEP
    if not FAR:  # Rows beyond the matrix are replaced by its last row, so that loads need no mask.
        powers_a += batch * padded * height + tl.minimum(m, height - 1)
        powers_b += batch * padded * width + tl.minimum(n, width - 1)
        a += batch * padded * height + tl.minimum(m, height - 1)
        b += batch * padded * width + tl.minimum(n, width - 1)
    else:
        a += batch * padded * height + m
        b += batch * padded * width + n
    scales_a += batch * blocks * height + m
    scales_b += batch * blocks * width + n
    shifts_a += batch * blocks * height + m
    shifts_b += batch * blocks * width + n

    places = (batch * height + m)[:, None] * width + n[None, :]
    within = inside[0][:, None] & inside[1][None, :]
    running = tl.zeros([TILE_M, TILE_N], tl.float32)
    second = tl.zeros([TILE_M, TILE_N], tl.float32)
    if CONTINUED:
        first = tl.load(out + places, mask=within, other=0.0)
        if SCALES == "promotion":
            second = first
        else:
            running = first
    for done in range(0, depth, STEP):
        left, block = depth - done, done // BLOCK
        scales = (scales_a + block * height, scales_b + block * width)
        shifts = (shifts_a + block * height, shifts_b + block * width)
        special = tl.where(undefined(running), running, 0.0)
        if FAR and flags > 1:
            special, overflow = special_sums(a, b, inside, strides, left, running, STEP)
            if DESIGN == "two_stage":
                special = tl.where(undefined(special), special, overflow)
        start, unit, own = decode_sum(running, SMALLEST)
        if DESIGN == "chained":
            x = tl.load(a, mask=inside[0], other=0.0).to(tl.float64)
            y = tl.load(b, mask=inside[1], other=0.0).to(tl.float64)
            value = sum_to_odd(running.to(tl.float64), x[:, None] * y[None, :])
        elif DESIGN == "two_stage":
            value = two_stage_step(
                a, b, inside, strides, smallest, left, start, unit, own, STEP, PARTS, ALIGN, BITS
            )
        elif DESIGN == "grouped":
            value = grouped_step(
                a, b, scales, shifts, inside, strides, left, start, unit, own, STEP, ALIGN, BLOCK
            )
        else:
            shift = tl.zeros([TILE_M, TILE_N], tl.int32)
            if SCALES == "exponents":
                p = tl.load(shifts[0], mask=inside[0], other=0)
                shift = p[:, None] + tl.load(shifts[1], mask=inside[1], other=0)[None, :]
            if FAR:
                value = fused_step(
                    a,
                    b,
                    inside,
                    strides,
                    smallest,
                    left,
                    start,
                    unit,
                    own,
                    shift,
                    STEP,
                    ALIGN,
                    BITS,
                )
            else:
                value = near_step(a, b, powers_a, powers_b, strides, start, unit, own, STEP, ALIGN)
                powers_a += STEP * height
                powers_b += STEP * width
        usual = rounded(value, MANTISSA, SMALLEST, LARGEST, NEAREST)
        if DESIGN != "two_stage":
            usual = tl.where(usual == 0, 0.0, usual)  # turns -0 into +0
        running = tl.where(undefined(special), special, usual)
        if SCALES == "promotion":
            due = ((done + STEP) % BLOCK == 0) | (left <= STEP)
            if due:
                p = tl.load(scales[0], mask=inside[0], other=0.0)
                q = tl.load(scales[1], mask=inside[1], other=0.0)
                product = running.to(tl.float64) * (p[:, None] * q[None, :]).to(tl.float64)
                usual = rounded(
                    sum_to_odd(product, second.to(tl.float64)),
                    SECOND_MANTISSA,
                    SECOND_SMALLEST,
                    SECOND_LARGEST,
                    SECOND_NEAREST,
                )
                plain = product + second.to(tl.float64)
                finite = tl.abs(plain) < float("inf")
                second = tl.where(finite, usual, plain.to(tl.float32))
                running = tl.zeros([TILE_M, TILE_N], tl.float32)
        a += STEP * height
        b += STEP * width
    result = second if SCALES == "promotion" else running
    result = as_float(tl.where(result != result, NAN, as_bits(result)))
    tl.store(out + places, result, mask=within)
