"""Define the number formats as data.

A `Format` consists of an element type (`elements.py`), a scaling of its values (`block_scaling.py`,
`special_scalings.py`), and a rounding mode (`rounding_modes.py`). The code that quantizes is in
other modules and reads the fields of these classes. Adding a format takes one constant here and one
golden table in the tests, and no new branch. `names.py` converts a user's name into a `Format`.

Sources: OCP Microscaling Formats (MX) v1.0, section 5 (elements, E8M0 scale) and 6.3 (conversion);
NVFP4, arXiv 2509.25149 appendix B. The other modules list their own sources.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, TypeAlias, get_args

import torch

from megatron.fake_quant.block_scaling import (
    WHOLE_AXIS,
    AmaxSource,
    BlockScaling,
    ScaleRule,
    check_choice,
    check_element,
)
from megatron.fake_quant.elements import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    INT4,
    INT5,
    INT6,
    INT8,
    S1P2,
    Cast,
    Element,
    ElementFormat,
    HiFloat8,
    TableElement,
)
from megatron.fake_quant.rounding_modes import EDEN_GROUP, ROUNDINGS, Rounding
from megatron.fake_quant.special_scalings import (
    AbsmaxScaling,
    ChoiceScaling,
    GroupScaling,
    MacroScaling,
    PairScaling,
    TensorScaling,
)

Scaling: TypeAlias = (
    BlockScaling
    | GroupScaling
    | TensorScaling
    | PairScaling
    | AbsmaxScaling
    | ChoiceScaling
    | MacroScaling
)


@dataclass(frozen=True, slots=True)
class Format:
    """Named number format, which consists of an element type, a scaling and a rounding mode."""

    name: str
    element: Element
    scaling: Scaling | None = None  #: None if values are rounded without a scale
    rounding: Rounding = "nearest"
    #: True if the weights of linear layers get square blocks in a quantization type with this
    #: format, as with FP8 blocks of 1 x 128 for activations and 128 x 128 for weights
    square_weights: bool = False
    #: Name from which `get_format` makes an equal format, or None. Only `mark_named` sets it; the
    #: constructor ignores the value that `replace` and torch.compile of torch 2.6 pass to it.
    known_name: str | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "known_name", None)
        _check_types(self)
        check_choice("rounding", self.rounding, ROUNDINGS)
        if self.block_size is not None and not self.element.takes_block_scales:
            raise ValueError(
                f"format {self.name!r} puts block scales on {self.element!r}; "
                "block scales need an ElementFormat or a TableElement"
            )
        if self.is_cast and (self.scaling or self.rounding != "nearest"):
            raise ValueError(
                f"format {self.name!r} is a plain torch cast, which has no scale and rounds to "
                "nearest"
            )
        if self.rounding not in self.roundings:
            raise ValueError(
                f"format {self.name!r}: {self.element.name} elements have no {self.rounding} "
                f"rounding with these scales; choose {' or '.join(self.roundings)}"
            )
        if isinstance(self.scaling, BlockScaling):
            check_element(self.scaling, self.element.max)

    def mark_named(self) -> None:
        """Record that `get_format` makes an equal format from the name of this one.

        Only `names.py` calls this. `format_text.to_text` reads the record; without it,
        torch.compile would trace the comparison of two formats for every operand.
        """
        object.__setattr__(self, "known_name", self.name)

    @property
    def roundings(self) -> tuple[Rounding, ...]:
        """Rounding modes that the element type and the scales accept."""
        scaling = self.scaling
        if (
            isinstance(self.element, ElementFormat)
            and isinstance(scaling, BlockScaling)
            and (scaling.scale, scaling.height) == ("e4m3", 1)
            and EDEN_GROUP % scaling.size == 0
            and len(self.elements) == 1
        ):
            return (*self.element.roundings, "eden")
        return self.element.roundings

    @property
    def is_cast(self) -> bool:
        """True if the format is a plain cast to a torch dtype."""
        return self.element.is_cast

    @property
    def elements(self) -> tuple[Element, ...]:
        """Element types that a block may have: one, or two between which each block chooses."""
        alternative = None if self.scaling is None else self.scaling.alternative
        return (self.element,) if alternative is None else (self.element, alternative)

    @property
    def block_size(self) -> int | None:
        """Number of values along an axis that share a scale; None without block scales.

        It is `WHOLE_AXIS`, which is larger than any axis, if a scale applies to a whole row or to
        all values.
        """
        return None if self.scaling is None else self.scaling.size

    @property
    def height(self) -> int:
        """Number of rows in a block; if above 1, blocks span the last two axes.

        It is `WHOLE_AXIS` if a scale applies to a whole column or to all values.
        """
        return 1 if self.scaling is None else self.scaling.height

    @property
    def one_block(self) -> bool:
        """True if the format has block scales, and all values of a tensor are in one block."""
        return self.height == self.block_size == WHOLE_AXIS

    @property
    def columns(self) -> bool:
        """True if each block is a whole column, perpendicular to the axis given with the tensor."""
        return self.height == WHOLE_AXIS and not self.one_block

    @functools.lru_cache(maxsize=1 << 10)  # noqa: B019 # formats are few and small
    def across(self) -> "Format":
        """Convert a format with one scale per column to the format with one scale per row.

        Along the other axis of a matrix, the returned format has the same blocks as this one. A
        format with `one_block` also becomes a format with one scale per row; both give the same
        result for a tensor that is a single row.
        """
        assert isinstance(self.scaling, BlockScaling)
        return replace(self, scaling=replace(self.scaling, size=WHOLE_AXIS, height=1))

    @property
    def square(self) -> bool:
        """True if a tensor has the same blocks along both of its last two axes."""
        return self.scaling is not None and self.scaling.square

    @property
    def block_scale(self) -> str | None:
        """Number type of block scales, such as E8M0; None if the format has no block scales."""
        return None if self.scaling is None else self.scaling.block_scale

    @property
    def scale_bytes(self) -> int:
        """Number of scale bytes stored per block; 0 if the format has no block scales."""
        return 0 if self.scaling is None else self.scaling.scale_bytes

    @property
    def scale_rule(self) -> ScaleRule | None:
        """Rule that computes an E8M0 scale from a block's maximum; None for other scales."""
        return None if self.scaling is None else self.scaling.rule

    @property
    def has_tensor_scale(self) -> bool:
        """True if the format has one float32 scale for the whole tensor."""
        return self.scaling is not None and self.scaling.outer == "tensor"

    @property
    def amax_source(self) -> AmaxSource:
        """Source of the amax from which the scale of the whole tensor is computed.

        Unless it is "own", the caller must give the amax with each tensor.
        """
        return "own" if self.scaling is None else self.scaling.amax

    def with_own_amax(self) -> "Format":
        """Return this format with scales that follow from the tensor alone.

        The name is kept. Tools that examine a format or a tensor outside a run use this method.
        """
        if self.amax_source == "own":
            return self
        assert isinstance(self.scaling, BlockScaling | ChoiceScaling | TensorScaling)
        if isinstance(self.scaling, TensorScaling):
            return replace(self, scaling=replace(self.scaling, amax="own", history=0))
        return replace(self, scaling=replace(self.scaling, amax="own"))

    @functools.lru_cache(maxsize=1 << 10)  # noqa: B019 # formats are few and small
    def with_scale_apart(self) -> "Format":
        """Return this format with the scale of the tensor or row left out of the quantized values.

        These values have few significant bits, so that bfloat16 represents them exactly. The scale
        is applied to the product instead; see `unrounded.py`. The name is kept.
        """
        assert isinstance(self.scaling, BlockScaling | TensorScaling)
        return replace(self, scaling=replace(self.scaling, apart=True))

    @property
    def has_outer_scale(self) -> bool:
        """True if the format has an outer scale: a float32 scale besides any block scales."""
        return self.scaling is not None and self.scaling.outer != "none"

    @property
    def outer_size(self) -> int | None:
        """Number of values along an axis that share an outer scale.

        It is None if one outer scale applies to the whole tensor, or if there is no outer scale.
        """
        return None if self.scaling is None else self.scaling.outer_size

    @property
    def by_class(self) -> bool:
        """True if a value and the scale of its block determine the quantized value."""
        return self.scaling is None or self.scaling.by_class

    @property
    def stochastic(self) -> bool:
        """True if rounding draws random bits."""
        return ROUNDINGS[self.rounding].random

    @property
    def corrects_scales(self) -> bool:
        """True if block scales are changed after the values are rounded."""
        return ROUNDINGS[self.rounding].corrects_scales


