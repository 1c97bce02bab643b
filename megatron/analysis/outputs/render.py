"""Makes the outputs of a dump one by one: figures, texts, the page.

Several at a time are made by processes, not threads: matplotlib holds the interpreter's lock. They
are forked when the tables are there, and share them. A file is written under a temporary name and
then renamed: an interrupted call leaves whole files only.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

from megatron.analysis.dump.tensor_files import UnreadableTensorError
from megatron.analysis.figures.figure_data import FigureData, Make, NothingToDrawError
from megatron.analysis.outputs.atomic_write import write
from megatron.analysis.outputs.names import QUICK, REPORT
from megatron.analysis.outputs.registry import OUTPUTS
from megatron.analysis.plots.style import RC
from megatron.analysis.quick import quick_analysis

DPI = 150
#: What takes longest is begun first, so that no process is left alone with it at the end.
SLOW = (REPORT, "heatmaps", "comparisons", "attention_maps")
#: These take nothing from the tensors' histograms.
WITHOUT_SUMS = {QUICK, "heatmaps", "statistics", "attention_maps", "global_statistics", REPORT}


@dataclass(frozen=True)
class Order:
    """What outputs are made of, and where they go."""

    figure_data: FigureData
    output: Path
    image: str  #: png, svg or pdf
    run: str | None
    cache: Path | None  #: folder of the cache of statistics; None: nothing is cached


@dataclass
class Made:
    """One output's files, and what could not be made."""

    name: str
    files: list[Path] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  #: output or figure -> what it lacks
    failed: dict[str, str] = field(default_factory=dict)  #: by our mistake -> the traceback


def make_all(names: Sequence[str], order: Order, workers: int) -> Iterator[Made]:
    """Make the outputs, `workers` at a time; they come as they are done.

    Raises:
        ValueError: the system ended a process.
    """
    workers = min(workers, len(names))
    if workers <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from (make(name, order) for name in names)
        return
    # once, here, what several processes need
    figure_data = order.figure_data
    _ = figure_data.uses
    if {*names} - WITHOUT_SUMS:
        _ = figure_data.sums
    if {"comparisons", REPORT} <= {*names}:
        _ = figure_data.deviations
    ordered = sorted(names, key=lambda name: SLOW.index(name) if name in SLOW else len(SLOW))
    fork = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(workers, fork, initializer=_begin, initargs=(order,)) as pool:
            jobs = [pool.submit(_make, name) for name in ordered]
            try:
                yield from (job.result() for job in as_completed(jobs))
            finally:  # an interrupt or an error: do not make the rest first
                pool.shutdown(cancel_futures=True)
    except BrokenProcessPool:
        raise ValueError(
            "the system ended a process that drew, maybe for lack of memory; files that were made "
            "are whole; --workers 1 draws one after the other"
        ) from None


_order: list[Order] = []  # of this process, if it was forked to draw
_making: list[str] = []  # the output that this process makes, if it was forked to draw


def _begin(order: Order) -> None:
    """Prepare a process that was just forked: it has no threads but this one, and no terminal."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    order.figure_data.progress = False
    _order.append(order)


def _stop(*_: object) -> None:
    """Leave the output that is being made, and begin no further one.

    A process that waits for work must not be left by an exception: half of a message would stay in
    the queue, and the next process would read the rest of it.
    """
    _order.clear()
    if _making:
        raise KeyboardInterrupt


def _end_with_parent() -> None:
    """End with a parent that was killed, which cannot end this process."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _make(name: str) -> Made:
    if not _order:
        raise KeyboardInterrupt  # in the parent, too
    order = _order[0]
    _making.append(name)
    try:
        return make(name, order)
    finally:
        _making.clear()


def make(name: str, order: Order) -> Made:
    """Make one output of `output_names.SAYS`. What goes wrong with it is told, and the others are
    made: hours of statistics stand behind them.

    Raises:
        ImportError: a package is missing.
        OSError: the output cannot be written.
    """
    made = Made(name)
    try:
        if name == QUICK:
            folder = order.figure_data.store.folder
            quick = quick_analysis(
                folder, order.output, run=order.run, cache=order.cache, workers=1
            )
            made.files += [quick.picture, quick.text]
        elif name == REPORT:
            from megatron.analysis.report import write_report

            made.files.append(write_report(order.figure_data, order.output / "report.html"))
        else:
            for title, draw in OUTPUTS[name](order.figure_data):
                _draw(f"{name}/{title}", draw, order, made)
    except (NothingToDrawError, UnreadableTensorError) as error:
        made.missing[name] = str(error)
    except (ImportError, OSError):  # no other output would fare better
        raise
    except Exception as error:
        made.failed[name] = "".join(traceback.format_exception(error))
    return made


def _draw(name: str, draw: Make, order: Order, made: Made) -> None:
    """One figure or text, or why there is none."""
    try:
        with matplotlib.rc_context(RC):
            drawn = draw()
            if isinstance(drawn, str):
                path, content = order.output / name, drawn.encode(errors="backslashreplace")
            else:
                path = order.output / f"{name}.{order.image}"
                content = picture(drawn, order.image)
    except (NothingToDrawError, UnreadableTensorError) as error:
        made.missing[name] = str(error)
        return
    except Exception as error:
        made.failed[name] = "".join(traceback.format_exception(error))
        return
    made.files.append(write(path, content))


def picture(figure: Figure, image: str) -> bytes:
    """The file's content: the same for the same figure, whenever it is made."""
    content = io.BytesIO()
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    figure.savefig(content, format=image, dpi=DPI, metadata=undated[image])
    return content.getvalue()
