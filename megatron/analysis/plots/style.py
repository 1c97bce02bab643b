"""Style shared by all figures: one color per name, short numbers and uncluttered axes."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from colorsys import hls_to_rgb
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.font_manager import fontManager
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from megatron.fake_quant.inspect.value_grids import COLORS
from megatron.fake_quant.names import ALIASES
from megatron.fake_quant.quant_type import split_type

#: Color of each format, the same in every figure.
FORMAT_COLORS = {
    "none": "#9a9a9a",
    "bf16": "#4c4c4c",
    "fp16": "#7d7461",
    **COLORS,
}
LAYER_COLORS = {"attention": "#8e5c8b", "linear": "#b3922e"}
OPERATION_COLORS = {"forward": "#1f7a7a", "backward": "#c4587c"}
#: Color of each tensor name; a gradient has the color of the tensor that it belongs to.
TENSOR_COLORS = {
    "input": "#1f7a7a",
    "weight": "#b3922e",
    "output": "#5b6abf",
    "query": "#c4587c",
    "key": "#8c6d46",
    "value": "#557a46",
    "attention_scores": "#94617c",
    "attention_probs": "#3f88c5",
}
INK = "#222222"  #: color of text
FAINT = "#6f6f6f"  #: color of notes and axes
RULE = "#d9d9d9"  #: color of grid lines
TRACK = "#f1f2f3"  #: color of empty cells and pixels, and of the background behind a bar
FILL = 0.12  #: opacity of the area below an outline
ALARM = "#b3261e"  #: color of warnings, such as NaN, Inf and unreadable files

#: Prefixes of quantization types that limit which operations are quantized. The number states
#: how much lighter the color of the type is than the color of its format (0: the same, 1: white).
_SCOPES = {"FA_linear_": 0.2, "linear_": 0.4, "FA_": 0.6}
#: Colors of unknown names, distinct from each other and from the colors of the formats.
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
    # Names of modules and folders may contain dollar signs, so no text is parsed as a formula.
    "text.parse_math": False,
    # Publishers refuse Type 3 fonts, which matplotlib embeds by default; 42 is TrueType.
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "legend.frameon": False,
    "legend.fontsize": 9,
}  #: settings that `in_style` applies while a figure is drawn
#: Fonts with Chinese characters, for names that the default font cannot show.
FALLBACKS = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei"),
    *("WenQuanYi Zen Hei", "Microsoft YaHei", "PingFang SC", "SimHei", "Droid Sans Fallback"),
)


@contextmanager
def in_style(settings: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Apply `RC` and further settings of Matplotlib in a `with` block.

    Warnings about characters that no font has are suppressed, because names may contain any
    character. A missing character is drawn as a box.
    """
    values = RC | {"font.family": families()} | dict(settings or {})
    with matplotlib.rc_context(values), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from", UserWarning)
        yield


def families() -> list[str]:
    """Return the font families to draw with: the default one, and the installed `FALLBACKS`."""
    installed = {font.name for font in fontManager.ttflist}
    return [str(RC["font.family"]), *(name for name in FALLBACKS if name in installed)]


def color_of(name: str) -> str:
    """Return the color of a format, quantization type, layer type, operation or tensor name.

    The color of an unknown name is computed from its characters, so it is always the same.
    """
    return _known_color(name) or _SPARE[_spare_index(name)]


def _known_color(name: str) -> str | None:
    """Return the color of a known name, or None if the name is unknown."""
    for table in (LAYER_COLORS, OPERATION_COLORS, FORMAT_COLORS, TENSOR_COLORS):
        if name in table:
            return table[name]
    if name.removeprefix("grad_") in TENSOR_COLORS:
        return TENSOR_COLORS[name.removeprefix("grad_")]
    tensor, _, layer_type = name.partition(" of ")
    if layer_type in LAYER_COLORS and (color := _known_color(tensor)):
        return color if layer_type == "linear" else lighter(color, 0.45)
    kind, _, variant = name.partition(":")
    if variant and kind in FORMAT_COLORS:  # a name such as `mxfp8:rceil` gets one of eight shades
        return lighter(FORMAT_COLORS[kind], 0.2 + 0.07 * (zlib.crc32(variant.encode()) % 8))
    if variant and kind == "mx":  # a name such as `mx:e3m4:b16:rceil` gets a dark color of any hue
        hue = zlib.crc32(variant.encode()) % 360 / 360
        return str(to_hex(hls_to_rgb(hue, 0.36, 0.45)))
    if name in ALIASES:
        return FORMAT_COLORS[ALIASES[name]]
    prefix, format_name = split_type(name)
    if prefix:
        return lighter(color_of(format_name), _SCOPES[prefix])
    return None


def _spare_index(name: str) -> int:
    return zlib.crc32(name.encode()) % len(_SPARE)


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """Return a color for each name, as `color_of` does, but without equal colors for unknown names.

    If there are more unknown names than spare colors, colors repeat.
    """
    known = {name: _known_color(name) for name in names}
    colors = {name: color for name, color in known.items() if color is not None}
    for name in [name for name in known if known[name] is None]:
        at = _spare_index(name)
        others = (*_SPARE[at:], *_SPARE[:at])
        colors[name] = next((color for color in others if color not in colors.values()), others[0])
    return {name: colors[name] for name in known}


