"""Check a dump's folder without importing pandas or torch, which takes seconds."""

from pathlib import Path


def check_folder(folder: Path) -> None:
    """Check that a folder exists.

    Raises:
        ValueError: if there is nothing at the path, or if it is not a folder.
    """
    if not folder.exists():
        raise ValueError(f"no folder {folder}; collect tensors first, or name another folder")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the folder that holds the .pt files")
