"""Draw the figures and the report of a dump, after computing its statistics once.

    from megatron.analysis import draw

    result = draw(Path("enhanced_tensor_logs"), Path("draw"))
    result.files, result.missing, result.problems

After an interruption, the next call takes the statistics from the cache. Outputs that are still up
to date are not drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.analysis.cli.stats_command import CACHE_FOLDER
from megatron.analysis.dump.run_endings import remarks_on, unfinished
from megatron.analysis.dump.tensor_files import Problem
from megatron.analysis.figures.page import Page
from megatron.analysis.figures.public import load_store
from megatron.analysis.judged import JUDGED, OPERANDS
from megatron.analysis.outputs.provenance import (
    files_of,
    fingerprint,
    remember,
    set_aside,
    unchanged,
)
from megatron.analysis.outputs.registry import IMAGES, OUTPUTS, QUICK, REPORT
from megatron.analysis.outputs.render import Made, Order, forks, make_all
from megatron.analysis.progress import Progress
from megatron.analysis.quick import QuickResult, check_output, quick_analysis
from megatron.analysis.stats.executors import affordable
from megatron.analysis.stats.result import REPEATED
from megatron.analysis.store import TensorStore
from megatron.fake_quant import get_format


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
    #: Number of tensors by note; a note is a text on what was left out and why.
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
    select: Mapping[str, Any] | None = None,
    page: Page | None = None,
    say: Callable[[str], None] | None = None,
    progress: bool = False,
    **computing: Any,
) -> DrawResult:
    """Draw the chosen figures, text files and report of a dump.

    Args:
        formats: formats to compare; by default those of `first_look.default_formats`.
        figures: names from `registry.OUTPUTS` to draw; all by default.
        image: file format of the figures: png, svg or pdf.
        run: ID of the run to draw, or `latest` for the most recent run; all runs by default.
        judge: tensors by which formats are judged: `operands` or `results` of matmuls.
        select: conditions on the tensors to draw; see `TensorStore.select`. All by default. The
            output `quick` describes whole runs, and is left out if there are conditions.
        page: width, font size and style of the figures, as `figures.page.page_of` returns them;
            the report has its own style.
        say: function called with the path of each file that is written.
        progress: whether to report the progress on stderr.
        computing: arguments `workers`, `max_memory`, `scheduler` and `strict` of `stats.compute`.

    Raises:
        ValueError: if a name is unknown, there is no tensor to draw, or the output folder is not
            writable.
    """
    _check("figure", figures, tuple(OUTPUTS))
    _check("image format", [image], IMAGES)
    _check("kind of judged tensors", [judge], JUDGED)
    for name in formats or ():
        get_format(name)
    check_output(output)
    notify: Callable[[str], None] = say or (lambda path: None)
    page = page or Page()
    if page != Page() and set(figures) <= {QUICK, REPORT}:
        raise ValueError(
            "quick and the report have a fixed style; leave out --width, --font-size and --style"
        )
    if list(figures) == [QUICK] and select:
        raise ValueError("quick describes whole runs; leave --select out, or draw other figures")
    if list(figures) == [QUICK]:  # the output "quick" needs no statistics of the formats
        workers = computing.get("workers")
        look = quick_analysis(
            folder, output, run=run, formats=formats, workers=workers, progress=progress
        )
        for path in (look.picture, look.text):
            notify(str(path))
        return result_of_quick(look)
    store = TensorStore(folder)
    store = store.only(run) if run is not None else store
    caches = (folder / CACHE_FOLDER, output / CACHE_FOLDER)
    computing["progress"] = progress
    loaded = load_store(store, caches, formats=formats, select=select, judge=judge, **computing)
    data, statistics = loaded.data, loaded.data.statistics
    options = (data.formats, image, run, judge, dict(select or {}), asdict(page))
    follows = fingerprint(folder, [caches[0], output], *options)
    result = DrawResult(
        problems=list(statistics.problems),
        tensors=len(statistics.tensors),
        notes=statistics.notes() | note_of_repeats(statistics.repeats),
        remarks=[*loaded.refused, *statistics.remarks, *remarks_on(unfinished(store))],
    )
    order = Order(data, output, image, run, loaded.cache, page)
    workers = affordable(computing.get("workers"), computing.get("max_memory"))
    names = [name for name in OUTPUTS if name in figures and not (name == QUICK and select)]
    if QUICK in figures and select:
        result.missing[QUICK] = "it describes whole runs; leave out --select to draw it"
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
    shown = order.figure_data.progress
    drawn = []
    alone = not forks(names, workers)
    with Progress(len(names), "Drawing", "output", shown=shown, thread=alone) as bar:
        for made in make_all(names, order, workers, bar.tick):
            bar.update()
            _add(made, result)
            drawn.append(made)
            for path in made.files:
                notify(str(path))
    result.missing = dict(sorted(result.missing.items()))
    for made in drawn:
        if made.name == REPORT and made.files:
            from megatron.analysis.report import link_figures

            paths = [path.relative_to(output).as_posix() for path in result.files]
            new = [each.name for each in drawn]
            link_figures(made.files[0], [*paths, *files_of(output, dump, apart_from=new)])
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
    """Return the entry of `DrawResult.notes` for tensors that activation recomputation saved again.

    The result is an empty dictionary if there are no such tensors.
    """
    return {REPEATED: count} if count else {}


def _check(kind: str, given: Sequence[str], accepted: Sequence[str]) -> None:
    for name in given:
        if name not in accepted:
            raise ValueError(f"no {kind} {name!r}; choose from {', '.join(accepted)}")
