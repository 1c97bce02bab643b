"""Describe the scaling of blocks as data: which values share a scale, and how it is computed.

Each field of `BlockScaling` describes one independent part. `names.py` spells the parts in a
format's name, and the modules in `scalings/` compute them.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

ScaleRule = Literal["floor", "rceil", "ceil", "even"]
#: number type of block scales: powers of two, three 8-bit floating-point types, or float32
ScaleType = Literal["e8m0", "e4m3", "ue5m3", "e6m2", "fp32"]
#: group of values that share a second, float32 scale besides their block scales
Outer = Literal["none", "tensor", "row", "1x64", "1x128"]
#: error measure (mean absolute or mean squared) for the choice between two scales of an E2M1 block;
#: one scale maps the block's maximum to 6, the other one to 4 ("4/6")
Search = Literal["none", "mae", "mse"]
#: largest magnitude (amax) from which a tensor-wide scale is computed: that of the tensor itself;
#: that of a tensor which is divided among ranks; or one from a history of earlier tensors
AmaxSource = Literal["own", "global", "delayed"]
GLOBAL: AmaxSource = "global"  #: source of the amax, and the variant with the same name

#: Value of the `size` or `height` of a block that extends over a whole axis of the matrix.
WHOLE_AXIS = 1 << 40
E2M1_MAX = 6.0
LARGEST_SIDE = 1 << 16  #: largest number of rows or columns of a block, except for whole axes
#: Largest number of values per block, except for whole axes. Blocks are padded with zeros where
#: they extend beyond the tensor, so much larger ones would exhaust the memory.
LARGEST_BLOCK = 1 << 20
#: Range of the numbers in a format (`top`, `bound`, ...), far inside the range of float32.
SMALLEST_NUMBER, LARGEST_NUMBER = math.ldexp(1, -32), math.ldexp(1, 32)
#: Placeholders, in help and error messages, for variants that contain a number.
TOP, BOUND, HEADROOM = "top<number> (as in top7.25)", "bound<number>", "head<fraction>"


def check_choice(kind: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError if `value` is not among `choices`.

    Raises:
        ValueError: if the value is refused; the message lists the choices.
    """
    if value not in choices:
        raise ValueError(f"unknown {kind} {value!r}; choose one of {', '.join(choices)}")


def check_block(height: int, size: int) -> None:
    """Raise ValueError if a block of `height` rows with `size` values has an unsupported shape.

    Raises:
        ValueError: if the shape is refused; the message states the limits.
    """
    for side in (size, height):
        if side < 1:
            raise ValueError(f"a block of {side} values; choose a block size of 1 or more")
    if max(size, height) > LARGEST_SIDE or size * height > LARGEST_BLOCK:
        raise ValueError(
            f"a block of {height} x {size} values; choose at most {LARGEST_SIDE} along an axis and "
            f"{LARGEST_BLOCK} in a block, or row for whole rows, column for whole columns, and "
            "tensor for all values"
        )


def check_number(what: str, number: float, name: str = "number") -> None:
    """Raise ValueError if a number in a format is outside of the range from 2^-32 to 2^32.

    Raises:
        ValueError: if the number is refused; `what` and `name` describe it in the message.
    """
    if not SMALLEST_NUMBER <= number <= LARGEST_NUMBER:
        raise ValueError(f"{what} {number:g} is out of range; choose a {name} from 2^-32 to 2^32")


def share(fraction: str) -> float:
    """Return a fraction such as 16/17 as a float."""
    whole, _, part = fraction.partition("/")
    return int(whole) / int(part or 1)


