"""Compute block scales stored as 8-bit floats, as in NVFP4, and the outer (second-level) scales.

The 8-bit floating-point types are E4M3, UE5M3 and E6M2. An outer scale is shared by many blocks, on
top of their block scales; in NVFP4, it is the tensor scale.

Let a be the largest magnitude of the values that share an outer scale (in NVFP4, the tensor), b the
largest magnitude of a block, top the largest number of the element type times the headroom, and
bound the largest block scale. With E4M3 scales:

    encode = top * bound / a        maps the largest value to the format's largest number
    decode = 1 / encode
    s      = E4M3(b / top * encode) the block's scale, saturating at 448
    code   = element(x * m)         m = 1 / (s * decode)
    value  = (code * s) * decode    the first product is exact

Each operation is rounded to float32. For NVFP4 (arXiv 2509.25149, appendix B), s is
E4M3(b * (encode * float32(1/6))), as in Transformer Engine. The codes and scales of its kernels are
reproduced bit for bit for finite tensors. The paper writes b / 6 * encode, which sometimes differs
in the last bit; this is the order of fouroversix, which every other E4M3 format here follows.

With a search (4/6), s has a second candidate, E4M3(b / 6 * encode * 1.5), which maps the maximum to
4 instead of 6. The candidate with the smaller error is chosen, and the first one if both errors are
equal. The error is the sum of |value - x| (MAE) or of its square (MSE), where value is computed as
code * s * a / (top * bound). This is Transformer Engine's order. The search rounds codes to
nearest, whatever the format's rounding mode. fouroversix adds in the order of torch's `sum`, so it
can choose the other candidate if errors differ by less than float32 resolves.

If a is above 2^128 / (top * bound), the product code * s * a can exceed float32. If both errors are
then Inf, the first candidate is chosen.

With UE5M3 scales (AMD-FP4), the order is that of AMD's ALTO, which divides:

    outer  = a / (top * bound), at least 1e-30
    s      = UE5M3(b / outer / top), at least the smallest positive scale
    code   = element(x / (s * outer))
    value  = code * (s * outer)

Without an outer scale, encode, decode and outer are 1.

If an E4M3 scale underflows to 0, its block becomes zeros; m is clamped to the largest float32, so
that the codes of the block are not NaN. A tensor of zeros has encode = 1.

The reference implementations do not define the result for NaN and Inf. Here, as in MX, either one
makes its block NaN, by the NaN code of the scale, and is ignored when a is computed. (In
Transformer Engine, one NaN makes every block's scale NaN.)

With tensor parallelism, a is the maximum of the tensor that `fake_quantize` receives, such as the
shard of a weight, unless the caller gives a different a, as with `:global`. Blocks beyond a given a
saturate.
"""

import torch
from torch import Tensor

from megatron.fake_quant.block_scaling import WHOLE_AXIS, BlockScaling
from megatron.fake_quant.code_points import encode
from megatron.fake_quant.elements import E2M1, E4M3, ElementFormat
from megatron.fake_quant.float32_bits import INFINITY, MAGNITUDE
from megatron.fake_quant.formats import Format
from megatron.fake_quant.rounding import round_to
from megatron.fake_quant.scales import ScaleDescription, Scales, block_shape, brief_shape
from megatron.fake_quant.scalings.float8_types import (
    E4M3_NAN,
    FLOAT8,
    NAN_BYTE,
    decoded,
    unsigned_numbers,
)
from megatron.fake_quant.scalings.tensor_scale import FLOAT32_MAX, divide_by

SIXTH = torch.tensor(1 / E2M1.max, dtype=torch.float32, device="cpu")
#: Largest first candidate if each block scale is chosen between two candidates ("4/6"). The second
#: candidate is 1.5 times as large: at most 384, which is also an E4M3 number.
SEARCH_BOUND = 256.0
WIDER = 1.5  #: ratio of the two candidates for a block scale ("4/6"): 6 / 4
SMALLEST_OUTER = 1e-30  #: smallest outer scale if the block scales are UE5M3, as in AMD's ALTO


def top(scaling: BlockScaling, element: ElementFormat) -> float:
    """Return the number to which the maximum of a block is mapped."""
    return (scaling.top or element.max) * scaling.share


