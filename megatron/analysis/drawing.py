"""Draw the figures and the report of a dump, after computing its statistics once.

    from megatron.analysis import draw

    result = draw(Path("enhanced_tensor_logs"), Path("draw"))
    result.files, result.missing, result.problems

After an interruption, the next call takes the statistics from the cache. Outputs that are still up
to date are not drawn again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.analysis import stats
from megatron.analysis.cli.stats_command import CACHE_FOLDER
from megatron.analysis.dump.run_endings import remarks_on, unfinished
from megatron.analysis.dump.tensor_files import Problem
from megatron.analysis.figures.figure_data import FigureData
from megatron.analysis.judged import JUDGED, OPERANDS
from megatron.analysis.outputs.provenance import fingerprint, remember, set_aside, unchanged
from megatron.analysis.outputs.registry import IMAGES, OUTPUTS, QUICK
from megatron.analysis.outputs.render import Made, Order, make_all
from megatron.analysis.quick import QuickResult, check_output, quick_analysis
from megatron.analysis.stats.cache import ForeignCacheError, check_place
from megatron.analysis.stats.executors import affordable
from megatron.analysis.stats.result import REPEATED
from megatron.analysis.store import TensorStore
from megatron.fake_quant import get_format
from megatron.fake_quant.quant_type import parse_type

#: Formats compared by default, in addition to the formats of the dump.
FORMATS = ("mxfp8", "mxfp4", "nvfp4", "hifp8")


@dataclass
class DrawResult:
    """The result of `draw`: files written, figures not drawn, and dump files left out."""

    files: list[Path] = field(default_factory=list)
    unchanged: int = 0  #: number of `files` kept from an earlier call
    #: Reasons for missing figures, by figure name.
    missing: dict[str, str] = field(default_factory=dict)
    #: Tracebacks of figures that could not be drawn because of an error, by figure name.
    failed: dict[str, str] = field(default_factory=dict)
    kept: list[Path] = field(default_factory=list)  #: new paths of renamed earlier outputs
    problems: list[Problem] = field(default_factory=list)  #: dump files that were left out
    tensors: int = 0  #: number of tensors that were drawn
    #: Number of tensors with each note; the key is its text, on what was left out and why.
    notes: dict[str, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)  #: messages on the cache and unfinished runs


def draw(
    folder: Path,
    output: Path,
    *,
    formats: Sequence[str] | None = None,
    figures: Sequence[str] = tuple(OUTPUTS),
    image: str = "png",
    run: str | None = None,
    judge: str = OPERANDS,
    say: Callable[[str], None] | None = None,
    progress: bool = False,
    **computing: Any,
) -> DrawResult:
    """Draw the chosen figures, text files and report of a dump.

    Args:
        formats: formats to compare; by default `FORMATS` and the formats used in the dump.
        figures: names from `registry.OUTPUTS` to draw; all by default.
        image: file format of the figures: png, svg or pdf.
        run: ID of the run to draw, or `latest` for the most recent run; all runs by default.
        judge: tensors by which formats are judged: `operands` or `results` of matmuls.
        say: function called with the path of each file that is written.
        progress: whether to show progress bars on a terminal.
        computing: arguments `workers`, `max_memory`, `scheduler` and `strict` of `stats.compute`.

    Raises:
        ValueError: if a name is unknown, there is no tensor to draw, or the output folder is not
            writable.
    """
    _check("figure", figures, tuple(OUTPUTS))
    _check("image format", [image], IMAGES)
    _check("kind of tensors to judge", [judge], JUDGED)
    for name in formats or ():
        get_format(name)
    check_output(output)
    notify: Callable[[str], None] = say or (lambda path: None)
    if list(figures) == [QUICK]:  # the output "quick" does not compare formats
        workers = computing.get("workers")
        look = quick_analysis(folder, output, run=run, workers=workers, progress=progress)
        for path in (look.picture, look.text):
            notify(str(path))
        return result_of_quick(look)
    store = TensorStore(folder)
    store = store.only(run) if run is not None else store
    chosen = tuple(get_format(name).name for name in formats or default_formats(store))
    chosen = tuple(dict.fromkeys(chosen))
    caches = (folder / CACHE_FOLDER, output / CACHE_FOLDER)
    follows = fingerprint(folder, [caches[0], output], chosen, image, run, judge)
    computing["progress"] = progress
    statistics, cache, refused = _compute(store, chosen, caches, **computing)
    if statistics.tensors.empty:
        raise ValueError(_nothing_readable(folder, statistics.problems))
    result = DrawResult(
        problems=list(statistics.problems),
        tensors=len(statistics.tensors),
        notes=statistics.notes() | note_of_repeats(statistics.repeats),
        remarks=[*refused, *statistics.remarks, *remarks_on(unfinished(store))],
    )
    figure_data = FigureData(store, statistics, chosen, progress, judge=judge)
    order = Order(figure_data, output, image, run, cache)
    workers = affordable(computing.get("workers"), computing.get("max_memory"))
    names = [name for name in OUTPUTS if name in figures]
    _draw_outputs(names, order, result, follows=follows, workers=workers, notify=notify)
    return result


def _draw_outputs(
    names: Sequence[str],
    order: Order,
    result: DrawResult,
    *,
    follows: str,
    workers: int,
    notify: Callable[[str], None],
) -> None:
    """Draw the outputs in `names` that are out of date, and add the results to `result`.

    The files of outputs that are up to date are added, too.
    """
    output, dump = order.output, order.figure_data.store.folder
    current = unchanged(output, names, follows)
    for made in current.values():
        _add(made, result)
    result.unchanged = len(result.files)
    names = [name for name in names if name not in current]
    result.kept = set_aside(output, names, dump)
    # `disable=None` makes tqdm show the bar only on a terminal
    hidden = None if order.figure_data.progress else True
    drawn = []
    with tqdm(total=len(names), desc="Drawing", unit="output", leave=False, disable=hidden) as bar:
        for made in make_all(names, order, workers):
            bar.update()
            _add(made, result)
            drawn.append(made)
            for path in made.files:
                notify(str(path))
    result.missing = dict(sorted(result.missing.items()))
    remember(output, dump, drawn, follows)


def _add(made: Made, result: DrawResult) -> None:
    """Add one output's files, missing figures and failed figures to `result`."""
    result.files += made.files
    result.missing |= made.missing
    result.failed |= made.failed


