"""Load the data of a dump's figures, and draw one figure by its name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megatron.analysis.cli.stats_command import CACHE_FOLDER
from megatron.analysis.figures.figure_data import FigureData, Make, NothingToDrawError
from megatron.analysis.figures.page import drawing_on, page_of
from megatron.analysis.judged import JUDGED, OPERANDS
from megatron.analysis.outputs.registry import OUTPUTS, QUICK, REPORT
from megatron.analysis.plots.style import in_style
from megatron.analysis.stats import Statistics, compute
from megatron.analysis.stats.cache import ForeignCacheError, check_place
from megatron.analysis.store import TensorStore, selected
from megatron.analysis.study.first_look import default_formats
from megatron.fake_quant import get_format


@dataclass(frozen=True)
class Loaded:
    """The data of a dump's figures, and how its statistics were cached."""

    data: FigureData
    cache: Path | None  #: folder of the statistics cache; None if nothing is cached
    refused: list[str]  #: a message for each cache folder that cannot be used


def load(
    folder: str | Path,
    *,
    formats: Sequence[str] | None = None,
    select: Mapping[str, Any] | None = None,
    run: str | None = None,
    judge: str = OPERANDS,
    **computing: Any,
) -> FigureData:
    """Compute the statistics of a dump, and return the data that its figures are drawn from.

    The statistics are cached in the dump's folder, as the command `draw` does.

    Args:
        folder: folder of the dump, searched with its subfolders.
        formats: formats to compare; by default those of `default_formats`.
        select: conditions on the tensors to draw, such as `{"layer": [0, 1], "module": "fc*"}`; see
            `TensorStore.select`. All tensors by default.
        run: ID of the run to draw, or `latest` for the most recent run; all runs by default.
        judge: tensors by which formats are judged: `operands` or `results` of matmuls.
        computing: arguments `workers`, `max_memory`, `scheduler`, `strict` and `progress` of
            `stats.compute`.

    Raises:
        ValueError: if a name or condition is unknown, or there is no tensor to draw.
    """
    store = TensorStore(folder)
    store = store if run is None else store.only(run)
    loaded = load_store(
        store,
        [Path(folder) / CACHE_FOLDER],
        formats=formats,
        select=select,
        judge=judge,
        **computing,
    )
    return loaded.data


def load_store(
    store: TensorStore,
    caches: Sequence[Path],
    *,
    formats: Sequence[str] | None = None,
    select: Mapping[str, Any] | None = None,
    judge: str = OPERANDS,
    **computing: Any,
) -> Loaded:
    """Compute the statistics of the tensors in a store, as `load` does for a folder.

    Args:
        caches: possible folders of the statistics cache, in order of preference. Nothing is cached
            if none can be used.
    """
    if judge not in JUDGED:
        raise ValueError(f"no kind of judged tensors {judge!r}; choose from {', '.join(JUDGED)}")
    names = default_formats(store) if formats is None else formats
    chosen = tuple(dict.fromkeys(get_format(name).name for name in names))
    records = None if not select else selected(store, select)
    statistics, cache, refused = _compute(store, chosen, caches, select=records, **computing)
    progress = bool(computing.get("progress", False))
    data = FigureData(store, statistics, chosen, progress, judge=judge)
    if statistics.tensors.empty:
        raise ValueError(_nothing_readable(data))
    return Loaded(data, cache, refused)


def names(data: FigureData) -> list[str]:
    """Return the names of all figures that may be drawn from `data`, such as `heatmaps/amax`.

    Some outputs inspect tensors to find out which figures they have, which takes time. `figure`
    raises an error for a figure that needs tensors that the dump lacks.
    """
    return [f"{output}/{name}" for output in _figure_outputs() for name, _ in _made(data, output)]


def figure(
    data: FigureData,
    name: str,
    *,
    width: str | float | None = None,
    font_size: float | None = None,
    style: str = "screen",
) -> Figure:
    """Draw one figure, and return it.

    `save` writes it to a file.

    Args:
        data: result of `load`.
        name: one of `names`.
        width: `single` (3.5 inches), `double` (7.16 inches) or a number of inches; None for the
            width that suits the figure, and for `double` in the style `paper`.
        font_size: font size of labels in points; by default 10, or 8 in the style `paper`.
        style: `screen`, or `paper` for a figure without title and note. `caption` returns both.

    Raises:
        NothingToDrawError: if the dump lacks the data that the figure needs.
        ValueError: if a name or an option is unknown.
    """
    page = page_of(width, font_size, style)
    output, _, rest = name.partition("/")
    if output not in _figure_outputs():
        outputs = ", ".join(_figure_outputs())
        raise ValueError(f"no figure {name!r}: a name begins with one of {outputs} and a slash")
    with in_style(page.settings), drawing_on(page):
        for other, make in _made(data, output):
            if other == rest:
                drawn = make()
                assert isinstance(drawn, Figure)
                return drawn
    others = ", ".join(other for other, _ in _made(data, output))
    raise ValueError(f"no figure {name!r}; {output} has: {others}")


def save(figure: Figure, path: str | Path, *, dpi: float = 300) -> None:
    """Write a figure to a file, whose suffix gives the format: .png, .svg, .pdf or .eps.

    Vector formats contain TrueType fonts; matplotlib's default are Type 3 fonts, which many
    publishers refuse.

    Args:
        figure: result of `figure`.
        path: file to write; an existing file is replaced.
        dpi: dots per inch of a PNG file.

    Raises:
        ValueError: if the suffix is not a format that matplotlib writes.
        OSError: if the file cannot be written.
    """
    with in_style():
        figure.savefig(path, dpi=dpi)


def _figure_outputs() -> list[str]:
    return [name for name in OUTPUTS if name not in (QUICK, REPORT)]


def _made(data: FigureData, output: str) -> Iterator[tuple[str, Make]]:
    """Yield the names of the figures in an output folder, and the functions that draw them.

    Text files are left out. Nothing is yielded if the dump lacks the data for all figures.
    """
    try:
        yield from ((name, make) for name, make in OUTPUTS[output].load()(data) if "." not in name)
    except NothingToDrawError:
        return


def _compute(
    store: TensorStore, formats: Sequence[str], caches: Sequence[Path], **computing: Any
) -> tuple[Statistics, Path | None, list[str]]:
    """Return the statistics, the cache folder used, and a message for each unusable cache folder.

    Args:
        caches: possible cache folders, in order of preference. Nothing is cached if none can be
            used.
    """
    cache, refused = _choose(caches)
    try:
        return compute(store, formats, cache=cache, **computing), cache, refused
    except ForeignCacheError as error:  # another process created the folder after the check
        refused = [*refused, str(error)]
    return compute(store, formats, cache=None, **computing), None, refused


def _choose(caches: Sequence[Path]) -> tuple[Path | None, list[str]]:
    """Return the first usable cache folder or None, and a message for each unusable one."""
    refused = []
    for cache in caches:
        try:
            check_place(cache)
        except ForeignCacheError as error:
            refused.append(f"{error}; results are cached elsewhere or not at all")
            continue
        if os.access(cache if cache.exists() else cache.parent, os.W_OK):
            return cache, refused
    return None, refused


def _nothing_readable(data: FigureData) -> str:
    """Return a message that explains why none of the tensors can be drawn."""
    folder, problems = data.store.folder, data.statistics.problems
    if not problems:
        return f"{folder} has codes only, and no values to draw; collect other tensors too"
    listed = "".join(f"\n  {problem}" for problem in problems[:10])
    return f"none of the {len(problems)} .pt files in {folder} can be read:{listed}"
