"""Check each tensor against the limits, and count the tensors that are not written."""

import logging
from typing import Any

from megatron.collection.background_writer import Writer
from megatron.collection.limits import OVERHEAD, gib
from megatron.collection.ring_buffer import Lost
from megatron.collection.settings import Settings

logger = logging.getLogger(__name__)


class WriteBudget:
    """Budget of one rank: its limits, and the counts of tensors left out because of them.

    The first tensor that exceeds a limit ends writing on this rank. With a ring buffer, however, a
    lack of memory ends only the current iteration.
    """

    def __init__(self, settings: Settings, writer: Writer, rank: int):
        self.limit: str | None = None  #: message about the first limit that was reached
        self.full: str | None = None  #: limit that ended writing; None while writing continues
        self.dropped = 0  #: number of tensors left out because of a limit
        self.dropped_bytes = 0  #: total size of the left-out tensors, in bytes
        self.outside_slice = 0  #: number of tensors of which --collect-slice keeps nothing
        self._settings = settings
        self._writer = writer
        self._rank = rank
        self._ring_warned = False

    def take(self, size: int, fields: dict[str, Any]) -> bool:
        """Return whether a tensor of `size` bytes may be written; count it as dropped if not."""
        try:
            pending = self._writer.pending
            why = self.full or self._exceeded(size + OVERHEAD)
            if why is not None and pending:
                # Sizes of pending files are upper bounds, so wait until the exact sizes are known.
                self._writer.wait()
                why = self.full or self._exceeded(size + OVERHEAD)
        except OSError as error:
            folder = self._settings.directory
            self._writer.fail(f"cannot write to {folder}: {error}; name another --tensor-save-dir")
            return False
        if why is None:
            return True
        self._end(size, fields, why)
        return False

    def _exceeded(self, most: int) -> str | None:
        """Return a message if a file of at most `most` bytes would exceed a limit."""
        limits, writer = self._settings.limits, self._writer
        why = limits.exceeded_by_files(writer.records + 1, writer.bytes + most)
        # While files are pending, use the free space that a writer thread has queried, because a
        # query to an unresponsive disk would block training.
        # A file whose write ends during this call counts twice, because pending files are counted
        # first.
        needed = writer.pending_bytes + most
        disk = writer.disk if writer.pending else None
        return why or limits.exceeded_on_disk(self._settings.directory, needed, disk)

    def drop_for_memory(self, size: int, fields: dict[str, Any]) -> None:
        """Leave out this tensor, which does not fit into host memory, and all later ones."""
        self._end(size, fields, self._why_no_memory)

    @property
    def _why_no_memory(self) -> str:
        most = gib(self._settings.limits.host_bytes or 0)
        return self._writer.slow or f"--collect-max-host-gib lets this rank hold {most}"

    def leave_outside(self, shape: list[int], fields: dict[str, Any]) -> None:
        """Count a tensor of which `--collect-slice` keeps nothing, and warn about the first one."""
        self.outside_slice += 1
        if self.outside_slice == 1:
            logger.warning(
                "--collect-slice selects nothing of %s of %s, whose dimensions %s are %s; rank %d "
                "leaves out this tensor and similar ones",
                *(fields["tensor_name"], fields["module"], fields["dims"], shape, self._rank),
            )

    def warn_of_ring(self, size: int, fields: dict[str, Any]) -> None:
        """Warn once that the ring buffer cannot hold a whole iteration.

        The warning does not wait for an event, because there may be none.
        """
        if self.full is None and not self._ring_warned:
            self._ring_warned = True
            logger.warning(
                "%s: the ring of rank %d holds the first part of iteration %d only, up to %s; "
                "select less, or raise --collect-max-host-gib",
                *(self._why_no_memory, self._rank, fields["iteration"], _what(size, fields)),
            )

    def leave_out(self, lost: Lost) -> None:
        """Count the tensors missing from an iteration that is written from the ring buffer."""
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
        """Leave out this tensor and all later ones; log a warning for the first one."""
        if self.full is None:
            self.full = why
            self._reached(f"{why}: rank {self._rank} stopped collecting at {_what(size, fields)}")
        self.dropped += 1
        self.dropped_bytes += size

    def _reached(self, limit: str) -> None:
        self.limit = self.limit or limit
        logger.warning(
            "%s; %d tensors, %s, were written before; training goes on",
            *(limit, self._writer.records, gib(self._writer.bytes)),
        )
        self._writer.append({"event": "limited", "why": limit})

    def close(self) -> None:
        """Write the number and size of the left-out tensors to the index if a limit was reached."""
        if self.limit is not None:
            tensors, size = self.dropped, self.dropped_bytes
            event = {"event": "dropped", "tensors": tensors, "bytes": size, "why": self.limit}
            self._writer.append(event)


class UnlimitedBudget(WriteBudget):
    """Budget without limits, for a collection plan."""

    def take(self, size: int, fields: dict[str, Any]) -> bool:
        """Return True for every tensor."""
        return True


def _what(size: int, fields: dict[str, Any]) -> str:
    return (
        f"{gib(size)} of {fields['tensor_name']} of {fields['module'] or 'a layer'}, iteration "
        f"{fields['iteration']}, micro-batch {fields['micro_batch']}"
    )