def lighter(color: str, share: float) -> str:
    """Return a lighter shade of `color`; a `share` of 1 gives white.

    Args:
        color: a Matplotlib color.
        share: how far the color moves toward white, from 0 (not at all) to 1 (white).
    """
    red, green, blue = (value + (1.0 - value) * share for value in to_rgb(color))
    return str(to_hex((red, green, blue)))


def short_count(count: float) -> str:
    """Return a count as text with three significant digits, such as 983, 12.4 K or 1.56 M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        # A number such as 999,500 is shown as 1 M, because `.3g` would format 999.5 K as 1e+03 K.
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:g}"


def percent(share: float) -> str:
    """Return a share as a percentage with three significant digits, or "-" for NaN.

    A share below 1 is never shown as 100 %.
    """
    if math.isnan(share):
        return "-"
    text = f"{100 * share:.3g}"
    if text == "100" and share < 1.0:
        return ">99.9 %"
    return f"{text} %"


def visible_percent(share: float) -> str:
    """Return a share as a percentage, or `<0.0001 %` if it is positive and below 1e-6."""
    return "<0.0001 %" if 0 < share < 1e-6 else percent(share)


def powers_of_two(axis: Axis) -> None:
    """Label the integers on an axis of exponents as powers of two, as far as there is space."""
    axis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axis.set_major_formatter(FuncFormatter(lambda x, _: power(2, round(x))))


#: Leading digits of labeled numbers on a logarithmic axis that shows fewer than two powers of
#: ten. The first choice that gives enough labels is taken.
DIGITS = ((1, 2, 5), (1, 2, 3, 5, 7), tuple(range(1, 10)))
FEWEST_LABELS = 3  #: minimum number of labels on an axis


def decades(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers, or with powers of ten if numbers would be long.

    Ticks between decades are labeled only if the view contains fewer than two powers of ten. If
    there are too few such ticks, the ticks of a linear axis are used instead.
    """

    def name(x: float) -> str:
        low, high = sorted(axis.get_view_interval())
        return _decade(x, short=low >= 0.99e-3 and high < 1e5)

    axis.set_major_formatter(FuncFormatter(lambda x, _: name(x)))
    low, high = sorted(axis.get_view_interval())
    if isinstance(axis.get_major_locator(), _LinearTicks):  # from an earlier view
        axis.set_major_locator(LogLocator())
        axis.set_minor_locator(LogLocator(subs="auto"))
    if not low > 0 or math.floor(math.log10(high)) - math.ceil(math.log10(low)) >= 1:
        axis.set_minor_formatter(NullFormatter())
        return
    digits = next((each for each in DIGITS if _count(low, high, each) >= FEWEST_LABELS), None)
    if digits is None:
        axis.set_major_locator(_LinearTicks(FEWEST_LABELS + 2))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_minor_formatter(FuncFormatter(lambda x, _: name(x) if _leads(x, digits) else ""))


class _LinearTicks(MaxNLocator):
    """Evenly spaced ticks for a logarithmic axis whose view contains too few round numbers."""


def _count(low: float, high: float, digits: Collection[int]) -> int:
    """Return how many numbers in a view are a power of ten times one of `digits`."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return sum(low <= digit * 10.0**e <= high for e in exponents for digit in digits)


def _leads(x: float, digits: Collection[int]) -> bool:
    """Return whether a number is a power of ten times one of `digits`."""
    return x > 0 and round(x / 10.0 ** math.floor(math.log10(x) + 1e-9)) in digits


def _decade(x: float, *, short: bool) -> str:
    if short or x <= 0:
        return f"{x:g}"
    exponent = math.floor(math.log10(x) + 1e-9)
    mantissa = x / 10.0**exponent
    return (
        power(10, exponent) if abs(mantissa - 1) < 1e-6 else f"{mantissa:.3g}·{power(10, exponent)}"
    )


def power(base: int, exponent: int) -> str:
    """Return a power as text with a superscript exponent, such as 2⁻³."""
    return f"{base}{str(exponent).translate(_RAISED)}"


def text_size(size: float) -> float:
    """Return a font size in points, adapted to the setting `font.size`.

    Args:
        size: font size in points if `font.size` is 10.
    """
    return size * float(matplotlib.rcParams["font.size"]) / 10


def guide(ax: Axes, axis: Literal["both", "x", "y"] = "y") -> None:
    """Draw thin grid lines behind the data."""
    ax.grid(axis=axis, color=RULE, linewidth=0.8)
    ax.set_axisbelow(True)


def nothing(ax: Axes, title: str, why: str = "no values to draw") -> Axes:
    """Write on empty axes why there is nothing to draw."""
    ax.text(0.5, 0.5, why, color=FAINT, ha="center", va="center", transform=ax.transAxes)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_title(title, loc="left")
    return quiet(ax)


def quiet(ax: Axes) -> Axes:
    """Hide the top and right spines and shorten the ticks."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(length=3)
    return ax


def right_of_title(ax: Axes, note: str) -> None:
    """Write a note on the line of the axes' title, aligned to the right."""
    ax.set_title(note, loc="right", color=FAINT, fontsize=text_size(9), fontweight="normal")