_ELEMENTS, _SCALINGS = get_args(Element), get_args(Scaling)


def _check_types(fmt: Format) -> None:
    """Raise ValueError if a part of a format has the wrong type or no codes of its own.

    Raises:
        ValueError: if a part is refused; the message says what is accepted.
    """
    element, scaling = fmt.element, fmt.scaling
    if not isinstance(element, _ELEMENTS):
        raise ValueError(
            f"format {fmt.name!r} has the element {element!r}; give an ElementFormat, such as "
            "elements.E4M3, or another element type"
        )
    if scaling is not None and not isinstance(scaling, _SCALINGS):
        raise ValueError(
            f"format {fmt.name!r} has the scaling {scaling!r}; give None or a scaling, such as "
            "formats.OCP"
        )
    # torch.compile would put the calls of the math module into the graph.
    checks_max = isinstance(element, ElementFormat) and not torch.compiler.is_dynamo_compiling()
    if checks_max and not element.has_max:
        raise ValueError(
            f"format {fmt.name!r} has elements up to {element.max:g}, which is no number with "
            f"{element.mantissa_bits} mantissa bits; give one of their numbers"
        )
    if isinstance(element, ElementFormat) and not (element.signed and element.bits <= 8):
        raise ValueError(
            f"format {fmt.name!r} has elements of {element.bits} bits, "
            f"{'with' if element.signed else 'without'} a sign; give a signed element type of at "
            "most 8 bits"
        )


