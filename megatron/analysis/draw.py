"""Everything that can be drawn of a dump, in one command: statistics once, then figure by figure.

    result = draw(Path("enhanced_tensor_logs"), Path("draw"))
    result.files, result.missing, result.problems

A file is written under a temporary name and then renamed: an interrupted call leaves whole files
only, and the next one takes the statistics from the cache.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from megatron.analysis import stats
from megatron.analysis.figures.material import Material, NothingToDrawError
from megatron.analysis.output_names import IMAGES, QUICK, REPORT, SAYS
from megatron.analysis.outputs import OUTPUTS, Draw
from megatron.analysis.plots.style import RC
from megatron.analysis.quick import check_output, quick_analysis
from megatron.analysis.stats_command import CACHE_FOLDER
from megatron.analysis.store import TensorStore
from megatron.analysis.tensor_files import Problem
from megatron.fake_quant import get_format

#: What is compared where nothing is asked for, besides the types of the dump.
FORMATS = ("mxfp8", "mxfp4", "nvfp4", "hifp8")
DPI = 150
_SCOPES = ("FA_linear_", "linear_", "FA_")


@dataclass
class DrawResult:
    """What was made, what could not be, and why."""

    files: list[Path] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  #: output -> what the dump lacks
    problems: list[Problem] = field(default_factory=list)  #: files of the dump that were left out
    tensors: int = 0


def draw(
    folder: Path,
    output: Path,
    *,
    formats: Sequence[str] | None = None,
    figures: Sequence[str] = tuple(SAYS),
    image: str = "png",
    run: str | None = None,
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
        say: is told each file when it is there.
        progress: show bars on a terminal.
        computing: `workers`, `max_memory`, `scheduler`, `strict` of `stats.compute`.

    Raises:
        ValueError: a wrong name, no tensor to draw, or a folder that cannot be written.
    """
    _check("figure", figures, tuple(SAYS))
    _check("image format", [image], IMAGES)
    for name in formats or ():
        get_format(name)
    check_output(output)
    store = TensorStore(folder)
    store = store.only(run) if run is not None else store
    result = DrawResult()
    chosen = tuple(get_format(name).name for name in formats or default_formats(store))
    chosen = tuple(dict.fromkeys(chosen))
    found = stats.compute(
        store, chosen, cache=_cache(folder, output), progress=progress, **computing
    )
    result.problems, result.tensors = list(found.problems), len(found.tensors)
    if found.tensors.empty:
        raise ValueError(_nothing_readable(folder, result.problems))
    if QUICK in figures:
        quick = quick_analysis(folder, output, run=run, workers=computing.get("workers"))
        _made(result, say, quick.picture, quick.text)
    material = Material(store, found, chosen, progress)
    with matplotlib.rc_context(RC):
        for name, make in OUTPUTS.items():
            if name in figures:
                _draw_one(make, material, output / name, image, result, say)
    if REPORT in figures:
        from megatron.analysis.report import write_report

        _made(result, say, write_report(material, output / "report.html"))
    return result


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


def _cache(folder: Path, output: Path) -> Path:
    """In the dump, where the command `stats` keeps its results; else beside the figures."""
    cache = folder / CACHE_FOLDER
    if os.access(cache if cache.exists() else folder, os.W_OK):
        return cache
    return output / CACHE_FOLDER


def _draw_one(
    make: Draw, material: Material, output: Path, image: str, result: DrawResult,
    say: Callable[[str], None] | None,
) -> None:  # fmt: skip
    """Save the figures of one folder, or say what they lack."""
    try:
        for name, made in make(material):
            if isinstance(made, str):
                path, content = output / name, made.encode()
            else:
                path = output / f"{name}.{image}"
                content = picture(made, image)
            _made(result, say, write(path, content))
    except NothingToDrawError as error:
        result.missing[output.name] = str(error)


def picture(figure: Figure, image: str) -> bytes:
    """The file's content: the same for the same figure, whenever it is made."""
    content = io.BytesIO()
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    figure.savefig(content, format=image, dpi=DPI, metadata=undated[image])
    return content.getvalue()


def write(path: Path, content: bytes) -> Path:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _made(result: DrawResult, say: Callable[[str], None] | None, *paths: Path) -> None:
    for path in paths:
        result.files.append(path)
        if say is not None:
            say(str(path))


def _check(kind: str, given: Sequence[str], accepted: Sequence[str]) -> None:
    for name in given:
        if name not in accepted:
            raise ValueError(f"no {kind} {name!r}; choose from {', '.join(accepted)}")


def _nothing_readable(folder: Path, problems: Sequence[Problem]) -> str:
    listed = "".join(f"\n  {problem}" for problem in problems[:10])
    return f"none of the {len(problems)} .pt files in {folder} can be read:{listed}"
