"""Define accumulators as data: how the matrix unit of a processor adds up products.

A matrix unit sums a dot product in steps. In each step it adds `step` products to a running sum,
which it keeps in a register with few bits. An `Accumulator` describes what is lost in these steps;
it has no behavior. `scalar.py` defines the result for one dot product, in exact integers. The
results of every other implementation must be bit-identical.

The rules of a step depend on `design`, as listed below. The exponent of a product is the sum of the
exponents of its two elements; a subnormal element has the exponent of the smallest normal number. A
running sum of zero has the exponent -126.

    torch      nothing is simulated: torch.matmul in float32
    fused      All products and the running sum are truncated to `align_bits` fractional bits below
               the largest exponent among them, where products with a zero element do not count.
               Their sum is exact. It is then rounded to the type `keep`. If `scales` is
               "exponents", the exponents of both E8M0 scales are added to that of each product.
    grouped    Products are summed exactly in groups of 16. A group's sum is multiplied by the
               significands of both its scales, and has the sum of the scales' exponents as its
               exponent. Groups and the running sum are then added as in "fused".
    two_stage  Products are summed as in "fused", without the running sum, in `interleave` parts:
               part i has the products i, i + interleave, .... A zero element has the exponent -126.
               The parts and then the running sum are aligned by rounding down (toward minus
               infinity) instead of truncation.

In every design, a step with NaN, zero times Inf or infinities of both signs returns NaN. A step
with one infinity, or whose result exceeds the largest number of `keep`, returns Inf. The units of
"two_stage" also treat products from 2^128 on as infinite. A running sum of zero is +0, except that
"two_stage" may round a negative sum to -0. A second sum follows IEEE 754.

Sources: MMA-Sim (arXiv 2511.10909) for all units, except that it gives a zero element the exponent
-126 in "fused", too; an H100 does not (docs/results/gpu.md). FP8 on Hopper and promotion:
DeepSeek-V3 (arXiv 2412.19437, section 3.3) and DeepGEMM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Design = Literal["torch", "fused", "grouped", "two_stage"]
Scales = Literal["after", "promotion", "exponents", "significands"]
SumRounding = Literal["rz", "rne"]
ScaleType = Literal["e8m0", "e4m3", "fp32"]

#: exponent of a running sum or a scale that is zero, and in "two_stage" also of a zero element
ZERO_EXPONENT = -126
#: exponent of a zero element in "fused"; lower than the exponents of all nonzero terms
IGNORED_EXPONENT = -4096
#: number of products in a group, which the design "grouped" adds exactly
GROUP = 16
#: fractional bits of the products' sum and of the running sum when "two_stage" adds these two
STAGE_BITS, RUNNING_BITS = 31, 24
#: "two_stage" treats a product with at least this exponent as infinite
OVERFLOW_EXPONENT = 128
#: exponents of the smallest normal numbers of the types of scales
SMALLEST_SCALES: Mapping[str, int] = MappingProxyType({"e8m0": -127, "e4m3": -6, "fp32": -126})


@dataclass(frozen=True, slots=True)
class SumType:
    """Binary floating-point type of a running sum, with subnormal numbers, Inf and NaN.

    The sum overflows to Inf if its rounded magnitude exceeds the largest finite number, even if it
    is rounded toward zero.
    """

    mantissa_bits: int  #: stored bits, without the implicit leading one; at most 23
    rounding: SumRounding  #: toward zero ("rz") or to nearest, ties to even ("rne")
    exponent_bits: int = 8

    @property
    def smallest_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def largest_exponent(self) -> int:
        """Exponent of the largest finite number."""
        return (1 << (self.exponent_bits - 1)) - 1


FP32_NEAREST = SumType(23, "rne")
FP32_TRUNCATED = SumType(23, "rz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulator:
    """Description of how a matrix unit sums a dot product; see the module's docstring."""

    name: str
    design: Design = "fused"
    step: int = 1  #: number of products that are added to the running sum at once
    #: fractional bits that a term keeps below the step's largest exponent; None if a step is exact
    align_bits: int | None = None
    keep: SumType = FP32_NEAREST  #: number type of the running sum
    interleave: int = 1  #: parts into which "two_stage" divides the products of a step
    #: where the scales of blocks apply. "after": the unit has no block scales, so a scale must be
    #: common to a whole row or tensor, and it multiplies the result. "promotion": float32
    #: scales of `scale_block` elements apply at each promotion. "exponents", "significands": the
    #: unit itself applies them.
    scales: Scales = "after"
    scale_block: int | None = None  #: elements per scale along the reduction axis
    scale_type: ScaleType | None = None  #: number type of the block scales
    #: number of products after which the running sum is added to a second sum and reset to zero;
    #: None if there is no second sum
    promote_every: int | None = None
    promote_to: SumType = FP32_NEAREST  #: number type of the second sum
    #: names of the element types that the unit multiplies; empty if it takes every type
    elements: tuple[str, ...] = ()
    mixes: bool = True  #: True if the two operands may have different element types
    #: processors and instructions that sum in this way; empty for a research accumulator
    hardware: str = ""
    measured_on: str = ""  #: GPUs whose published results the definition was compared with

    @property
    def simulated(self) -> bool:
        """True unless the products are summed by torch.matmul."""
        return self.design != "torch"

    @property
    def smallest_scale(self) -> int:
        """Exponent of the smallest normal number of the scales' type."""
        assert self.scale_type is not None, self.name
        return SMALLEST_SCALES[self.scale_type]


