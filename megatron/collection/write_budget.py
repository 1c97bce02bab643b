"""Whether the limits have room for a further tensor, and what was left out where they had not."""

import logging
from typing import Any

from megatron.collection.background_writer import Writer
from megatron.collection.limits import OVERHEAD, gib
from megatron.collection.ring_buffer import Lost
from megatron.collection.settings import Settings

logger = logging.getLogger(__name__)


class WriteBudget:
    """Of one rank. From the first tensor that finds no room, none is written; a ring begins anew
    with the next iteration where it was the memory that had none.
    """

    def __init__(self, settings: Settings, writer: Writer, rank: int):
        self.limit: str | None = None  #: the first one that was reached, and where
        self.full: str | None = None  #: the one for which nothing more is written
        self.dropped = 0  #: tensors that were not written for that
        self.dropped_bytes = 0
        self.outside_slice = 0  #: tensors of which --collect-slice leaves nothing
        self._settings = settings
        self._writer = writer
        self._rank = rank
        self._ring_warned = False

    def take(self, size: int, fields: dict[str, Any]) -> bool:
        """Whether a tensor of `size` bytes may be written; it counts as dropped if not."""
        try:
            why = self.full or self._what_is_over(size + OVERHEAD)
            if why is not None and self._writer.pending:  # of these the sizes are not known yet
                self._writer.wait()
                why = self.full or self._what_is_over(size + OVERHEAD)
        except OSError as error:
            folder = self._settings.directory
            self._writer.fail(f"cannot write to {folder}: {error}; name another --tensor-save-dir")
            return False
        if why is None:
            return True
        self._end(size, fields, why)
        return False

    def _what_is_over(self, most: int) -> str | None:
        limits, writer = self._settings.limits, self._writer
        why = limits.of_files(writer.records + 1, writer.bytes + most)
        # While threads write, one of them looks at the disk: if it hangs, so does not training.
        disk = writer.disk if writer.pending else None
        needed = writer.pending_bytes + most
        return why or limits.of_disk(self._settings.directory, needed, disk)

    def drop_for_memory(self, size: int, fields: dict[str, Any]) -> None:
        """Leave a tensor out that the host's memory cannot hold, and all that follow."""
        self._end(size, fields, self._why_no_memory)

    @property
    def _why_no_memory(self) -> str:
        most = gib(self._settings.limits.host_bytes or 0)
        return self._writer.slow or f"--collect-max-host-gib lets this rank hold {most}"

    def leave_outside(self, shape: list[int], fields: dict[str, Any]) -> None:
        """Count a tensor that ends before the slice begins, and say so the first time."""
        self.outside_slice += 1
        if self.outside_slice == 1:
            logger.warning(
                "--collect-slice leaves nothing of %s of %s, whose dimensions %s are %s; rank %d "
                "leaves it out, and others like it",
                *(fields["tensor_name"], fields["module"], fields["dims"], shape, self._rank),
            )

    def warn_of_ring(self, size: int, fields: dict[str, Any]) -> None:
        """Say once that a ring cannot hold a whole iteration; it may never be written."""
        if self.full is None and not self._ring_warned:
            self._ring_warned = True
            logger.warning(
                "%s: the ring of rank %d holds the first part of iteration %d only, up to %s; "
                "select less, or raise --collect-max-host-gib",
                *(self._why_no_memory, self._rank, fields["iteration"], _what(size, fields)),
            )

    def leave_out(self, lost: Lost) -> None:
        """Count what an iteration of a ring that is written lacks."""
        why = self.full or self._why_no_memory
        size, fields = lost[0]
        if self.limit is None:
            self._reached(f"{why}: rank {self._rank} left out {_what(size, fields)}, and the rest")
        total = sum(size for size, _ in lost)
        self.dropped += len(lost)
        self.dropped_bytes += total
        event = {"event": "left_out", "iteration": fields["iteration"], "why": why}
        self._writer.append(event | {"tensors": len(lost), "bytes": total})

    def _end(self, size: int, fields: dict[str, Any], why: str) -> None:
        """Leave a tensor out, and all that follow; say so the first time."""
        if self.full is None:
            self.full = why
            self._reached(f"{why}: rank {self._rank} stopped collecting at {_what(size, fields)}")
        self.dropped += 1
        self.dropped_bytes += size

    def _reached(self, limit: str) -> None:
        self.limit = self.limit or limit
        logger.warning(
            "%s, with %d tensors, %s, written; training goes on",
            *(limit, self._writer.records, gib(self._writer.bytes)),
        )
        self._writer.append({"event": "limited", "why": limit})

    def close(self) -> None:
        """Say in the index what was left out, if anything was."""
        if self.limit is not None:
            tensors, size = self.dropped, self.dropped_bytes
            event = {"event": "dropped", "tensors": tensors, "bytes": size, "why": self.limit}
            self._writer.append(event)


def _what(size: int, fields: dict[str, Any]) -> str:
    return (
        f"{gib(size)} of {fields['tensor_name']} of {fields['module'] or 'a layer'}, iteration "
        f"{fields['iteration']}, micro-batch {fields['micro_batch']}"
    )
