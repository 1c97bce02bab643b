"""Waiting until what was written is on the disk: only then may a name say that it is whole."""

import os
from pathlib import Path


def to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def folder_to_disk(folder: Path) -> None:
    """Wait until all that lies in a folder is on the disk, and itself."""
    for path in folder.rglob("*"):
        to_disk(path)
    to_disk(folder)