_FP8 = ("e4m3", "e5m2")
_F8F6F4 = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
_HALF = ("bfloat16", "float16")
_KEPT_13 = SumType(13, "rz")

ACCUMULATORS: Mapping[str, Accumulator] = MappingProxyType(
    {
        accumulator.name: accumulator
        for accumulator in (
            Accumulator(
                name="hopper_fp8",
                step=32,
                align_bits=13,
                keep=_KEPT_13,
                elements=_FP8,
                hardware="NVIDIA Hopper: wgmma with FP8 operands, K = 32, and a float32 sum",
                measured_on="H100, H200",
            ),
            Accumulator(
                name="hopper_fp8_promote128",
                step=32,
                align_bits=13,
                keep=_KEPT_13,
                scales="promotion",
                scale_block=128,
                scale_type="fp32",
                promote_every=128,
                elements=_FP8,
                hardware="NVIDIA Hopper: the same wgmma, whose sum a CUDA core adds to float32 "
                "after every 128 products (DeepGEMM, CUTLASS, and cuBLAS without fast "
                "accumulation)",
            ),
            Accumulator(
                name="hopper_bf16",
                step=16,
                align_bits=25,
                keep=FP32_TRUNCATED,
                elements=_HALF,
                mixes=False,
                hardware="NVIDIA Hopper: wgmma and mma with bf16 or fp16 operands, K = 16",
                measured_on="H100, H200",
            ),
            Accumulator(
                name="ada_fp8",
                step=16,
                align_bits=13,
                keep=_KEPT_13,
                elements=_FP8,
                hardware="NVIDIA Ada: mma with FP8 operands; K = 32 is summed in two halves",
                measured_on="RTX Ada, L40S",
            ),
            Accumulator(
                name="ampere_bf16",
                step=8,
                align_bits=24,
                keep=FP32_TRUNCATED,
                elements=_HALF,
                mixes=False,
                hardware="NVIDIA Ampere and Ada: mma with bf16 or fp16 operands; K = 16 is summed "
                "in two halves. NVIDIA Turing: mma with fp16 operands, K = 8",
                measured_on="A100, A2, RTX Ada, L40S",
            ),
            Accumulator(
                name="volta_fp16",
                step=4,
                align_bits=23,
                keep=FP32_TRUNCATED,
                elements=("float16",),
                mixes=False,
                hardware="NVIDIA Volta: mma with fp16 operands, K = 4",
                measured_on="V100",
            ),
            Accumulator(
                name="blackwell_fp8",
                step=32,
                align_bits=25,
                keep=FP32_TRUNCATED,
                elements=_F8F6F4,
                hardware="NVIDIA Blackwell: tcgen05.mma kind::f8f6f4, K = 32; RTX Blackwell: mma "
                "kind::f8f6f4",
            ),
            Accumulator(
                name="blackwell_bf16",
                step=16,
                align_bits=25,
                keep=FP32_TRUNCATED,
                elements=_HALF,
                mixes=False,
                hardware="NVIDIA Blackwell: tcgen05.mma kind::f16, K = 16",
                measured_on="B200",
            ),
            Accumulator(
                name="blackwell_mx",
                step=32,
                align_bits=25,
                keep=FP32_TRUNCATED,
                scales="exponents",
                scale_block=32,
                scale_type="e8m0",
                elements=_F8F6F4,
                hardware="NVIDIA Blackwell: tcgen05.mma kind::mxf8f6f4, K = 32; RTX Blackwell: mma "
                "kind::mxf8f6f4",
            ),
            Accumulator(
                name="blackwell_mxfp4",
                design="grouped",
                step=64,
                align_bits=35,
                keep=FP32_TRUNCATED,
                scales="significands",
                scale_block=32,
                scale_type="e8m0",
                elements=("e2m1",),
                hardware="NVIDIA Blackwell: tcgen05.mma kind::mxf4, K = 64, E8M0 scales; RTX "
                "Blackwell: mma kind::mxf4",
            ),
            Accumulator(
                name="blackwell_nvfp4",
                design="grouped",
                step=64,
                align_bits=35,
                keep=FP32_TRUNCATED,
                scales="significands",
                scale_block=16,
                scale_type="e4m3",
                elements=("e2m1",),
                hardware="NVIDIA Blackwell: tcgen05.mma kind::mxf4nvf4, K = 64, E4M3 scales; RTX "
                "Blackwell: mma kind::mxf4nvf4",
            ),
            Accumulator(
                name="cdna3_fp8",
                design="two_stage",
                step=16,
                align_bits=24,
                interleave=2,
                elements=("e4m3fnuz", "e5m2fnuz", "e4m3", "e5m2"),
                hardware="AMD CDNA3 (MI300): mfma with FP8 and BF8 operands",
            ),
            Accumulator(
                name="cdna3_bf16",
                design="two_stage",
                step=8,
                align_bits=24,
                elements=_HALF,
                mixes=False,
                hardware="AMD CDNA3 (MI300): mfma with bf16 or fp16 operands",
            ),
            Accumulator(name="fp32", design="torch"),
            Accumulator(name="bf16", keep=SumType(7, "rne")),
            Accumulator(name="fp16", keep=SumType(10, "rne", exponent_bits=5)),
        )
    }
)