def result_of_quick(look: QuickResult) -> DrawResult:
    """Convert the result of `quick_analysis` to a `DrawResult`."""
    return DrawResult(
        [look.picture, look.text],
        problems=look.problems,
        kept=look.kept,
        tensors=len(look.measurements.table),
        remarks=remarks_on(look.endings),
        notes=look.measurements.notes() | note_of_repeats(look.measurements.repeats),
    )


def note_of_repeats(count: int) -> dict[str, int]:
    """Return the entry of `DrawResult.notes` for tensors that activation recomputation saved twice.

    The result is an empty dictionary if there are no such tensors.
    """
    return {REPEATED: count} if count else {}


def default_formats(store: TensorStore) -> list[str]:
    """Return `FORMATS`, followed by other formats that the dump's quantization types use.

    Operands in high precision, such as those of bf16 runs, add no format.
    """
    types = store.records["quant_type"].dropna().unique()
    formats = list(FORMATS)
    for name in map(str, types):
        try:
            assigned = parse_type(name)
        except ValueError:
            continue  # the quantization type of a recipe has no fixed formats
        for fmt in assigned.values():
            if fmt is not None and fmt.name not in formats:
                formats.append(fmt.name)
    return formats


def _compute(
    store: TensorStore, formats: Sequence[str], caches: Sequence[Path], **computing: Any
) -> tuple[stats.Statistics, Path | None, list[str]]:
    """Return the statistics, the cache folder used, and a message for each unusable cache folder.

    Args:
        caches: possible cache folders, in order of preference: the folder in the dump that the
            `stats` command uses, and a folder next to the figures. Nothing is cached if neither
            can be used.
    """
    cache, refused = _choose(caches)
    try:
        return stats.compute(store, formats, cache=cache, **computing), cache, refused
    except ForeignCacheError as error:  # another process created the folder after the check
        refused = [*refused, str(error)]
    return stats.compute(store, formats, cache=None, **computing), None, refused


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


def _check(kind: str, given: Sequence[str], accepted: Sequence[str]) -> None:
    for name in given:
        if name not in accepted:
            raise ValueError(f"no {kind} {name!r}; choose from {', '.join(accepted)}")


def _nothing_readable(folder: Path, problems: Sequence[Problem]) -> str:
    if not problems:
        return f"{folder} has codes only, and no values to draw; collect other tensors too"
    listed = "".join(f"\n  {problem}" for problem in problems[:10])
    return f"none of the {len(problems)} .pt files in {folder} can be read:{listed}"
