"""Draw the outputs of a dump: figures, text files and the report.

Outputs are drawn in parallel by processes rather than threads, because matplotlib holds the global
interpreter lock. The processes are forked after the tables have been computed, so that they share
the tables. Each file is written under a temporary name and then renamed, so that an interrupted
call leaves only complete files.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron.analysis.dump.tensor_files import UnreadableTensorError
from megatron.analysis.figures.figure_data import FigureData, Make, NothingToDrawError
from megatron.analysis.figures.page import Page, drawing_on
from megatron.analysis.figures.sheet import caption
from megatron.analysis.garbage import one_garbage_collection
from megatron.analysis.outputs.atomic_write import write
from megatron.analysis.outputs.registry import DEVIATIONS, OUTPUTS, QUICK, REPORT, SUMS
from megatron.analysis.plots.style import in_style
from megatron.analysis.quick import quick_analysis

DPI = 150  #: resolution of PNG files, in dots per inch
#: zlib level for PNG files; level 3 takes half as long as the default, 6, and adds 4 % to the size
COMPRESSION = 3
TICK = 5.0  #: maximum number of seconds between two calls of the function `tick`


@dataclass(frozen=True)
class Order:
    """The data and options that are the same for all outputs of one call of `make_all`."""

    figure_data: FigureData
    output: Path  #: folder that the files are written to
    image: str  #: file format of the figures, one of `IMAGES`
    run: str | None  #: ID of the run to draw; None if all runs are drawn
    cache: Path | None  #: folder of the statistics cache; None if nothing is cached
    page: Page  #: width, font size and style of the figures


@dataclass
class Made:
    """The result of drawing one output: its files, and the figures that could not be drawn."""

    name: str
    files: list[Path] = field(default_factory=list)
    #: Reasons for missing figures, by figure name.
    missing: dict[str, str] = field(default_factory=dict)
    #: Tracebacks of figures that could not be drawn because of an error, by figure name.
    failed: dict[str, str] = field(default_factory=dict)


def forks(names: Sequence[str], workers: int) -> bool:
    """Return whether `make_all` draws these outputs in forked processes."""
    return min(workers, len(names)) > 1 and "fork" in multiprocessing.get_all_start_methods()


def make_all(
    names: Sequence[str],
    order: Order,
    workers: int,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[Made]:
    """Draw the outputs, `workers` at a time, and yield each result as soon as it is complete.

    Args:
        names: outputs to draw.
        order: data and options of all outputs.
        workers: number of processes.
        tick: function to call every few seconds while processes draw.

    Raises:
        ValueError: if the operating system killed a process.
    """
    if not forks(names, workers):
        yield from (make(name, order) for name in names)
        return
    compute_shared_tables(order.figure_data, names)
    ordered = sorted(names, key=lambda name: -OUTPUTS[name].slowness)
    fork = multiprocessing.get_context("fork")
    try:
        workers = min(workers, len(names))
        with ProcessPoolExecutor(workers, fork, initializer=_begin, initargs=(order,)) as pool:
            jobs = {pool.submit(_make, name) for name in ordered}
            try:
                while jobs:
                    done, jobs = wait(jobs, TICK, return_when=FIRST_COMPLETED)
                    yield from (job.result() for job in done)
                    tick()
            finally:  # after an interrupt or error, cancel the remaining outputs
                pool.shutdown(cancel_futures=True)
    except BrokenProcessPool:
        raise ValueError(
            "the system ended a drawing process, perhaps for lack of memory; the files that were "
            "written are complete; --workers 1 draws one output after the other"
        ) from None


def compute_shared_tables(figure_data: FigureData, names: Sequence[str]) -> None:
    """Compute the tables that several outputs share, so that forked processes inherit them."""
    needs = Counter(need for name in names for need in OUTPUTS[name].needs)
    _ = figure_data.uses
    if needs[SUMS]:
        _ = figure_data.sums
    # if only one output needs the deviations, its own process computes them
    if needs[DEVIATIONS] > 1:
        _ = figure_data.deviations


_order: list[Order] = []  # contains the `Order` in a forked process; empty in the parent process
_making: list[str] = []  # name of the output that this forked process is drawing; empty if idle
_ending: list[int] = []  # signal after which this forked process has to exit; empty before it


def _begin(order: Order) -> None:
    """Prepare a forked process for drawing.

    Limit torch to one thread, hide progress bars, and make the process exit with its parent.
    """
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _end)
    sys.unraisablehook = _report_unraisable
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    order.figure_data.progress = False
    _order.append(order)


def _stop(*_: object) -> None:
    """Stop drawing the current output after a signal, and do not start another output.

    A process that is waiting for work must not raise an exception. It might have read only part of
    a message from the queue, and the next process would then read the rest.
    """
    _order.clear()
    if _making:
        raise KeyboardInterrupt


def _end(number: int, _: object) -> None:
    """Stop drawing the current output after SIGTERM, and exit.

    The executor sends SIGTERM if another of its processes was killed. It then waits for this
    process, but sends no further message to it.
    """
    if not _making:
        os._exit(128 + number)
    _ending.append(number)
    _stop()


def _report_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Print an exception that Python cannot propagate, unless it is a KeyboardInterrupt.

    Python drops a KeyboardInterrupt that `_stop` raises while a weak reference's callback runs. The
    cleared `_order` then ends the drawing before the next figure.
    """
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)


