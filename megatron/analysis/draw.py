"""Everything that can be drawn of a dump, in one command: statistics once, then the outputs.

    result = draw(Path("enhanced_tensor_logs"), Path("draw"))
    result.files, result.missing, result.problems

After an interrupted call the next one takes the statistics from the cache; what was drawn before
and would be the same again is not drawn again.
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
from megatron.analysis.outputs.names import IMAGES, JUDGED, OPERANDS, QUICK, SAYS
from megatron.analysis.outputs.provenance import fingerprint, remember, set_aside, unchanged
from megatron.analysis.outputs.render import Made, Order, make_all
from megatron.analysis.quick import check_output, quick_analysis
from megatron.analysis.stats.cache import ForeignCacheError, check_place
from megatron.analysis.stats.executors import affordable
from megatron.analysis.stats.result import REPEATED
from megatron.analysis.store import TensorStore
from megatron.fake_quant import get_format

#: What is compared where nothing is asked for, besides the types of the dump.
FORMATS = ("mxfp8", "mxfp4", "nvfp4", "hifp8")
_SCOPES = ("FA_linear_", "linear_", "FA_")


@dataclass
class DrawResult:
    """What was made, what could not be, and why."""

    files: list[Path] = field(default_factory=list)
    unchanged: int = 0  #: of these files, those that were there and would be the same again
    missing: dict[str, str] = field(default_factory=dict)  #: output or figure -> what is lacking
    failed: dict[str, str] = field(default_factory=dict)  #: figure -> our mistake, a traceback
    kept: list[Path] = field(default_factory=list)  #: earlier results, under their new names
    problems: list[Problem] = field(default_factory=list)  #: files of the dump that were left out
    tensors: int = 0
    notes: dict[str, int] = field(default_factory=dict)  #: what tensors lack -> how many
    remarks: list[str] = field(default_factory=list)  #: what became of a cache that failed


def draw(
    folder: Path,
    output: Path,
    *,
    formats: Sequence[str] | None = None,
    figures: Sequence[str] = tuple(SAYS),
    image: str = "png",
    run: str | None = None,
    judge: str = OPERANDS,
    say: Callable[[str], None] | None = None,
    progress: bool = False,
    **computing: Any,
) -> DrawResult:
    """Make the chosen outputs of a dump.

    Args:
        formats: to compare; by default `FORMATS` and those that the dump was made with.
        figures: of `output_names.SAYS`; all by default.
        image: png, svg or pdf.
        run: only the tensors of this run; `latest` for the one that started last.
        judge: the tensors by which formats are judged, `operands` or `results` of matmuls.
        say: is called with each file once it is written.
        progress: show bars on a terminal.
        computing: `workers`, `max_memory`, `scheduler`, `strict` of `stats.compute`.

    Raises:
        ValueError: a wrong name, no tensor to draw, or a folder that cannot be written.
    """
    _check("figure", figures, tuple(SAYS))
    _check("image format", [image], IMAGES)
    _check("kind of tensors to judge", [judge], JUDGED)
    for name in formats or ():
        get_format(name)
    check_output(output)
    if list(figures) == [QUICK]:  # needs no format
        return _quick(folder, output, run, computing.get("workers"), say, progress)
    store = TensorStore(folder)
    store = store.only(run) if run is not None else store
    result = DrawResult()
    chosen = tuple(get_format(name).name for name in formats or default_formats(store))
    chosen = tuple(dict.fromkeys(chosen))
    cache, refused = _cache(folder, output)
    follows = fingerprint(folder, [folder / CACHE_FOLDER, output], chosen, image, run, judge)
    try:
        found = stats.compute(store, chosen, cache=cache, progress=progress, **computing)
    except ForeignCacheError as error:  # another process put it there meanwhile
        refused, cache = [*refused, str(error)], None
        found = stats.compute(store, chosen, cache=cache, progress=progress, **computing)
    result.problems, result.tensors = list(found.problems), len(found.tensors)
    result.notes = found.notes() | note_of_repeats(found.repeats)
    result.remarks = [*refused, *found.remarks, *remarks_on(unfinished(store))]
    if found.tensors.empty:
        raise ValueError(_nothing_readable(folder, result.problems))
    figure_data = FigureData(store, found, chosen, progress, judge=judge)
    workers = affordable(computing.get("workers"), computing.get("max_memory"))
    names = [name for name in SAYS if name in figures]
    before = unchanged(output, names, follows)
    for made in before.values():
        _add(made, result)
    result.unchanged = len(result.files)
    names = [name for name in names if name not in before]
    bar = tqdm(
        total=len(names),
        desc="Drawing",
        unit="output",
        leave=False,
        disable=None if progress else True,
    )
    result.kept = set_aside(output, names, folder)
    drawn = []
    with bar:
        for made in make_all(names, Order(figure_data, output, image, run, cache), workers):
            bar.update()
            _add(made, result)
            drawn.append(made)
            if say is not None:
                for path in made.files:
                    say(str(path))
    result.missing = dict(sorted(result.missing.items()))
    remember(output, folder, drawn, follows)
    return result


def _add(made: Made, result: DrawResult) -> None:
    """What became of one output."""
    result.files += made.files
    result.missing |= made.missing
    result.failed |= made.failed


def _quick(
    folder: Path,
    output: Path,
    run: str | None,
    workers: int | None,
    say: Callable[[str], None] | None,
    progress: bool,
) -> DrawResult:
    """The first look alone."""
    quick = quick_analysis(folder, output, run=run, workers=workers, progress=progress)
    for path in (quick.picture, quick.text):
        if say is not None:
            say(str(path))
    return DrawResult(
        [quick.picture, quick.text],
        problems=quick.problems,
        kept=quick.kept,
        tensors=len(quick.measurements.table),
        remarks=remarks_on(quick.endings),
        notes=quick.measurements.notes() | note_of_repeats(quick.measurements.repeats),
    )


def note_of_repeats(count: int) -> dict[str, int]:
    """Return the note for `DrawResult.notes` about tensors saved again by recomputation."""
    return {REPEATED: count} if count else {}


def default_formats(store: TensorStore) -> list[str]:
    """`FORMATS` and those of the dump's types, without those that nothing is lost in."""
    types = store.records["quant_type"].dropna().unique()
    found = list(FORMATS)
    for name in map(str, types):
        scope = next((scope for scope in _SCOPES if name.startswith(scope)), "")
        try:
            fmt = get_format(name.removeprefix(scope))
        except ValueError:
            continue  # `none`, a recipe: of several formats
        if fmt.name not in ("bf16", *found):
            found.append(fmt.name)
    return found


def _cache(folder: Path, output: Path) -> tuple[Path | None, list[str]]:
    """Return the folder of the cache, and a message per folder that was refused.

    The first choice is the folder in the dump that the command `stats` uses, the second choice is
    a folder beside the figures. The result is None if neither can be used.
    """
    refused = []
    for cache in (folder / CACHE_FOLDER, output / CACHE_FOLDER):
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
