"""How much memory there is: the machine's, or less where a container or a batch job has but a part
of it. Who takes more than that is killed.
"""

import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def machine_memory() -> int:
    """Bytes."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits_of_groups()])


def _limits_of_groups() -> Iterator[int]:
    """What this process's control groups may take: its own, and those that it is within."""
    try:
        lines = OWN.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, name = GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        # In a container a path of the host may stand there: then what is mounted counts.
        for each in (group, *group.parents):
            if each.is_relative_to(root):
                yield from _number(each / name)


def _number(file: Path) -> Iterator[int]:
    """What a file says, if it is there and says a number."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return
    if text.isdecimal():
        yield int(text)
