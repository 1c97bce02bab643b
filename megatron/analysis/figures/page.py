"""Define the page that figures are drawn for: their width, font size and style."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

WIDTHS = {"single": 3.5, "double": 7.16}  #: inches of one and of two columns of a paper (IEEE)
STYLES = ("screen", "paper")
FONT_SIZES = {"screen": 10.0, "paper": 8.0}  #: default font size of each style, in points
LIMITS = {"width": (1.5, 40.0), "font size": (4.0, 40.0)}  #: accepted inches and points
#: Smallest width of a panel, as a fraction of its width on the screen at the same font size. If the
#: panels of a figure would be narrower, the figure gets fewer columns of panels.
NARROWEST = 0.55
LABELS = 0.9  #: height in inches of the title and the labels of a panel, whatever its width
HEADLINE = 0.55  #: height in inches that the sizes of figures include for title and note


@dataclass(frozen=True)
class Page:
    """Width, font size and style of figures; the defaults are for the screen.

    Attributes:
        width: width of each figure in inches; None: the width that suits its content.
        font_size: font size of axis labels in points; other text is scaled with it.
        headlines: whether a figure shows its title and note. A paper has a caption instead.
    """

    width: float | None = None
    font_size: float = FONT_SIZES["screen"]
    headlines: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        """Matplotlib settings of this page, which supplement `plots.style.RC`."""
        sizes = {"font.size": 1.0, "axes.titlesize": 1.1, "legend.fontsize": 0.9}
        return {name: share * self.font_size for name, share in sizes.items()}

    def fit(
        self, width: float, height: float, rows: int, columns: int, *, categories: bool
    ) -> tuple[float, float, int, int]:
        """Return a figure's size on this page, and the numbers of its rows and columns of panels.

        Args:
            width: width of the figure on the screen in inches.
            height: height of the figure on the screen in inches.
            rows: number of rows of panels on the screen.
            columns: number of columns of panels on the screen.
            categories: whether the height depends on the number of categories on the y-axis; if
                so, a narrower panel keeps its height.
        """
        scale = self.font_size / FONT_SIZES["screen"]
        panel_width = width / columns * scale
        panel_height = (height - HEADLINE) / rows * scale
        headline = HEADLINE * scale if self.headlines else 0.0
        if self.width is None:
            return panel_width * columns, panel_height * rows + headline, rows, columns
        panels = rows * columns
        columns = min(columns, max(1, math.floor(self.width / (NARROWEST * panel_width))))
        rows = math.ceil(panels / columns)
        if not categories:
            labels = LABELS * scale
            narrower = min(1.0, self.width / columns / panel_width)
            panel_height = labels + narrower * (panel_height - labels)
        return self.width, panel_height * rows + headline, rows, columns


_page: ContextVar[Page] = ContextVar("page")


def current_page() -> Page:
    """Return the page that figures are drawn for."""
    return _page.get(Page())


@contextmanager
def drawing_on(page: Page) -> Iterator[None]:
    """Set the page that figures are drawn for in a `with` block."""
    token = _page.set(page)
    try:
        yield
    finally:
        _page.reset(token)


def page_of(
    width: str | float | None = None, font_size: float | None = None, style: str = "screen"
) -> Page:
    """Return the page for the given options.

    Args:
        width: `single` or `double`, the column widths of a paper in `WIDTHS`, or a number of
            inches; None for the width that suits each figure, and for `double` in the style
            `paper`.
        font_size: font size in points; None for the default of the style in `FONT_SIZES`.
        style: `screen`, or `paper` for figures without title and note.

    Raises:
        ValueError: if an option has none of these values.
    """
    if style not in STYLES:
        raise ValueError(f"no style {style!r}; choose from {', '.join(STYLES)}")
    if width is None and style == "paper":
        width = "double"
    inches = None if width is None else _inches(width)
    size = FONT_SIZES[style] if font_size is None else float(font_size)
    _check("font size", size, "points")
    return Page(inches, size, headlines=style == "screen")


def _inches(width: str | float) -> float:
    if width in WIDTHS:
        return WIDTHS[str(width)]
    try:
        inches = float(width)
    except ValueError:
        names = ", ".join(WIDTHS)
        raise ValueError(f"no width {width!r}; give {names} or a number of inches") from None
    _check("width", inches, "inches")
    return inches


def _check(what: str, value: float, unit: str) -> None:
    low, high = LIMITS[what]
    if not low <= value <= high:
        raise ValueError(f"the {what} is {value:g} {unit}; give {low:g} to {high:g} {unit}")