@dataclass(frozen=True, slots=True)
class BlockScaling:
    """Scaling with one scale per block; separate fields describe its parts.

    `height` and `size` are the shape of a block, and `scale` is the number type of its scale. A
    scale follows from the block's maximum by `rule` if it is a power of two, and otherwise by
    division by `top` times `headroom`. An `outer` scale may apply on top of the block scales.
    `search` chooses between two candidates for each scale.
    """

    size: int  #: values per block along one axis; `WHOLE_AXIS` for whole rows
    rule: ScaleRule | None = None  #: rule that computes an E8M0 scale; None for other types
    #: rows per block; if above 1, blocks extend over the last two axes. `WHOLE_AXIS` means whole
    #: columns if `size` is 1, and one block for all values if `size` is `WHOLE_AXIS`.
    height: int = 1
    scale: ScaleType = "e8m0"
    #: number to which a block's maximum is mapped; with the scale rules "rceil" and "ceil", an
    #: upper limit of the scaled maximum. None: the largest number of the element type, which the
    #: scaled maximum may exceed with the scale rules "floor" and "even"
    top: float | None = None
    #: fraction of `top` to which a block's maximum is mapped, such as 16/17; with E8M0 scales,
    #: factor by which values are multiplied before they are rounded
    headroom: str = "1"
    outer: Outer = "none"
    #: if there is an outer scale, the scale that the block with the largest maximum gets (with a
    #: search, the first candidate); None means the largest number of the scale's type, or 256 if
    #: `search` is not "none"
    bound: float | None = None
    search: Search = "none"
    amax: AmaxSource = "own"  #: amax from which an outer scale per tensor is computed
    #: True if the scale of the tensor or of whole rows is not applied to quantized values; see
    #: `Format.with_scale_apart`
    apart: bool = False

    one_scale: ClassVar[bool] = True  #: True if the values of a block share one scale, and no other
    finer_exponents: ClassVar[int] = 0  #: largest exponent that finer scales within a block add
    #: element type that a block may have instead of the format's; None if there is no choice
    alternative: ClassVar[None] = None

    def __post_init__(self) -> None:
        for side in (self.height, self.size):
            if not isinstance(side, int):
                raise ValueError(f"a block of {side!r} values; choose an integer")
        check_block(*(1 if side == WHOLE_AXIS else side for side in (self.height, self.size)))
        check_choice("scale type", self.scale, get_args(ScaleType))
        check_choice("outer scale", self.outer, get_args(Outer))
        check_choice("search", self.search, get_args(Search))
        check_choice("amax", self.amax, get_args(AmaxSource))
        if self.scale == "e8m0":
            check_choice("scale rule", str(self.rule), get_args(ScaleRule))
        _check_parts(self)

    @property
    def method(self) -> str:
        """Key of the scaling's module in the table of `scalings/__init__.py`."""
        return {"e8m0": "mx", "fp32": "float32"}.get(self.scale, "float8")

    @property
    def block_scale(self) -> str:
        """Name, in upper case, of the number type of the block scales."""
        return self.scale.upper()

    @property
    def scale_bytes(self) -> int:
        """Number of bytes that the scale of a block takes."""
        return 4 if self.scale == "fp32" else 1

    @property
    def share(self) -> float:
        """The field `headroom`, a fraction such as 16/17, as a float."""
        return share(self.headroom)

    @property
    def square(self) -> bool:
        """True if a tensor has the same blocks along both of its last two axes."""
        return 1 < self.height == self.size

    @property
    def shape_name(self) -> str:
        """Shape of the blocks in words: row, column or tensor, or the numbers, such as 16 x 16."""
        whole = {
            (1, WHOLE_AXIS): "row",
            (WHOLE_AXIS, 1): "column",
            (WHOLE_AXIS, WHOLE_AXIS): "tensor",
        }
        return whole.get((self.height, self.size), f"{self.height} x {self.size}")

    @property
    def outer_size(self) -> int | None:
        """Number of values along the axis that share an outer scale.

        It is None if one outer scale applies to the whole tensor, or if there is no outer scale.
        """
        if self.outer == "row":
            return WHOLE_AXIS
        return int(self.outer.removeprefix("1x")) if self.outer.startswith("1x") else None

    @property
    def by_class(self) -> bool:
        """True if a value and the scale byte of its block determine the quantized value."""
        one_scale = self.size < WHOLE_AXIS and self.outer_size is None and self.search == "none"
        powers = self.scale == "e8m0" and self.headroom == "1"
        return one_scale and self.height in (1, self.size) and (powers or self.scale == "e4m3")

    @property
    def variants(self) -> tuple[str, ...]:
        """Variants that the name of a format with this scaling accepts, each after a colon."""
        whole = WHOLE_AXIS in (self.size, self.height)
        shape = () if whole or 1 < self.height < self.size else ("2d",)
        if self.scale == "e8m0":
            return (*get_args(ScaleRule), TOP, *shape, HEADROOM)
        if self.scale == "fp32":
            return (TOP, *shape, "outer-none", HEADROOM, "ue8m0")
        outer = tuple(f"outer-{outer}" for outer in get_args(Outer))
        search = ("4over6-mae", "4over6-mse") if self.scale == "e4m3" else ()
        divided = (GLOBAL,) if self.outer == "tensor" else ()
        return (TOP, *shape, *outer, *search, BOUND, HEADROOM, *divided)


