"""Limits on what a collection may write, and on the memory that it may use.

The limit of host memory applies to a machine, and each of its ranks has an equal share. All other
limits apply to the run. Each rank that writes has an equal share of the files and bytes and checks
only its own share, which needs no communication. A rank that has used its share up therefore blocks
no other, but other ranks cannot use what is left of a share. Free disk space is checked before
every tensor. Ranks that check at the same moment see the same free space, so the limit on it may be
missed by one tensor per rank.

The limits count `.pt` files. The index takes about one kilobyte per tensor in addition.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megatron.collection.memory_limit import machine_memory

GIB = 1 << 30
ENDLESS = 2.0**60  #: files or GiB: a larger limit is taken for a mistake
OVERHEAD = 4096  #: upper bound of the bytes that a file has in addition to its tensor's
KEEP_FREE = 1.0  #: GiB of the disk that stay free by default
KEEP_FREE_SHARE = 0.05  #: share of a disk that stays free if this is less than `KEEP_FREE`
HOST_SHARE = 0.1  #: share of the machine's memory that a collection may use by default


class Disk(Protocol):
    """The result of `shutil.disk_usage`."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits; None means no limit, and the default for `keep_free` and `host_bytes`."""

    max_bytes: int | None = None
    max_files: int | None = None
    keep_free: int | None = None  #: bytes of the disk that stay free; 0 disables the check
    host_bytes: int | None = None  #: bytes of memory for tensors that wait to be written

    @classmethod
    def parse(
        cls,
        *,
        collect_max_gib: float | None = None,
        collect_max_files: int | None = None,
        collect_keep_free_gib: float | None = None,
        collect_max_host_gib: float | None = None,
    ) -> "Limits":
        """Read the flags of the same names.

        Raises:
            ValueError: if a limit is not a number or allows nothing.
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
        """Return the share of one rank.

        Args:
            ranks: number of ranks that write, which share files and bytes.
            on_machine: number of ranks on this machine, which share its memory.

        Raises:
            ValueError: if there is less than one file per rank, or the memory exceeds the
                machine's.
        """
        if self.max_files is not None and self.max_files < ranks:
            raise ValueError(
                f"--collect-max-files {self.max_files} is less than one for each of the {ranks} "
                f"ranks that collect; give {ranks} or more, or fewer ranks with --collect-ranks"
            )
        host = default_host_bytes() if self.host_bytes is None else self.host_bytes
        if host > machine_memory():
            raise ValueError(
                f"--collect-max-host-gib {host / GIB:g} is more than the {gib(machine_memory())} "
                "of memory that there is; give less, so that there is room for training too"
            )
        return replace(
            self,
            max_bytes=None if self.max_bytes is None else self.max_bytes // ranks,
            max_files=None if self.max_files is None else self.max_files // ranks,
            host_bytes=host // on_machine,
        )

    def kept_free(self, folder: Path) -> int:
        """Return the bytes that stay free on the file system of `folder`."""
        return self._kept_on(shutil.disk_usage(folder).total)

    def _kept_on(self, disk: int) -> int:
        if self.keep_free is not None:
            return self.keep_free
        return int(min(KEEP_FREE * GIB, KEEP_FREE_SHARE * disk))

    def exceeded_by_files(self, files: int, size: int) -> str | None:
        """Return which limit a number of files of `size` bytes in total exceeds, if any."""
        if self.max_files is not None and files > self.max_files:
            return f"--collect-max-files lets this rank write {self.max_files}"
        if self.max_bytes is not None and size > self.max_bytes:
            return f"--collect-max-gib lets this rank write {gib(self.max_bytes)}"
        return None

    def exceeded_on_disk(self, folder: Path, needed: int, disk: Disk | None = None) -> str | None:
        """Return a message if `needed` further bytes would leave too little of the disk free.

        Args:
            folder: a folder on the disk.
            needed: bytes to be written.
            disk: the last known usage of the disk; None to ask for it now.
        """
        if self.keep_free == 0:
            return None
        disk = disk or shutil.disk_usage(folder)
        kept = self._kept_on(disk.total)
        if disk.free - needed >= kept:
            return None
        return f"{gib(disk.free)} are free, and --collect-keep-free-gib keeps {gib(kept)}"

    def describe(self) -> dict[str, Any]:
        """Return the limits as plain values, for the run card."""
        return {
            "bytes": self.max_bytes,
            "files": self.max_files,
            "keep_free": self.keep_free,
            "host_bytes": self.host_bytes,
        }


def default_host_bytes() -> int:
    """Return a tenth of the memory of this machine, container or job."""
    return int(machine_memory() * HOST_SHARE)


def gib(size: float) -> str:
    """Return a number of bytes as text, in the unit of the flags or a smaller one."""
    for unit, factor in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.4g} bytes"
