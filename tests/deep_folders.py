"""Nested folders, deeper than the recursion limit and the longest path."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def deep_folders(folder: Path, depth: int) -> Iterator[None]:
    """Create `depth` nested folders in `folder`, and remove them at the end."""
    before = Path.cwd()
    os.chdir(folder)
    made = 0
    try:
        for _ in range(depth):
            os.mkdir("a")  # noqa: PTH102 # relative: the whole path is too long
            os.chdir("a")
            made += 1
        os.chdir(before)
        yield
    finally:
        os.chdir(folder)
        for _ in range(made):
            os.chdir("a")
        for _ in range(made):
            os.chdir("..")
            os.rmdir("a")  # noqa: PTH106
        os.chdir(before)