def bound(scaling: BlockScaling) -> float:
    """Return the scale that the block with the largest maximum gets if there is an outer scale.

    With a search, it is the first candidate for this scale.
    """
    if scaling.bound is not None:
        return scaling.bound
    return FLOAT8[scaling.scale].element.max if scaling.search == "none" else SEARCH_BOUND


def target(scaling: BlockScaling, element: ElementFormat) -> float:
    """Return the number to which an outer scale maps the largest magnitude of its values."""
    return (scaling.top or element.max) * bound(scaling) * scaling.share


def folds(scaling: BlockScaling, element: ElementFormat) -> bool:
    """Return whether the factor `encode` is multiplied by 1/6, as in Transformer Engine's NVFP4.

    Otherwise, the maximum of each block is divided by `top` before it is multiplied by `encode`.
    The module's docstring defines `encode` and `top`.
    """
    plain = (scaling.top, scaling.headroom, scaling.search) == (None, "1", "none")
    return plain and element == E2M1 and scaling.scale == "e4m3" and scaling.outer != "none"


def _outer_amax(blocks: Tensor, scaling: BlockScaling) -> Tensor:
    """Return the largest finite magnitude of the values that share each outer scale."""
    magnitude = blocks.view(torch.int32) & MAGNITUDE
    magnitude.masked_fill_(magnitude >= INFINITY, 0)
    if scaling.outer == "tensor":
        return magnitude.amax().view(torch.float32)
    amax = magnitude.amax(-1).view(torch.float32)
    if scaling.outer == "row":
        return amax.amax(-1, keepdim=True)
    count = _blocks_per_group(scaling)
    padded = torch.nn.functional.pad(amax, (0, -amax.shape[-1] % count))
    return torch.unflatten(padded, -1, (-1, count)).amax(-1)


def _blocks_per_group(scaling: BlockScaling) -> int:
    assert scaling.outer_size is not None
    return scaling.outer_size // scaling.size


def _per_block(outer: Tensor, scaling: BlockScaling, like: Tensor) -> Tensor:
    """Return `outer` (one number per outer scale) in a shape that broadcasts to one per block."""
    if scaling.outer in ("tensor", "row"):
        return outer
    return outer.repeat_interleave(_blocks_per_group(scaling), -1)[..., : like.shape[-1]]


def scale_down(
    blocks: Tensor, element: ElementFormat, scaling: BlockScaling, *, amax: Tensor | None = None
) -> tuple[Tensor, Scales]:
    """Return the blocks scaled to the element type's range, and the scales of both levels.

    The outer scales are computed from `amax`, or from the largest magnitudes of their values.
    """
    if amax is None and scaling.outer != "none":
        amax = _outer_amax(blocks, scaling)
    compute = _multiplied if scaling.scale == "e4m3" else _divided
    return compute(blocks, element, scaling, amax)


def _multiplied(
    blocks: Tensor, element: ElementFormat, scaling: BlockScaling, outer_amax: Tensor | None
) -> tuple[Tensor, Scales]:
    """Scale blocks with E4M3 scales: multiply by reciprocals, in NVIDIA's order of operations."""
    amax = blocks.abs().amax(-1)
    encoding, decoding, stored = _encoding(amax, outer_amax, element, scaling)
    if folds(scaling, element):
        wanted = amax * (encoding * SIXTH.to(amax.device))
    else:
        wanted = torch.div(amax, torch.full_like(amax, top(scaling, element))) * encoding
    block_scales = round_to(wanted, E4M3)
    if scaling.search != "none":
        wider = round_to(wanted * WIDER, E4M3)
        errors = [
            _error(blocks, candidate, decoding, outer_amax, element, scaling)
            for candidate in (wider, block_scales)
        ]
        block_scales = torch.where(errors[0] < errors[1], wider, block_scales)
    codes = encode(block_scales, E4M3).masked_fill_(~amax.isfinite(), E4M3_NAN)
    return blocks * _multiplier(block_scales, decoding), Scales(codes, stored)


