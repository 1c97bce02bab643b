"""Describe, as data, the scalings that `BlockScaling` cannot express.

All scalings have the same attributes, so that no code has to check the class. An attribute that
does not apply to a class is None, 0 or False. The modules in `scalings/` compute the scales.

Sources: HiFloat4, arXiv 2602.11287; MX9 and MX6, arXiv 2302.08007; NF4, arXiv 2305.14314;
IF4, arXiv 2603.28765; MixFP4, arXiv 2605.31035; macro blocks, arXiv 2603.08713.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from megatron.fake_quant.block_scaling import (
    GLOBAL,
    HEADROOM,
    TOP,
    AmaxSource,
    Outer,
    ScaleRule,
    check_choice,
    check_number,
)
from megatron.fake_quant.elements import E1M2, INT4, ElementFormat

ErrorMeasure = Literal["mse", "mae"]

HISTORY = 1024  #: default number of amaxes in the history of delayed scaling
LONGEST_HISTORY = 1 << 16
#: Variants that select delayed scaling, as help and error messages show them: a history of 1024,
#: one of another length, and one of length 1.
DELAYED = ("delayed", "delayed<length> (as in delayed16)", "recent")
MARGIN = "margin<k>"  #: variant that divides the target by 2^k


class _Scaling:
    """Attributes that most scalings share: blocks within one row, no outer scale, no variants."""

    __slots__ = ()

    height: ClassVar[int] = 1
    square: ClassVar[bool] = False
    #: False if the values of a block may have different scales or element types
    one_scale: ClassVar[bool] = False
    finer_exponents: ClassVar[int] = 0
    headroom: ClassVar[str] = "1"
    outer: ClassVar[Outer] = "none"
    outer_size: ClassVar[None] = None
    by_class: ClassVar[bool] = False

    @property
    def variants(self) -> tuple[str, ...]:
        """Variants that the name of a format with this scaling accepts, each after a colon."""
        return ()

    @property
    def rule(self) -> ScaleRule | None:
        """Rule that computes an E8M0 scale from a block's maximum; None for other scales."""
        return None

    @property
    def alternative(self) -> ElementFormat | None:
        """Element type that a block may have instead of the format's; None without a choice."""
        return None

    @property
    def amax(self) -> AmaxSource:
        """Source of the amax from which the scale of the whole tensor, if any, is computed."""
        return "own"


@dataclass(frozen=True, slots=True)
class GroupScaling(_Scaling):
    """Scaling of HiFloat4: an E6M2 scale per 64 values, and exponent bits per 8 and 4 values."""

    method: ClassVar[str] = "hifloat4"
    size: ClassVar[int] = 64
    block_scale: ClassVar[str] = "E6M2"
    scale_bytes: ClassVar[int] = 4
    finer_exponents: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class PairScaling(_Scaling):
    """Scaling of MX9 and MX6: an E8M0 scale per 16 values and an exponent bit per 2 values."""

    lowest: int  #: smallest exponent of a scale

    method: ClassVar[str] = "pair_exponents"
    size: ClassVar[int] = 16
    block_scale: ClassVar[str] = "E8M0"
    scale_bytes: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class AbsmaxScaling(_Scaling):
    """Scaling of NF4: the scale is the largest magnitude of 64 values, in float32."""

    size: int = 64

    method: ClassVar[str] = "absmax"
    one_scale: ClassVar[bool] = True
    block_scale: ClassVar[str] = "FP32"
    scale_bytes: ClassVar[int] = 4


@dataclass(frozen=True, slots=True)
class ChoiceScaling(_Scaling):
    """Scaling of IF4 and MixFP4: E4M3 scales, whose sign bits choose the blocks' element types."""

    shared: bool  #: True if both element types share the scale of a block, as in IF4
    error: ErrorMeasure = "mse"  #: error that decides between the element types
    amax: AmaxSource = "own"  #: amax from which the tensor's scale is computed

    method: ClassVar[str] = "element_choice"
    size: ClassVar[int] = 16
    block_scale: ClassVar[str] = "E4M3"
    scale_bytes: ClassVar[int] = 1
    outer: ClassVar[Outer] = "tensor"
    variants: ClassVar[tuple[str, ...]] = (GLOBAL,)
    target: ClassVar[float] = 6.0 * 448.0  #: product of the largest E2M1 and E4M3 numbers

    def __post_init__(self) -> None:
        check_choice("error", self.error, get_args(ErrorMeasure))
        check_choice("amax", self.amax, get_args(AmaxSource))

    @property
    def alternative(self) -> ElementFormat:
        """Element type with evenly spaced values, which a block may have instead of E2M1."""
        return INT4 if self.shared else E1M2


@dataclass(frozen=True, slots=True)
class MacroScaling(_Scaling):
    """Scaling of mxfp4_macro: an E8M0 scale per 32 values and an 8-bit mantissa per 128 values."""

    rule: ScaleRule = "even"
    #: number that no scaled magnitude exceeds; None if only `rule` determines the scales
    top: float | None = None

    method: ClassVar[str] = "macro_blocks"
    size: ClassVar[int] = 128
    blocks: ClassVar[int] = 4  #: number of blocks in 128 values, each with an E8M0 scale
    block_scale: ClassVar[str] = "E8M0"
    scale_bytes: ClassVar[int] = 5

    def __post_init__(self) -> None:
        check_choice("scale rule", self.rule, get_args(ScaleRule))


@dataclass(frozen=True, slots=True)
class TensorScaling(_Scaling):
    """Scaling with one float32 scale, which maps the tensor's largest magnitude to `target`."""

    target: float
    power_of_two: bool = False  #: True if the scale is rounded down to a power of two
    amax: AmaxSource = "own"  #: amax from which the scale is computed
    #: length of the amax history whose maximum delayed scaling uses; 0 without delayed scaling
    history: int = 0
    #: True if the scale is not applied to quantized values; see `Format.with_scale_apart`
    apart: bool = False

    method: ClassVar[str] = "tensor"
    one_scale: ClassVar[bool] = True
    size: ClassVar[None] = None
    block_scale: ClassVar[None] = None
    scale_bytes: ClassVar[int] = 0
    outer: ClassVar[Outer] = "tensor"
    by_class: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("amax", self.amax, get_args(AmaxSource))
        check_number("a scale to", self.target, "target")
        if self.amax == "delayed" and not 0 < self.history <= LONGEST_HISTORY:
            raise ValueError(
                f"an amax history of {self.history}; choose a length from 1 to {LONGEST_HISTORY}"
            )
        if self.amax != "delayed" and self.history:
            raise ValueError(
                f"a history of {self.history} amaxes without delayed scaling; remove the history, "
                "or choose the amax delayed"
            )

    @property
    def variants(self) -> tuple[str, ...]:
        """Variants that the name of a format with this scaling accepts, each after a colon."""
        margin = (MARGIN,) if self.amax == "delayed" else ()
        return (TOP, HEADROOM, "pow2", *DELAYED, *margin, GLOBAL)
