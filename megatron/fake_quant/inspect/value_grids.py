"""Pictures of the values of number formats and of the spacing between these values.

Each format's values are a row of ticks. Values are drawn in units of their scale, because a scale
only shifts the whole row.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

from megatron.fake_quant.elements import Element
from megatron.fake_quant.formats import Format
from megatron.fake_quant.inspect import format_properties
from megatron.fake_quant.inspect.format_table import number

#: Color of each main format in all pictures, including the figures of `megatron.analysis`. Variants
#: have the color of their format. Other formats get spare colors; they are not in the default
#: picture.
COLORS: Mapping[str, str] = MappingProxyType(
    {
        "mxfp8": "#2a6f97",
        "mxfp8_e5m2": "#6ba3c4",
        "mxfp6_e3m2": "#7a5195",
        "mxfp6_e2m3": "#a97fbf",
        "mxfp4": "#e07a5f",
        "mxint8": "#b5838d",
        "nvfp4": "#bc4749",
        "hifp8": "#3d8f63",
        "hifp4": "#86a83c",
        "fp8_e4m3": "#3a7ca5",
        "fp8_e5m2": "#81b1cc",
    }
)
_SPARE = ("#5f7470", "#8c6d46", "#6d597a", "#557a46", "#94617c", "#4f6d7a")
_INK, _FAINT, _RULE = "#222222", "#6f6f6f", "#d9d9d9"
_LANE = 1.4  #: distance in points between lines that would otherwise coincide
_RC: dict[Any, Any] = {
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.color": _FAINT,
    "ytick.labelcolor": _INK,
}


def picture(formats: Sequence[Format], palette: Mapping[str, str] = COLORS) -> Figure:
    """Draw the values of `formats` and, below them on the same x-axis, their relative spacing.

    Raises:
        ValueError: if one of the formats is a cast, or if there are no formats.
    """
    casts = [fmt.name for fmt in formats if fmt.is_cast]
    if not formats:
        raise ValueError("there are no formats to draw; choose one or more")
    if casts:
        raise ValueError(
            f"cannot draw {' and '.join(casts)}: thousands of values would form a solid bar; "
            "choose formats with elements of at most 8 bits"
        )
    rows = 0.36 * len(formats) + 0.7
    with rc_context(_RC):
        figure = Figure(figsize=(11, rows + 3.9), layout="constrained", dpi=150)
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[rows, 3.4])
        plot_values(formats, palette=palette, ax=top)
        plot_spacing(formats, palette=palette, ax=bottom)
        top.tick_params(labelbottom=True)
    return figure


def plot_values(formats: Sequence[Format], *, palette: Mapping[str, str], ax: Axes) -> Axes:
    """Draw each format's positive values as a row of ticks."""
    lowest, highest = _span(formats)
    for place, fmt in enumerate(formats):
        values = format_properties.positive_values(fmt.element)
        color = _color(fmt, place, palette)
        # Use thin ticks for many values, because thick ticks would merge.
        width = (
            0.5 if max(part.count for part in format_properties.binades(fmt.element)) > 16 else 1.0
        )
        ax.eventplot(
            values.tolist(), lineoffsets=place, linelengths=0.72, linewidths=width, colors=color
        )
        note = f"{len(values)} of {fmt.element.name}, {_power(values[0])} to {_power(values[-1])}"
        ax.text(1.01, place, note, transform=ax.get_yaxis_transform(), va="center", color=_FAINT)
    ax.set_yticks(range(len(formats)), [fmt.name for fmt in formats])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(formats) - 0.4, -0.6)
    _magnitudes(ax, lowest, highest)
    ax.set_title("Positive values, before any scale")
    return ax


def plot_spacing(formats: Sequence[Format], *, palette: Mapping[str, str], ax: Axes) -> Axes:
    """Draw one line per element type that shows spacing / value at the start of each binade."""
    users: dict[Element, int] = {}
    for place, fmt in enumerate(formats):
        users.setdefault(fmt.element, place)
    for lane, (element, place) in enumerate(users.items()):
        points = _steps(element)
        if not points:  # The element type has a single value.
            continue
        shift = _LANE * (lane - (len(users) - 1) / 2) / 72
        figure = ax.figure.figure
        assert figure is not None
        moved = ax.transData + ScaledTranslation(0, shift, figure.dpi_scale_trans)
        color = _color(formats[place], place, palette)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        ax.plot(xs, ys, color=color, linewidth=1.3, transform=moved, label=element.name)
        ax.annotate(
            element.name,
            points[0],
            xytext=(2, 9),
            textcoords="offset points",
            rotation=60,
            rotation_mode="anchor",
            color=color,
            annotation_clip=False,
        )
    ax.set_yscale("log", base=2)
    finest = min((y for element in users for _, y in _steps(element)), default=1.0)
    exponents = range(format_properties.exponent(finest), 1)
    ax.yaxis.set_major_locator(FixedLocator([math.ldexp(1, e) for e in exponents]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.7g} %"))
    ax.set_ylim(finest / 1.5, 1.5)
    ax.grid(axis="y", color=_RULE, linewidth=0.8)
    ax.set_axisbelow(True)
    _magnitudes(ax, *_span(formats))
    ax.set(xlabel="magnitude (of elements, in units of their scale)", ylabel="spacing / value")
    ax.set_title("Relative spacing, at the start of each binade", pad=44)
    note = "lines that would coincide are drawn side by side"
    ax.set_title(note, loc="right", pad=44, color=_FAINT, fontsize=8.5, fontweight="normal")
    return ax


def _steps(element: Element) -> list[tuple[float, float]]:
    """Return the points (magnitude, relative spacing) of the line for an element type."""
    largest = float(format_properties.positive_values(element)[-1])
    return [
        (min(x, largest), part.relative)
        for part in format_properties.binades(element)
        if part.relative is not None
        for x in (math.ldexp(1, part.first), math.ldexp(1, part.last + 1))
    ]


def _span(formats: Sequence[Format]) -> tuple[int, int]:
    """Return the exponents of the smallest and the largest positive element of all formats."""
    parts = [part for fmt in formats for part in format_properties.binades(fmt.element)]
    return min(part.first for part in parts), max(part.last for part in parts)


def _magnitudes(ax: Axes, lowest: int, highest: int) -> None:
    """Set up the x-axis of `ax` for magnitudes, with ticks at powers of two."""
    ax.set_xscale("log", base=2)
    ax.set_xlim(math.ldexp(0.7, lowest), math.ldexp(2, highest))
    every = max(1, (highest - lowest) // 18)
    ticks = [math.ldexp(1, e) for e in range(lowest, highest + 2) if e % every == 0]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"$2^{{{format_properties.exponent(x)}}}$")
    )


def _power(value: object) -> str:
    text = number(float(value))  # type: ignore[arg-type]
    return f"$2^{{{text[2:]}}}$" if text.startswith("2^") else text


def _color(fmt: Format, place: int, palette: Mapping[str, str]) -> str:
    """Return the color of a format, or of the format without variants, or else a spare color."""
    base = fmt.name.partition(":")[0]
    return palette.get(fmt.name) or palette.get(base) or _SPARE[place % len(_SPARE)]
