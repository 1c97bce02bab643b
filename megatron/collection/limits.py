"""How much a collection may write, and how much memory it may take for that.

Host memory is a machine's, of which each of its ranks has an equal share; the other limits are for
the run: each of the ranks that write has an equal share of the files and bytes,
and looks at its own alone. That needs no communication, so that a rank which has reached its share
holds up no other; what one rank leaves of its share another cannot use. Free disk is looked at
before every tensor. Ranks that look at the same moment see the same free space, so that a machine
may fall short of it by one tensor a rank.

Counted are the `.pt` files; the index takes about a kilobyte a tensor more.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megatron.collection.memory_limit import machine_memory

GIB = 1 << 30
ENDLESS = 2.0**60  #: files, or GiB: no limit that anything reaches
OVERHEAD = 4096  #: bytes that a file has at most beyond its tensor's
KEEP_FREE = 1.0  #: GiB
KEEP_FREE_SHARE = 0.05  #: of a file system on which that is less
HOST_SHARE = 0.1  #: of the memory that there is, if no flag says otherwise


class Disk(Protocol):
    """What `shutil.disk_usage` gives."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be written; None: no limit, and of free space the default."""

    max_bytes: int | None = None
    max_files: int | None = None
    keep_free: int | None = None  #: 0: the disk is not looked at
    host_bytes: int | None = None  #: of memory, for what waits to be written; None: the default

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
            ValueError: a limit that lets nothing through, or is no number.
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
        """What each of `ranks` may write, and of host memory each of those on one machine.

        Raises:
            ValueError: not one file each, or more memory than there is.
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
        """Bytes of the file system of `folder` that stay free."""
        return self._kept_of(shutil.disk_usage(folder).total)

    def _kept_of(self, disk: int) -> int:
        if self.keep_free is not None:
            return self.keep_free
        return int(min(KEEP_FREE * GIB, KEEP_FREE_SHARE * disk))

    def of_files(self, files: int, size: int) -> str | None:
        """Which limit so many files of that size together are over, if they are."""
        if self.max_files is not None and files > self.max_files:
            return f"--collect-max-files lets this rank write {self.max_files}"
        if self.max_bytes is not None and size > self.max_bytes:
            return f"--collect-max-gib lets this rank write {gib(self.max_bytes)}"
        return None

    def of_disk(self, folder: Path, needed: int, disk: Disk | None = None) -> str | None:
        """Whether `needed` further bytes would leave too little free, and how little; `disk` is
        what `shutil.disk_usage` said of the folder last, if that may count.
        """
        if self.keep_free == 0:
            return None
        disk = disk or shutil.disk_usage(folder)
        kept = self._kept_of(disk.total)
        if disk.free - needed >= kept:
            return None
        return f"{gib(disk.free)} are free, and --collect-keep-free-gib keeps {gib(kept)}"

    def describe(self) -> dict[str, Any]:
        """As plain values, for the run card."""
        return {
            "bytes": self.max_bytes,
            "files": self.max_files,
            "keep_free": self.keep_free,
            "host_bytes": self.host_bytes,
        }


def default_host_bytes() -> int:
    """A tenth of the memory that this machine, container or job has."""
    return int(machine_memory() * HOST_SHARE)


def gib(size: float) -> str:
    """Bytes for a person, in the unit of the flags or a smaller one."""
    for unit, factor in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.4g} bytes"