def _set_state(fmt: Format, state: list[Any]) -> None:
    """Restore a format from a pickle; one of an older version may lack the last fields."""
    for each, value in zip(fields(fmt), state, strict=False):
        object.__setattr__(fmt, each.name, value)
    object.__setattr__(fmt, "known_name", None)


# In Python 3.10, `dataclass` would replace a method with this name that the class body defines.
Format.__setstate__ = _set_state  # type: ignore[attr-defined]


#: Scaling of the OCP specification: a scale is the largest power of two at or below the maximum of
#: the block, divided by the largest power of two of the element type.
OCP = BlockScaling(32, "floor")

#: `FORMATS` for code that torch.compile traces; in torch 2.6, it cannot trace a mapping proxy
TRACEABLE_FORMATS: Mapping[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format("bf16", Cast(torch.bfloat16)),
        Format("fp16", Cast(torch.float16)),
        Format("mxfp8", E4M3, OCP),
        Format("mxfp8_e5m2", E5M2, OCP),
        Format("mxfp6_e3m2", E3M2, OCP),
        Format("mxfp6_e2m3", E2M3, OCP),
        Format("mxfp4", E2M1, OCP),
        Format("mxint8", INT8, OCP),
        Format("nvfp4", E2M1, BlockScaling(16, scale="e4m3", outer="tensor")),
        Format("hifp8", HiFloat8()),
        Format("hifp4", S1P2, GroupScaling()),
        Format("fp8_e4m3", E4M3, TensorScaling(E4M3.max)),
        Format("fp8_e5m2", E5M2, TensorScaling(E5M2.max)),
        Format("mxint6", INT6, OCP),
        Format("mxint4", INT4, OCP),
        Format("nvint4", INT4, BlockScaling(16, scale="e4m3", outer="tensor")),
        Format("amdfp4", E2M1, BlockScaling(16, scale="ue5m3")),
        Format("fp8_block", E4M3, BlockScaling(128, scale="fp32"), square_weights=True),
        Format("fp8_rowwise", E4M3, BlockScaling(WHOLE_AXIS, scale="fp32")),
        Format("mx9", INT8, PairScaling(lowest=-120)),
        Format("mx6", INT5, PairScaling(lowest=-123)),
        Format("nf4", TableElement("nf4"), AbsmaxScaling()),
        Format("if4", E2M1, ChoiceScaling(shared=True)),
        Format("if4_mae", E2M1, ChoiceScaling(shared=True, error="mae")),
        Format("mixfp4", E2M1, ChoiceScaling(shared=False)),
        Format("mxfp4_macro", E2M1, MacroScaling()),
        Format("mxfp4_macro_oas", E2M1, MacroScaling("rceil", top=7.25)),
    )
}
FORMATS: Mapping[str, Format] = MappingProxyType(TRACEABLE_FORMATS)
