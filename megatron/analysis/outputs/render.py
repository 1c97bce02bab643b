"""Draw the outputs of a dump: figures, texts and the report.

Several outputs are drawn at a time by processes, because matplotlib holds the interpreter's lock.
The processes are forked after the tables are computed, and share them. Each file is written under a
temporary name and then renamed, so that an interrupted call leaves whole files only.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import threading
import traceback
from collections import Counter
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
from megatron.analysis.outputs.registry import DEVIATIONS, OUTPUTS, QUICK, REPORT, SUMS
from megatron.analysis.plots.style import RC
from megatron.analysis.quick import quick_analysis

DPI = 150  #: resolution of PNG files


@dataclass(frozen=True)
class Order:
    """Data and options that all outputs of one call share."""

    figure_data: FigureData
    output: Path  #: folder that the files are written to
    image: str  #: file format of the figures, one of `IMAGES`
    run: str | None  #: id of the only run to draw; None if all are drawn
    cache: Path | None  #: folder of the cache of statistics; None if nothing is cached


@dataclass
class Made:
    """The files of one output, and the figures that could not be drawn."""

    name: str
    files: list[Path] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  #: missing data, by output or figure
    failed: dict[str, str] = field(default_factory=dict)  #: traceback of our bug, by figure


def make_all(names: Sequence[str], order: Order, workers: int) -> Iterator[Made]:
    """Draw the outputs, `workers` at a time, and yield each one as soon as it is complete.

    Raises:
        ValueError: the system killed a process.
    """
    workers = min(workers, len(names))
    if workers <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from (make(name, order) for name in names)
        return
    compute_shared_tables(order.figure_data, names)
    ordered = sorted(names, key=lambda name: -OUTPUTS[name].slowness)
    fork = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(workers, fork, initializer=_begin, initargs=(order,)) as pool:
            jobs = [pool.submit(_make, name) for name in ordered]
            try:
                yield from (job.result() for job in as_completed(jobs))
            finally:  # after an interrupt or an error, do not draw the rest first
                pool.shutdown(cancel_futures=True)
    except BrokenProcessPool:
        raise ValueError(
            "the system ended a process that drew, maybe for lack of memory; files that were made "
            "are whole; --workers 1 draws one after the other"
        ) from None


def compute_shared_tables(figure_data: FigureData, names: Sequence[str]) -> None:
    """Compute the tables that several outputs need, before processes are forked."""
    needs = Counter(need for name in names for need in OUTPUTS[name].needs)
    _ = figure_data.uses
    if needs[SUMS]:
        _ = figure_data.sums
    if needs[DEVIATIONS] > 1:  # a single output computes them while others are drawn
        _ = figure_data.deviations


_order: list[Order] = []  # the order of this process, if it was forked to draw
_making: list[str] = []  # the output that this process draws, if it was forked to draw


def _begin(order: Order) -> None:
    """Prepare a forked process: one thread for torch, no progress bar, an end with its parent."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    order.figure_data.progress = False
    _order.append(order)


def _stop(*_: object) -> None:
    """Interrupt the output that is being drawn, and start no other.

    A process that waits for work must not raise: half of a message would stay in the queue, and the
    next process would read the rest of it.
    """
    _order.clear()
    if _making:
        raise KeyboardInterrupt


def _end_with_parent() -> None:
    """Exit when the parent does; a parent that is killed cannot stop this process itself."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _make(name: str) -> Made:
    if not _order:
        raise KeyboardInterrupt  # the executor raises it in the parent, too
    order = _order[0]
    _making.append(name)
    try:
        return make(name, order)
    finally:
        _making.clear()


def make(name: str, order: Order) -> Made:
    """Draw one output of `OUTPUTS`.

    A figure that fails is recorded in the result and does not stop the others, because computing
    their statistics may have taken hours.

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
            for title, draw in OUTPUTS[name].load()(order.figure_data):
                _draw(f"{name}/{title}", draw, order, made)
    except (NothingToDrawError, UnreadableTensorError) as error:
        made.missing[name] = str(error)
    except (ImportError, OSError):  # every other output would fail, too
        raise
    except Exception as error:
        made.failed[name] = "".join(traceback.format_exception(error))
    return made


def _draw(name: str, draw: Make, order: Order, made: Made) -> None:
    """Draw and write one figure or text, or record why there is none."""
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
    """Return the content of an image file, which does not depend on the time of drawing."""
    content = io.BytesIO()
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    figure.savefig(content, format=image, dpi=DPI, metadata=undated[image])
    return content.getvalue()
