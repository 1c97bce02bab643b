"""Keep the results of a study, so that an interrupted or extended study computes nothing twice.

The file has one line of JSON per pass through a layer and candidate. A line is appended as soon as
its results are known. Its key covers everything that they depend on: the files of the operands,
the run card, the candidate, the settings and the source code. Lines that cannot be read, such as
the last one of a killed process, are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from megatron.analysis.outputs.atomic_write import naming
from megatron.analysis.stats.cache import code_version
from megatron.analysis.study.candidates import Candidate
from megatron.analysis.study.gemm_errors import Row, Settings
from megatron.analysis.study.passes import Pass
from megatron.bounded_files import open_regular

NAME = ".study.jsonl"  #: name of the file in the output folder

Rows = tuple[list[Row], list[Row]]  #: rows of the table of errors and of the table of budgets


class KeptResults:
    """Results of earlier studies, kept in a file or, if no folder is given, only in memory."""

    def __init__(self, folder: Path | None):
        self.path = None if folder is None else folder / NAME
        self._rows: dict[str, Rows] = {}
        self._lock = threading.Lock()
        self._gap = ""  #: newline if the last line of the file was cut off; otherwise empty
        if self.path is not None and self.path.is_file():
            self._read(self.path)

    def _read(self, path: Path) -> None:
        with open_regular(path) as file:
            for line in file:
                self._gap = "" if line.endswith(b"\n") else "\n"
                with contextlib.suppress(ValueError, RecursionError):
                    self._add(json.loads(line))

    def _add(self, entry: Any) -> None:
        """Add the results from one line of the file; ignore a line that has an unexpected form."""
        if isinstance(entry, dict) and isinstance(entry.get("key"), str):
            rows: Any = entry.get("rows")
            if _is_rows(rows):
                self._rows[entry["key"]] = tuple(rows)

    def keys(
        self, of_pass: Pass, candidates: Sequence[Candidate], settings: Settings
    ) -> dict[str, str]:
        """Return the key of each candidate's results for a pass, by the candidate's name.

        Raises:
            OSError: if a file of the pass is missing.
        """
        files = []
        for by_name in of_pass.ranks:
            for row in by_name.values():
                stat = Path(row.path).stat()
                files.append((row.path, stat.st_size, stat.st_mtime_ns))
        card = json.dumps([of_pass.card.get("arguments"), of_pass.card.get("quantization")])
        shared = [source_version(), files, card]

        def key(candidate: Candidate) -> str:
            causes = [*shared, candidate.digest, astuple(settings)]
            return hashlib.sha256(json.dumps(causes, default=str).encode()).hexdigest()[:32]

        return {each.name: key(each) for each in candidates}

    def get(self, key: str) -> Rows | None:
        """Return the results with this key, or None if there are none."""
        return self._rows.get(key)

    def put(self, key: str, rows: Rows) -> None:
        """Keep results in memory, and append them to the file if there is one."""
        with self._lock:
            self._rows[key] = rows
            if self.path is not None:
                with naming(self.path), self.path.open("a", encoding="utf-8") as file:
                    file.write(self._gap + json.dumps({"key": key, "rows": rows}) + "\n")
                self._gap = ""


def source_version() -> str:
    """Return a hash of the source code that computes the results of a study."""
    return code_version(Path(__file__).parent, Path(__file__).parents[1] / "verification")


def _is_rows(value: Any) -> bool:
    return (
        isinstance(value, list)
        and [type(part) for part in value] == [list, list]
        and all(isinstance(row, dict) for part in value for row in part)
    )
