"""Whether the limits have room for a further tensor, and what was left out where they had not."""

import logging
from typing import Any

from megatron.core.background_writer import Writer
from megatron.core.collection_limits import OVERHEAD, gib
from megatron.core.collection_settings import Settings

logger = logging.getLogger(__name__)


class Room:
    """Of one rank. From the first tensor that finds no room, none is written."""

    def __init__(self, settings: Settings, writer: Writer, rank: int):
        self.limit: str | None = None  #: which one was reached, and where
        self.dropped = 0  #: tensors that were not written for that
        self.dropped_bytes = 0
        self._settings = settings
        self._writer = writer
        self._rank = rank
        self._full: str | None = None  #: the limit, if it is one of what may be written

    def take(self, size: int, fields: dict[str, Any]) -> bool:
        """Whether a tensor of `size` bytes may be written; it counts as dropped if not."""
        try:
            why = self._full or self._what_is_over(size + OVERHEAD)
            if why is not None and self._writer.pending:  # of these the sizes are not known yet
                self._writer.drain()
                why = self._full or self._what_is_over(size + OVERHEAD)
        except OSError as error:
            folder = self._settings.directory
            self._writer.fail(f"cannot write to {folder}: {error}; name another --tensor-save-dir")
            return False
        if why is None:
            return True
        self._full = why
        self.drop(size, fields, why)
        return False

    def _what_is_over(self, most: int) -> str | None:
        limits, writer = self._settings.limits, self._writer
        why = limits.of_files(writer.records + 1, writer.bytes + most)
        # While threads write, one of them looks at the disk: if it hangs, so does not training.
        disk = writer.disk if writer.pending else None
        needed = writer.pending_bytes + most
        return why or limits.of_disk(self._settings.directory, needed, disk)

    def drop(self, size: int, fields: dict[str, Any], why: str) -> None:
        """Leave a tensor out for a limit, and say so the first time."""
        if self.limit is None:
            self.limit = (
                f"{why}: rank {self._rank} stopped collecting at {gib(size)} of "
                f"{fields['tensor_name']} of {fields['module'] or 'a layer'}, iteration "
                f"{fields['iteration']}, micro-batch {fields['micro_batch']}"
            )
            logger.warning(
                "%s, with %d tensors, %s, written; what follows is dropped, training goes on",
                *(self.limit, self._writer.records, gib(self._writer.bytes)),
            )
            self._writer.append({"event": "limited", "why": self.limit})
        self.dropped += 1
        self.dropped_bytes += size

    def drop_for_memory(self, size: int, fields: dict[str, Any]) -> None:
        """Leave a tensor out that the host's memory cannot hold."""
        most = gib(self._settings.limits.host_bytes or 0)
        self.drop(size, fields, f"--collect-max-host-gib lets this rank hold {most}")

    def close(self) -> None:
        """Say in the index what was left out, if anything was."""
        if self.limit is not None:
            tensors, size = self.dropped, self.dropped_bytes
            event = {"event": "dropped", "tensors": tensors, "bytes": size, "why": self.limit}
            self._writer.append(event)