def _multiplier(block_scales: Tensor, decoding: Tensor) -> Tensor:
    multiplier = (block_scales * decoding).reciprocal_().clamp_(max=FLOAT32_MAX)
    return multiplier.unsqueeze(-1)


def _error(
    blocks: Tensor,
    block_scales: Tensor,
    decoding: Tensor,
    outer_amax: Tensor | None,
    element: ElementFormat,
    scaling: BlockScaling,
) -> Tensor:
    """Return the quantization error of each block with the candidate scales `block_scales`.

    Each product and sum is rounded to float32, in Transformer Engine's order: the values of a row
    are added one by one, and the rows of a block are added in halves.
    """
    values = round_to(blocks * _multiplier(block_scales, decoding), element)
    values.mul_(block_scales.unsqueeze(-1))
    if outer_amax is not None:
        amax = _per_block(outer_amax, scaling, block_scales)
        values.mul_(amax.unsqueeze(-1) if amax.dim() else amax)
        values.div_(torch.full_like(amax, target(scaling, element)).unsqueeze(-1))
    difference = values.sub_(blocks)
    error = difference.abs_() if scaling.search == "mae" else difference.mul_(difference)
    rows = torch.unflatten(error, -1, (scaling.height, -1))
    total = torch.zeros_like(rows[..., 0])
    for i in range(rows.shape[-1]):
        total += rows[..., i]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def _encoding(
    amax: Tensor, outer_amax: Tensor | None, element: ElementFormat, scaling: BlockScaling
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the factors `encode` and `decode` for each block, and `decode` for each outer scale.

    The module's docstring defines the factors. Without an outer scale, the results are 1, 1 and
    None.
    """
    if outer_amax is None:
        one = torch.ones((), dtype=torch.float32, device=amax.device)
        return one, one, None
    outer = divide_by(outer_amax, target(scaling, element))
    stored = outer.reciprocal()
    return _per_block(outer, scaling, amax), _per_block(stored, scaling, amax), stored


def _divided(
    blocks: Tensor, element: ElementFormat, scaling: BlockScaling, outer_amax: Tensor | None
) -> tuple[Tensor, Scales]:
    """Scale blocks with UE5M3 or E6M2 scales: divide, in the order of operations of AMD's ALTO."""
    kind = FLOAT8[scaling.scale]
    amax = blocks.abs().amax(-1)
    wanted, stored, outer = amax, None, torch.ones((), dtype=torch.float32, device=amax.device)
    if outer_amax is not None:
        stored = torch.div(outer_amax, torch.full_like(outer_amax, target(scaling, element)))
        outer = _per_block(stored.clamp_(min=SMALLEST_OUTER), scaling, amax)
        wanted = torch.div(amax, outer)
    wanted = torch.div(wanted, torch.full_like(amax, top(scaling, element))).nan_to_num_(0.0)
    block_scales = round_to(wanted.clamp_(kind.lowest, kind.element.max), kind.element)
    numbers = unsigned_numbers(scaling.scale).to(amax.device)[:-1]
    codes = torch.searchsorted(numbers, block_scales).to(torch.uint8)
    codes.masked_fill_(~amax.isfinite(), NAN_BYTE)
    return blocks / (block_scales * outer).unsqueeze(-1), Scales(codes, stored)


def scale_up(elements: Tensor, scales: Scales, scaling: BlockScaling) -> Tensor:
    """Multiply the elements by both levels of scales, which undoes `scale_down`."""
    factors = decoded(scales.block(), scaling.scale)
    if scaling.outer == "none" or scaling.apart:
        return elements * factors.unsqueeze(-1)
    outer = _per_block(scales.whole(), scaling, factors)
    if scaling.scale == "e4m3":
        outer = outer.unsqueeze(-1) if outer.dim() else outer
        return elements * factors.unsqueeze(-1) * outer
    return elements * (factors * outer).unsqueeze(-1)


def stored_scales(scaling: BlockScaling) -> Tensor:
    """Return the factor that each scale byte stands for, without the outer scale."""
    return decoded(torch.arange(256, dtype=torch.uint8, device="cpu"), scaling.scale)


def histogram_bytes(stored: Tensor) -> Tensor:
    """Return the byte that represents each scale in histograms: the stored byte itself."""
    return stored


def kernel_roundings(fmt: Format, device: str) -> tuple[str, ...]:
    """Return the rounding modes for which the format has a fused kernel on this device type."""
    assert isinstance(fmt.scaling, BlockScaling)
    assert isinstance(fmt.element, ElementFormat)
    # A GPU kernel sees only a part of a row or column, so it can compute neither an outer scale on
    # top of the scales of whole rows or columns nor the error of a whole row.
    alone = fmt.scaling.outer == "none" and fmt.scaling.search == "none"
    parts = WHOLE_AXIS not in (fmt.scaling.size, fmt.scaling.height)
    known = device == "cpu" or alone or parts
    if not known or fmt.element.ties != "even":
        return ()
    # The CPU kernel of MS-EDEN works on groups of 16 neighbors along the axis of the blocks.
    plain = fmt.scaling.search == "none" and fmt.scaling.size % 16 == 0 and fmt.outer_size is None
    corrects = device == "cpu" and plain and "eden" in fmt.roundings
    return ("nearest", "stochastic", "eden") if corrects else ("nearest", "stochastic")


def describe(fmt: Format, scaling: BlockScaling, element: ElementFormat) -> ScaleDescription:
    """Return a description of the block scales and the outer scales."""
    brief = f"{scaling.block_scale} per {brief_shape(fmt)} values"
    shared = f"{block_shape(fmt)}, {scaling.block_scale}"
    if scaling.outer != "none":
        brief += f", float32 per {scaling.outer}"
        shared += f"; and of the {_GROUPS.get(scaling.outer, scaling.outer)}, float32"
    return ScaleDescription(_source(scaling, element), brief, shared, tuple(_found(fmt, scaling)))


_GROUPS = {"1x64": "64 neighbors", "1x128": "128 neighbors"}


def _source(scaling: BlockScaling, element: ElementFormat) -> str:
    if scaling.scale == "ue5m3":
        own = (scaling.shape_name, element) == ("1 x 16", E2M1)
        named = "AMD-FP4, unsigned E5M3 scales" if own else "unsigned E5M3 scales as in AMD-FP4"
        return f"{named}, in the order of AMD's ALTO"
    if scaling.scale == "e6m2":
        return "E6M2 scales as in HiFloat4, in the order of AMD's ALTO"
    # True if Transformer Engine itself has a format with these settings.
    shared = (
        scaling.shape_name in ("1 x 16", "16 x 16")
        and scaling.outer in ("tensor", "row")
        and bound(scaling) in ((448,) if scaling.search == "none" else (256, 448))
        and (scaling.top, scaling.headroom, element) == (None, "1", E2M1)
    )
    how = "as Transformer Engine computes it" if shared else "in the order of Transformer Engine"
    if folds(scaling, element):
        named = "NVFP4" if shared else "E4M3 scales as in NVFP4"
        return f"{named}, arXiv 2509.25149 appendix B, {how}"
    if scaling.search != "none":
        named = "NVFP4" if shared else "E4M3 scales as in NVFP4"
        return f"{named} with 4/6, arXiv 2512.02010, {how}"
    return "E4M3 scales as in NVFP4, in the order of fouroversix"


def _found(fmt: Format, scaling: BlockScaling) -> list[tuple[str, str]]:
    assert isinstance(fmt.element, ElementFormat)
    largest = scaling.top or fmt.element.max
    reached = f"{largest:g}" if scaling.headroom == "1" else f"({largest:g} x {scaling.headroom})"
    rounded = f"rounded to {scaling.block_scale}"
    search = []
    if scaling.search != "none":
        words = {"mae": "mean absolute", "mse": "mean squared"}[scaling.search]
        search = [
            ("search", f"this or 1.5 times as much, by the smaller {words} error; this, if equal")
        ]
    if scaling.outer == "none":
        return [("found", f"amax / {reached} of the block, {rounded}"), *search]
    group = _GROUPS.get(scaling.outer, scaling.outer)
    factor = f"{reached} x {bound(scaling):g} = {target(scaling, fmt.element):.9g}"
    return [
        (
            "found",
            f"amax / {reached} of the block, times {factor} / amax of the {group}, {rounded}",
        ),
        *search,
    ]
