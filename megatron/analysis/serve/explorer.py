"""Bring together what the pages need: records, numbers, contents of tensors, and training."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.analysis.dump.tensor_files import reason
from megatron.analysis.serve.address import Address
from megatron.analysis.serve.catalog import Catalog
from megatron.analysis.serve.contents import Contents
from megatron.analysis.serve.follower import Follower
from megatron.analysis.serve.maps import chosen_tensors
from megatron.analysis.serve.measuring import Measurer
from megatron.analysis.serve.panels import Subject
from megatron.analysis.serve.priority import Priority
from megatron.analysis.serve.statistics import Numbers
from megatron.analysis.serve.training import Training
from megatron.bounded_files import printable
from megatron.fake_quant.names import get_format

_TABLES = ("study.parquet", "study/study.parquet", "../study/study.parquet")
#: Columns that are read from the table of a study.
_STUDY_NUMBERS = ("iteration", "layer_idx", "sqnr_db", "nonfinite")
_STUDY_TEXTS = ("run_id", "module", "operation", "gemm", "format", "recipe", "accumulator")
_MOST_BYTES = 256 << 20  #: maximum size of the table of a study, in bytes
PERIOD = 2.0  #: time between two polls of the training files, in seconds


def read_study(path: Path) -> pd.DataFrame:
    """Return the table of a study, in which missing texts are empty strings.

    Raises:
        ValueError: if the file is not such a table, or is too large.
    """
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ValueError(f"its {size:,} bytes are more than {_MOST_BYTES:,}")
        import pyarrow.parquet

        names = [*_STUDY_NUMBERS, *_STUDY_TEXTS]
        if "accumulator" not in pyarrow.parquet.read_schema(path).names:
            names.remove("accumulator")  # the table of an older version
        table = pd.read_parquet(path, columns=names).reindex(
            columns=[*_STUDY_NUMBERS, *_STUDY_TEXTS]
        )
        numbers = table[[*_STUDY_NUMBERS]].astype(float)
        # an empty column of texts may have any dtype
        texts = {name: table[name].astype(object).fillna("").astype(str) for name in _STUDY_TEXTS}
    except Exception as error:  # a damaged file may raise almost any exception
        text = f"{path} is not a table of a study ({type(error).__name__}: {reason(error)})"
        raise ValueError(printable(text, limit=2000)) from error
    return table.assign(**numbers, **texts).dropna(subset=["iteration", "layer_idx"])


class Explorer:
    """Everything that the pages show about a dump, kept up to date.

    Args:
        folder: folder of the dump.
        formats: formats that are measured for every tensor.
        cache: folder of the statistics cache; None if nothing can be stored.
        logs: further folders with event files and logs.
        study: table of a study; None to look for it beside the dump.
        in_process: measure on a thread instead of in a process.
    """

    def __init__(
        self,
        folder: Path,
        formats: Sequence[str],
        *,
        cache: Path | None,
        logs: Sequence[Path] = (),
        study: Path | None = None,
        in_process: bool = False,
    ):
        self.folder = folder.resolve()
        self.priority = Priority()
        self.follower, self.numbers = Follower(folder, self.priority), Numbers()
        self.measurer = Measurer(
            self.follower,
            self.numbers,
            formats,
            cache=cache,
            priority=self.priority,
            in_process=in_process,
        )
        self.contents = Contents(self.follower, self.measurer)
        self.training = Training([self.folder, *logs])
        self._study_path = study
        self._study: tuple[Any, pd.DataFrame | None] = (None, None)
        self._warning = ""
        self.rates: deque[tuple[float, int, int]] = deque(maxlen=30)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="training", daemon=True)

    def start(self) -> None:
        """Start the threads that follow the files and measure tensors."""
        self.follower.start()
        self.measurer.start()
        self._thread.start()

    def close(self) -> None:
        """Stop all threads and the measuring process."""
        self._stop.set()
        self.follower.close()
        self.measurer.close()

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                self.training.poll(self.follower.events)
            except Exception as error:  # a damaged file must not stop the thread
                text = (
                    f"The training files cannot be read ({type(error).__name__}: {reason(error)})"
                )
                self._warn(printable(text, limit=2000))
            catalog = self.catalog
            if self.follower.reading:
                self.rates.clear()
            else:
                self.rates.append((time.monotonic(), len(catalog.records), self.written))
            self._stop.wait(PERIOD)

    @property
    def catalog(self) -> Catalog:
        """Snapshot of the tensors."""
        return self.follower.catalog

    @property
    def formats(self) -> list[str]:
        """Formats that are measured."""
        return self.measurer.formats

    @property
    def written(self) -> int:
        """Total size of the files of all records, in bytes."""
        sizes = self.catalog.records.integers["bytes"].values
        return int(sizes[sizes > 0].sum(dtype=float))  # the sum of forged sizes would overflow

    @property
    def free(self) -> int:
        """Free space of the disk that holds the dump, in bytes; -1 if unknown."""
        try:
            return shutil.disk_usage(self.folder).free
        except OSError:
            return -1

    @property
    def unusable(self) -> int:
        """Number of files and tensors that cannot be used."""
        return len(self.follower.problems) + len(self.numbers.failures)

    def failures(self, most: int) -> list[list[str]]:
        """Return up to `most` tensors that cannot be measured: the first file of each, and why."""
        catalog, found = self.catalog, []
        for identity, (stamp, why) in [*self.numbers.failures.items()][:most]:
            tensor = catalog.find(f"{identity:016x}")
            if tensor is not None and int(catalog.stamps[tensor]) == stamp:
                found.append([catalog.records.path(int(catalog.rows[tensor])), why])
        return found

    def version(self, address: Address) -> list[int]:
        """Return numbers that change if the tensors of a map or their statistics change."""
        catalog, found = self.catalog, []
        for run in filter(None, (address.run, address.other)):
            chosen = chosen_tensors(catalog, address.but(run=run))
            rows = self.numbers.rows_of(catalog.ids[chosen], catalog.stamps[chosen])
            found += [len(chosen), int((rows >= 0).sum())]
            for name in dict.fromkeys([*self.formats, address.format]):
                found.append(int((~self.numbers.missing(rows, [name])).sum()))
        return found

    def resolved(self, search: str | None) -> Address:
        """Return the address in a query, with the defaults of this dump."""
        return Address.parse(search).resolved(self.catalog, self.formats)

    def awaits(self, search: str | None) -> bool:
        """Return whether a run, place or iteration in an address may not have been read yet."""
        if not self.follower.reading:
            return False
        given, found = Address.parse(search), self.resolved(search)
        names = ("run", "other", "place")
        missing = any(getattr(given, name) not in ("", getattr(found, name)) for name in names)
        return missing or given.iteration not in (-1, found.iteration)

    def subject(self, address: Address) -> Subject | None:
        """Return the tensor that an address names, or None if the dump has no such tensor."""
        catalog = self.catalog
        tensor = catalog.find(address.tensor)
        if tensor is None:
            return None
        beside = catalog.find(address.beside) if address.beside else None
        beside = None if beside == tensor else beside
        formats = tuple(dict.fromkeys([*self.formats, address.format]))
        formats = tuple(name for name in formats if name)
        return Subject(catalog, self.contents, tensor, beside, address, formats)

    def look_at(self, tensors: np.ndarray, fmt: str) -> None:
        """Request that the given tensors be measured first."""
        with contextlib.suppress(ValueError):
            get_format(fmt)
            self.measurer.look_at(self.catalog.ids[tensors], fmt)

    def study(self) -> pd.DataFrame | None:
        """Return the table of the given study, or of one beside the dump; None if there is none."""
        paths = [self._study_path] if self._study_path else [self.folder / n for n in _TABLES]
        for path in paths:
            with contextlib.suppress(OSError):
                if path.is_symlink() or not path.is_file():
                    continue
                status = path.stat()
                stamp = (str(path), status.st_mtime_ns, status.st_size)
                if self._study[0] != stamp:
                    self._study = (stamp, self._read_study(path))
                return self._study[1]
        return None

    def _read_study(self, path: Path) -> pd.DataFrame | None:
        """Return the table of a study, or None if the file is not such a table."""
        try:
            return read_study(path)
        except ValueError as error:
            self._warn(str(error))
            return None

    def _warn(self, warning: str) -> None:
        """Print a warning, unless it is the same as the last one."""
        if warning != self._warning:
            self._warning = warning
            print(f"[WARNING] {warning}", file=sys.stderr)
