"""Limits on how much a collection may write and how much memory it may use.

The limit on host memory applies to each machine and is divided equally among the machine's ranks.
The limits on files and bytes apply to the whole run and are divided equally among the ranks that
write. Each rank checks only its own share, which needs no communication. A rank that has used up
its share therefore does not stop the others, and the unused part of a share is not available to
other ranks.

Free disk space is checked before every tensor. Ranks that check at the same time see the same free
space, so they may exceed this limit by one tensor per rank.

The limits count `.pt` files only. The index takes about one kilobyte more per tensor.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megatron.collection.memory_limit import machine_memory

GIB = 1 << 30
ENDLESS = 2.0**60  #: upper bound on a limit, in files or GiB; a larger value is an error
OVERHEAD = 4096  #: upper bound on the bytes that a file holds besides the tensor
KEEP_FREE = 1.0  #: disk space that stays free by default, in GiB
KEEP_FREE_SHARE = 0.05  #: fraction that stays free by default on a disk smaller than 20 GiB
HOST_SHARE = 0.1  #: fraction of the machine's memory that a collection may use by default


class Disk(Protocol):
    """Disk usage in bytes, as returned by `shutil.disk_usage`."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the files, disk space and host memory of a collection.

    None means no limit for `max_bytes` and `max_files`, and the default for `keep_free` and
    `host_bytes`.
    """

    max_bytes: int | None = None
    max_files: int | None = None
    keep_free: int | None = None  #: disk space that stays free, in bytes; 0 disables the check
    host_bytes: int | None = None  #: maximum host memory for tensors not yet written, in bytes

    @classmethod
    def parse(
        cls,
        *,
        collect_max_gib: float | None = None,
        collect_max_files: int | None = None,
        collect_keep_free_gib: float | None = None,
        collect_max_host_gib: float | None = None,
    ) -> "Limits":
        """Create the limits from command-line flags; each parameter is named after its flag.

        Raises:
            ValueError: if a limit is not a number or is out of range.
        """
        for flag, value in {
            "--collect-max-gib": collect_max_gib,
            "--collect-max-files": collect_max_files,
            "--collect-max-host-gib": collect_max_host_gib,
        }.items():
            if value is not None and not 0 < value < ENDLESS:
                raise ValueError(
                    f"{flag} is {value}; give more than 0, or leave it out for no limit"
                )
        free = collect_keep_free_gib
        if free is not None and not 0 <= free < ENDLESS:
            raise ValueError(f"--collect-keep-free-gib is {free}; give 0 or more")
        return cls(
            None if collect_max_gib is None else int(collect_max_gib * GIB),
            collect_max_files,
            None if free is None else int(free * GIB),
            None if collect_max_host_gib is None else int(collect_max_host_gib * GIB),
        )

    def share(self, ranks: int, on_machine: int = 1) -> "Limits":
        """Return one rank's share of the limits.

        Args:
            ranks: number of ranks that write; they share the files and bytes.
            on_machine: number of ranks on this machine; they share its memory.

        Raises:
            ValueError: if the share is less than one file, or the limit on host memory exceeds the
                machine's memory.
        """
        if self.max_files is not None and self.max_files < ranks:
            raise ValueError(
                f"--collect-max-files {self.max_files} is less than one for each of the {ranks} "
                f"ranks that collect; give {ranks} or more, or fewer ranks with --collect-ranks"
            )
        host = default_host_bytes() if self.host_bytes is None else self.host_bytes
        if host > machine_memory():
            raise ValueError(
                f"--collect-max-host-gib {host / GIB:g} is more than this machine's memory of "
                f"{gib(machine_memory())}; give less, so that there is room for training too"
            )
        return replace(
            self,
            max_bytes=None if self.max_bytes is None else self.max_bytes // ranks,
            max_files=None if self.max_files is None else self.max_files // ranks,
            host_bytes=host // on_machine,
        )

    def kept_free(self, folder: Path) -> int:
        """Return the space that must stay free on the file system of `folder`, in bytes."""
        return self._kept_on(shutil.disk_usage(folder).total)

    def _kept_on(self, disk: int) -> int:
        if self.keep_free is not None:
            return self.keep_free
        return int(min(KEEP_FREE * GIB, KEEP_FREE_SHARE * disk))

    def exceeded_by_files(self, files: int, size: int) -> str | None:
        """Return a message if `files` files of `size` bytes in total exceed a limit."""
        if self.max_files is not None and files > self.max_files:
            return f"--collect-max-files lets this rank write {self.max_files}"
        if self.max_bytes is not None and size > self.max_bytes:
            return f"--collect-max-gib lets this rank write {gib(self.max_bytes)}"
        return None

    def exceeded_on_disk(self, folder: Path, needed: int, disk: Disk | None = None) -> str | None:
        """Return a message if writing `needed` bytes would leave too little free disk space.

        Args:
            folder: a folder on the disk.
            needed: number of bytes to be written.
            disk: last known usage of the disk; None to query it now.
        """
        if self.keep_free == 0:
            return None
        disk = disk or shutil.disk_usage(folder)
        kept = self._kept_on(disk.total)
        if disk.free - needed >= kept:
            return None
        return f"{gib(disk.free)} are free, but --collect-keep-free-gib reserves {gib(kept)}"

    def describe(self) -> dict[str, Any]:
        """Return the limits as plain values, for the run card."""
        return {
            "bytes": self.max_bytes,
            "files": self.max_files,
            "keep_free": self.keep_free,
            "host_bytes": self.host_bytes,
        }


def default_host_bytes() -> int:
    """Return the default limit on host memory: a tenth of the available memory, in bytes."""
    return int(machine_memory() * HOST_SHARE)


def gib(size: float) -> str:
    """Format a number of bytes in GiB, MiB, KiB or bytes, with four significant digits."""
    for unit, factor in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.4g} bytes"
