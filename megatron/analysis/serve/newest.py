"""Read the newest iteration of a long index first, so that the first page need not wait.

The records of an index are in the order of their iterations. The last iteration is found from the
end of the index, without parsing the lines before it.
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

MOST = 16 << 20  #: maximum number of bytes at the end of an index to search for the last iteration
_ITERATION = re.compile(rb'"iteration": \d+[,}]')


def newest_records(path: str, number: int, records: Records) -> bool:
    """Add the last iteration of an index to `records`; return False if it may be incomplete.

    An index without any complete line counts as complete.

    Args:
        path: path of the index.
        number: number of the index in `Records.origin`.
        records: destination of the records; none are added if some of them may be missing.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(size - MOST, 0))
        content = file.read(MOST)
        lines = content[: content.rfind(b"\n") + 1].split(b"\n")[:-1]
        is_whole = size <= MOST
        if not is_whole:
            del lines[:1]  # the beginning of the first line was not read
        found = _last_iteration(lines)
        if found is None or any(len(line) > LINE_LIMIT for line in found[1]):
            return False
        before, chosen = found
        if not before and not is_whole:
            return False
        if not chosen:
            return True
        rows = parsed_lines(Path(path), [*before, *chosen], 1, last=False)
        if _are_consecutive(rows, is_first=not before):
            rows = rows[len(before) :]
            columns = Columns()
            columns.add(rows, file_paths(rows, path[: path.rindex(os.sep) + 1]), "index")
            records.add(columns, number)
            return True
    return False


def _last_iteration(lines: list[bytes]) -> tuple[list[bytes], list[bytes]] | None:
    """Return the last line of the next-to-last iteration, if any, and the lines of the last one.

    Events are left out. The result is None if a line has no iteration.
    """
    chosen: list[bytes] = []
    wanted = None
    for line in reversed(lines):
        if b'"event": ' in line:
            continue
        found = _ITERATION.search(line)
        if found is None:
            return None
        wanted = wanted or found.group()
        if found.group() != wanted:
            return [line], chosen[::-1]
        chosen.append(line)
    return [], chosen[::-1]


def _are_consecutive(rows: list[dict[str, Any]], *, is_first: bool) -> bool:
    """Return whether the records were saved one after another by one run.

    Several threads write files, so that lines of two iterations may be mixed. No record may be
    missing, because the size of an attention head is read from that of V.

    Args:
        rows: records of the last iteration, preceded by the last record of the iteration before.
        is_first: whether the index has only one iteration; a run counts its records from 1.
    """
    if len({row.get("run_id") for row in rows}) > 1:
        return False
    counters = [row["counter"] for row in rows if type(row.get("counter")) is int]
    if len(counters) < len(rows):
        return False
    if is_first:
        return sorted(counters) == [*range(1, len(rows) + 1)]
    return sorted(counters[1:]) == [*range(counters[0] + 1, counters[0] + len(rows))]
