"""Read the newest iteration of a long index first, so that the first page need not wait.

The records of an index are in the order of their iterations. Its last iteration is found from the
end, without parsing the lines before it.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from megatron.analysis.dump.record_columns import Columns
from megatron.analysis.dump.scan import file_paths
from megatron.analysis.serve.records import Records
from megatron.bounded_files import open_regular
from megatron.tensor_record import LINE_LIMIT, parsed_lines

MOST = 16 << 20  #: maximum number of bytes at the end of an index in which an iteration is searched
_ITERATION = re.compile(rb'"iteration": \d+[,}]')


def newest_records(path: str, number: int, records: Records) -> None:
    """Add the records of the last iteration in an index; none if it is not complete or not usable.

    Args:
        path: path of the index.
        number: number of the index in `Records.origin`.
        records: records to which they are added.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(size - MOST, 0))
        content = file.read(MOST)
        lines = content[: content.rfind(b"\n") + 1].split(b"\n")[:-1]
        if size > MOST:
            del lines[:1]  # its beginning was not read
        chosen = _last_iteration(lines)
        if not chosen or any(len(line) > LINE_LIMIT for line in chosen):
            return
        rows = parsed_lines(Path(path), chosen, 1, last=False)
        if _are_consecutive(rows):
            columns = Columns()
            columns.add(rows[1:], file_paths(rows[1:], path[: path.rindex(os.sep) + 1]), "index")
            records.add(columns, number)


def _last_iteration(lines: list[bytes]) -> list[bytes]:
    """Return the lines of the last iteration, and before them the last line of the one before.

    Events are left out. Empty if there is only one iteration, or a line without an iteration.
    """
    chosen: list[bytes] = []
    wanted = None
    for line in reversed(lines):
        if b'"event": ' in line:
            continue
        found = _ITERATION.search(line)
        if found is None:
            return []
        wanted = wanted or found.group()
        chosen.append(line)
        if found.group() != wanted:
            return chosen[::-1]
    return []


def _are_consecutive(rows: list[dict[str, Any]]) -> bool:
    """Return whether the records were saved one after another by one run.

    Several threads write files, so that lines of two iterations may be mixed. No record may be
    missing, because the size of an attention head is read from that of V.
    """
    if len({row.get("run_id") for row in rows}) > 1:
        return False
    counters = [row["counter"] for row in rows if type(row.get("counter")) is int]
    first = counters[0] if len(counters) == len(rows) else 0
    return sorted(counters[1:]) == [*range(first + 1, first + len(rows))]