def _end_with_parent() -> None:
    """Wait for the parent process to end, then exit; a killed parent cannot stop its children."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _make(name: str) -> Made:
    if not _order:
        raise KeyboardInterrupt  # the executor raises it again in the parent process
    order = _order[0]
    _making.append(name)
    try:
        return make(name, order)
    finally:
        _making.clear()
        if _ending:
            os._exit(128 + _ending[0])


def make(name: str, order: Order) -> Made:
    """Draw one of the `OUTPUTS`, and return its files, missing figures and failed figures.

    If a figure fails, the error is recorded in the result, and the other figures are still drawn,
    because computing their statistics may have taken hours.

    Raises:
        ImportError: if a package is missing.
        OSError: if the output cannot be written.
    """
    made = Made(name)
    try:
        if name == QUICK:
            folder = order.figure_data.store.folder
            quick = quick_analysis(
                folder,
                order.output,
                run=order.run,
                formats=order.figure_data.formats,
                cache=order.cache,
                workers=1,
            )
            made.files += [quick.picture, quick.text]
        elif name == REPORT:
            from megatron.analysis.report import write_report

            made.files.append(write_report(order.figure_data, order.output / "report.html"))
        else:
            for title, draw in OUTPUTS[name].load()(order.figure_data):
                if _making and not _order:  # Python dropped the exception that `_stop` raised
                    raise KeyboardInterrupt
                with one_garbage_collection():
                    _draw(f"{name}/{title}", draw, order, made)
    except (NothingToDrawError, UnreadableTensorError) as error:
        made.missing[name] = str(error)
    except (ImportError, OSError):  # all other outputs would fail for the same reason
        raise
    except Exception as error:
        made.failed[name] = "".join(traceback.format_exception(error))
    return made


def _draw(name: str, draw: Make, order: Order, made: Made) -> None:
    """Draw one figure or text file and write it; if this fails, record the reason in `made`."""
    try:
        with in_style(order.page.settings), drawing_on(order.page):
            drawn = draw()
            if isinstance(drawn, str):
                contents = {name: drawn.encode(errors="backslashreplace")}
            else:
                contents = {f"{name}.{order.image}": picture(drawn, order.image)}
                if not order.page.headlines:
                    text = f"{caption(drawn)}\n"
                    contents[f"{name}.caption.txt"] = text.encode(errors="backslashreplace")
    except (NothingToDrawError, UnreadableTensorError) as error:
        made.missing[name] = str(error)
        return
    except Exception as error:
        made.failed[name] = "".join(traceback.format_exception(error))
        return
    made.files += [write(order.output / path, content) for path, content in contents.items()]


def picture(figure: Figure, image: str) -> bytes:
    """Render a figure, and return the content of the image file.

    The file contains no timestamp, so that drawing the same figure again gives the same content.
    """
    content = io.BytesIO()
    figure.set_dpi(DPI)
    # The layout uses the canvas that later draws the figure, so each text is measured only once.
    canvas = FigureCanvasAgg(figure)
    if (layout := figure.get_layout_engine()) is not None:
        layout.execute(figure)
        figure.set_layout_engine("none")
    if image == "png":  # `savefig` would draw the figure twice, because it had a layout engine
        canvas.print_png(  # type: ignore[no-untyped-call]
            content, metadata={"Software": None}, pil_kwargs={"compress_level": COMPRESSION}
        )
    else:
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        figure.savefig(content, format=image, dpi=DPI, metadata=undated[image])
    return content.getvalue()
