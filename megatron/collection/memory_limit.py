"""Determine how much memory the machine, container or batch job lets this process use.

The kernel kills processes that exceed this limit.
"""

import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def machine_memory() -> int:
    """Return the amount of memory that this process may use, in bytes."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits_of_groups()])


def _limits_of_groups() -> Iterator[int]:
    """Yield the memory limits of the control groups that contain this process, in bytes."""
    try:
        lines = OWN.read_text(encoding="utf-8").splitlines()
    except OSError:  # the file exists on Linux only
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # cgroup version 2
            root, name = GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        # In a container, the path may be valid only on the host. The limits of those parent groups
        # that are mounted still apply.
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                yield from _number(folder / name)


def _number(file: Path) -> Iterator[int]:
    """Yield the number in `file`, or nothing if the file is unreadable or has no number."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return
    if text.isdecimal():
        yield int(text)
