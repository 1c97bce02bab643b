"""Read Parquet files in batches of rows; only one batch and one page are kept in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batch import Batch, Position

ROWS = 32  #: number of rows that are decoded at a time
#: Maximum size of a cell, in bytes; documents in other input formats have the same limit.
LARGEST_CELL = 256 << 20


def read_parquet(
    path: Path, settings: Any, *, number: int, start: Position, batch_bytes: int
) -> Iterator[Batch]:
    """Yield the documents of a Parquet file from the position `start` on, in batches.

    Raises:
        ValueError: if the file is damaged, has no text in the requested columns, or if pyarrow is
            not installed.
    """
    from megatron.optional_packages import check_installed

    check_installed("pyarrow", f"{path}, a Parquet file,")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Each Parquet page, usually 1 MB, is read when it is needed. Therefore, even a large row
        # group takes little memory.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            _check_columns(path, file.schema_arrow, settings.json_keys)
            size, rows = path.stat().st_size, max(file.metadata.num_rows, 1)
            batch = Batch(number, path, "parquet", start)
            row = text = 0
            for group in range(file.num_row_groups):
                group_end = row + file.metadata.row_group(group).num_rows
                if group_end <= start.line:
                    row = group_end
                    continue
                for table in file.iter_batches(
                    ROWS, [group], list(settings.json_keys), use_threads=False
                ):
                    columns = [table[key].cast(pa.large_binary()) for key in settings.json_keys]
                    cells = zip(*(column.to_pylist() for column in columns), strict=True)
                    for document in cells:
                        row += 1
                        _check_size(path, row, document)
                        if row > start.line:
                            batch.documents.append((row, document))
                            text += sum(len(cell or b"") for cell in document)
                    if text >= batch_bytes:
                        batch.end, text = Position(row), 0
                        batch.bytes_read = size * row // rows - size * batch.start.line // rows
                        yield batch
                        batch = Batch(number, path, "parquet", batch.end)
            batch.end, batch.last = Position(row), True
            batch.bytes_read = size - size * batch.start.line // rows
            yield batch
    except pa.ArrowException as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path} is damaged, or not a Parquet file ({reason}); get it again, or leave it out"
        ) from error


def _check_size(path: Path, row: int, document: tuple[bytes | None, ...]) -> None:
    if max(len(cell or b"") for cell in document) > LARGEST_CELL:
        raise ValueError(
            f"{path}, row {row}: a document of more than {LARGEST_CELL >> 20} MiB; cut it into "
            "several rows, or leave the file out"
        )


def _check_columns(path: Path, schema: Any, keys: tuple[str, ...]) -> None:
    import pyarrow as pa

    for key in keys:
        if key not in schema.names:
            raise ValueError(
                f"{path}: no column {key!r} (the columns are {', '.join(schema.names)}); name the "
                "column of the text in --json-keys"
            )
        kind = schema.field(key).type
        if not any(is_text(kind) for is_text in (pa.types.is_string, pa.types.is_large_string)):
            raise ValueError(
                f"{path}: the column {key!r} holds {kind}, not text; name another in --json-keys"
            )
