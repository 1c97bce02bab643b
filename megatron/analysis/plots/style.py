"""What all figures share: a fixed colour for each name, short numbers, quiet axes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from colorsys import hls_to_rgb
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from megatron.fake_quant.inspect.value_grids import COLOURS

#: A format has this colour in every figure.
FORMAT_COLOURS = {
    "none": "#9a9a9a",
    "bf16": "#4c4c4c",
    "fp16": "#7d7461",
    **COLOURS,
}
LAYER_COLOURS = {"attention": "#8e5c8b", "linear": "#b3922e"}
OPERATION_COLOURS = {"forward": "#1f7a7a", "backward": "#c4587c"}
#: A gradient has the colour of what it is the gradient of.
TENSOR_COLOURS = {
    "input": "#1f7a7a",
    "weight": "#b3922e",
    "output": "#5b6abf",
    "query": "#c4587c",
    "key": "#8c6d46",
    "value": "#557a46",
    "attention_scores": "#94617c",
    "attention_probs": "#3f88c5",
}
INK = "#222222"  #: text
FAINT = "#6f6f6f"  #: text that explains
RULE = "#d9d9d9"  #: lines that only guide the eye
TRACK = "#f1f2f3"  #: what a bar would fill at 100 %
FILL = 0.12  #: opacity below an outline
ALARM = "#b3261e"  #: NaN, Inf, files that could not be read

_ALIASES = {"mxfp8_e4m3": "mxfp8", "hif8": "hifp8", "hifloat8": "hifp8"}
#: How far from its format's colour toward white a type stands that covers only some operations.
_SCOPES = {"FA_linear_": 0.2, "linear_": 0.4, "FA_": 0.6}
#: Of names that nobody knew: apart from each other, and from the formats' colours.
_SPARE = ("#0f7173", "#b3922e", "#7b4b94", "#c06c84", "#6b7a8f", "#8c6d46", "#557a46", "#3f88c5")

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    # names of modules and folders may have dollar signs: nothing is a formula
    "text.parse_math": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
}  #: for `matplotlib.rc_context`, by whoever makes the figure


def colour_of(name: str) -> str:
    """The colour of a format, quantization type, layer type, operation or tensor; unknown names get
    a fixed one too.
    """
    for table in (LAYER_COLOURS, OPERATION_COLOURS, FORMAT_COLOURS, TENSOR_COLOURS):
        if name in table:
            return table[name]
    if name.removeprefix("grad_") in TENSOR_COLOURS:
        return TENSOR_COLOURS[name.removeprefix("grad_")]
    kind, _, variant = name.partition(":")
    if variant and kind in FORMAT_COLOURS:  # `mxfp8:rceil`: one of eight shades
        return lighter(FORMAT_COLOURS[kind], 0.2 + 0.07 * (zlib.crc32(variant.encode()) % 8))
    if variant and kind == "mx":  # `mx:e3m4:b16:rceil`: any hue, but darker than what has a name
        hue = zlib.crc32(variant.encode()) % 360 / 360
        return str(to_hex(hls_to_rgb(hue, 0.36, 0.45)))
    if name in _ALIASES:
        return FORMAT_COLOURS[_ALIASES[name]]
    for prefix, share in _SCOPES.items():
        if name.startswith(prefix):
            return lighter(colour_of(name.removeprefix(prefix)), share)
    return _SPARE[zlib.crc32(name.encode()) % len(_SPARE)]


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """As `colour_of`, but no two unknown names of one figure have the same."""
    found: dict[str, str] = {}
    for name in names:
        colour = colour_of(name)
        if colour in _SPARE and colour in found.values():
            at = _SPARE.index(colour)
            others = (*_SPARE[at:], *_SPARE[:at])
            colour = next((each for each in others if each not in found.values()), colour)
        found[name] = colour
    return found


def lighter(colour: str, share: float) -> str:
    """`colour` moved toward white by `share`."""
    red, green, blue = (value + (1.0 - value) * share for value in to_rgb(colour))
    return str(to_hex((red, green, blue)))


def short_count(count: float) -> str:
    """A count in at most five characters and a unit: 983, 12.4 K, 1.56 M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        # from 999.5 of the smaller unit on, three digits would read 1e+03
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:g}"


def percent(share: float) -> str:
    """A share in three significant digits; never 100 for less than all, never 0 for something."""
    if math.isnan(share):
        return "-"
    text = f"{100 * share:.3g}"
    if text == "100" and share < 1.0:
        return ">99.9 %"
    return f"{text} %"


def powers_of_two(axis: Axis, most: int = 9) -> None:
    """Whole exponents as powers of two, at no more than `most` ticks."""
    axis.set_major_locator(MaxNLocator(nbins=most, integer=True))
    axis.set_major_formatter(FuncFormatter(lambda x, _: power(2, round(x))))


def decades(axis: Axis) -> None:
    """Label the ticks of a logarithmic axis, as numbers if all are short, else as powers of ten.

    Ticks between decades have no label unless no decade is visible.
    """

    def name(x: float) -> str:
        low, high = sorted(axis.get_view_interval())
        return _decade(x, short=low >= 0.99e-3 and high < 1e5)

    axis.set_major_formatter(FuncFormatter(lambda x, _: name(x)))
    low, high = sorted(axis.get_view_interval())
    if not low > 0 or math.floor(math.log10(high)) - math.ceil(math.log10(low)) >= 1:
        axis.set_minor_formatter(NullFormatter())
    else:
        # 0.06 to 0.09 would stand on each other
        axis.set_minor_formatter(FuncFormatter(lambda x, _: name(x) if _leads(x) else ""))


def _leads(x: float) -> bool:
    """Whether a number is 2 or 5 times a power of ten."""
    return x > 0 and round(x / 10.0 ** math.floor(math.log10(x) + 1e-9)) in (2, 5)


def _decade(x: float, *, short: bool) -> str:
    if short or x <= 0:
        return f"{x:g}"
    exponent = math.floor(math.log10(x) + 1e-9)
    mantissa = x / 10.0**exponent
    return (
        power(10, exponent) if abs(mantissa - 1) < 1e-6 else f"{mantissa:.3g}·{power(10, exponent)}"
    )


def power(base: int, exponent: int) -> str:
    """2⁻³ as text."""
    return f"{base}{str(exponent).translate(_RAISED)}"


def guide(ax: Axes, axis: Literal["both", "x", "y"] = "y") -> None:
    """Thin lines behind the data."""
    ax.grid(axis=axis, color=RULE, linewidth=0.8)
    ax.set_axisbelow(True)


def nothing(ax: Axes, title: str, why: str = "no values to draw") -> Axes:
    """Axes for data that has no number to draw: it says so."""
    ax.text(0.5, 0.5, why, color=FAINT, ha="center", va="center", transform=ax.transAxes)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_title(title, loc="left")
    return quiet(ax)


def quiet(ax: Axes) -> Axes:
    """Take off what carries no information."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(length=3)
    return ax


def right_of_title(ax: Axes, note: str) -> None:
    """A remark on the line of the axes' title, at its other end."""
    ax.set_title(note, loc="right", color=FAINT, fontsize=9, fontweight="normal")