def _check_parts(scaling: BlockScaling) -> None:
    """Raise ValueError for parts of a block scaling that exclude each other.

    Raises:
        ValueError: if one part excludes another; the message says what to change.
    """
    size = scaling.outer_size
    for what, number in (("a top of", scaling.top), ("a bound of", scaling.bound)):
        if number is not None:
            check_number(what, number)
    check_headroom(scaling.headroom)
    if scaling.scale in ("e8m0", "fp32"):
        if (scaling.outer, scaling.search, scaling.bound) != ("none", "none", None):
            raise ValueError(
                f"{scaling.block_scale} scales have the range of float32; they take no outer "
                "scale, bound or search"
            )
        if scaling.top is not None and scaling.rule not in (None, "rceil"):
            raise ValueError(
                f"the rule {scaling.rule} has no top; remove the rule or choose rceil, which "
                "keeps a block's maximum at or below the top"
            )
    if scaling.outer == "none" and scaling.bound is not None:
        raise ValueError(
            "a bound applies to an outer scale, and there is none; remove the bound, or choose an "
            "outer scale"
        )
    _check_whole_axes(scaling)
    if scaling.amax == "delayed":
        raise ValueError(
            "delayed scaling is for formats with one scale per tensor and no block scales; choose "
            "fp8_e4m3 or fp8_e5m2, or remove the delayed amax"
        )
    if scaling.amax != "own" and scaling.outer != "tensor":
        raise ValueError(
            f"a {scaling.amax} amax is for one outer scale per tensor, and the outer scale is "
            f"{scaling.outer}; choose outer-tensor, or remove the {scaling.amax} amax"
        )
    ragged = size not in (None, WHOLE_AXIS) and size % scaling.size > 0
    if scaling.search != "none" and scaling.height & (scaling.height - 1):
        raise ValueError(
            "a search for scales (4over6) needs blocks whose number of rows is a power of two, "
            f"not {scaling.height}; change the block, or remove the search"
        )
    if size is not None and (scaling.height > 1 or ragged):
        raise ValueError(
            f"outer scales per {scaling.outer} need whole blocks of one row in each group, and the "
            f"blocks are {scaling.shape_name}; choose outer-tensor or outer-none"
        )


def _check_whole_axes(scaling: BlockScaling) -> None:
    """Raise ValueError for unsupported blocks that span a whole axis.

    Raises:
        ValueError: if the shape is none of row, column and tensor, or does not allow a search.
    """
    if WHOLE_AXIS in (scaling.height, scaling.size) and " x " in scaling.shape_name:
        raise ValueError(
            f"a block of {scaling.shape_name} values over a whole axis; choose one row, one "
            "column, or the whole tensor"
        )
    if scaling.height == WHOLE_AXIS and scaling.search != "none":
        raise ValueError(
            f"a search in blocks that are a {scaling.shape_name}; 4/6 adds the errors of a "
            "block row by row, so choose row or a number of values"
        )


def check_headroom(fraction: str) -> None:
    """Raise ValueError for a headroom outside of the range from 2^-32 to 1."""
    if not (isinstance(fraction, str) and re.fullmatch(r"[0-9]+(/0*[1-9][0-9]*)?", fraction)):
        raise ValueError(f"a headroom of {fraction!r}; choose a fraction as text, such as '16/17'")
    whole, _, part = fraction.partition("/")
    # Integers are compared first, because their quotient can be too large for a float.
    if int(whole) > int(part or 1) or share(fraction) < SMALLEST_NUMBER:
        raise ValueError(
            f"a headroom of {fraction}; choose a fraction of the largest number, from "
            "2^-32 to 1, such as 16/17"
        )


def check_element(scaling: BlockScaling, largest: float) -> None:
    """Raise ValueError if a scaling does not fit an element type whose largest number is `largest`.

    Raises:
        ValueError: if the scaling does not fit; the message states what fits.
    """
    if scaling.search != "none" and largest != E2M1_MAX:
        raise ValueError(
            "a search between 4 and 6 is for elements whose largest number is 6, such as e2m1; "
            f"this one ends at {largest:g}"
        )
    if scaling.rule is None or scaling.top is None:
        return
    binade = math.ldexp(1, math.frexp(largest)[1] - 1)
    if not binade <= scaling.top < 2 * binade:
        raise ValueError(
            f"the top {scaling.top:g} does not fit elements whose largest number is {largest:g}; "
            f"choose one from {binade:g} up to, but not including, {2 * binade:g}"
        )
