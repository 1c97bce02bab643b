"""Write rows to Parquet files that remain readable if the process is killed.

A Parquet file can be read only after its end has been written. Each group of rows is therefore a
file of its own, which appears under its name when it is complete. A kill loses at most the rows
that are still in memory.
"""

import os
import time
from pathlib import Path
from typing import Any

from megatron.tensor_record import PARTIAL_SUFFIX

ROWS = 16384  #: number of rows at which a file is written
SECONDS = 300.0  #: maximum time for which rows stay in memory while rows are added, in seconds


class ParquetFiles:
    """Files `<name>_<number>.parquet` in a folder, to which one process appends rows."""

    def __init__(self, folder: Path, name: str, *, columns: dict[str, str], about: dict[str, str]):
        """Prepare the files; none is written before there are rows.

        Args:
            folder: existing folder of the files.
            name: beginning of the names of the files.
            columns: names of the columns and their types, such as "int32" or "string".
            about: entries of the metadata of each file.
        """
        import pyarrow  # the import takes a fifth of a second

        self._folder, self._name = folder, name
        types = {"string": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
        fields = [
            (column, types.get(kind) or pyarrow.type_for_alias(kind))
            for column, kind in columns.items()
        ]
        self._schema = pyarrow.schema(fields, metadata=about)
        self._columns: dict[str, list[Any]] = {column: [] for column in columns}
        self._number = 0
        self._since = time.monotonic()

    def add(self, rows: list[tuple[Any, ...]]) -> None:
        """Append rows; write a file if many rows are in memory or if the last file is old.

        Raises:
            OSError: if the file cannot be written.
        """
        for column, values in zip(self._columns.values(), zip(*rows, strict=True), strict=False):
            column.extend(values)
        size = len(next(iter(self._columns.values())))
        if size >= ROWS or time.monotonic() - self._since > SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write all rows that are in memory to a new file.

        Raises:
            OSError: if the file cannot be written.
        """
        self._since = time.monotonic()
        if not next(iter(self._columns.values())):
            return
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table(self._columns, schema=self._schema)
        self._number += 1
        path = self._folder / f"{self._name}_{self._number:06}.parquet"
        partial = path.with_name(path.name + PARTIAL_SUFFIX)
        try:
            pyarrow.parquet.write_table(table, partial, compression="zstd")
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        for column in self._columns.values():
            column.clear()
