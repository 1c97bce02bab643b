"""Find the input files: the files that the user names, and the data files in named folders."""

from __future__ import annotations

import glob
import sys
from pathlib import Path

from documents import Settings

#: Names of metadata files that the `datasets` library writes next to the data.
NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
DATA_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".txt", ".text", ".tokens")
COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2")
NAMES_SHOWN = 5


def expand(settings: Settings) -> tuple[Path, ...]:
    """Return all input files: the named files, and the sorted data files of each named folder.

    Output of preprocessing runs is left out. The names of other skipped files are printed.

    Raises:
        ValueError: if an input does not exist or has no data.
    """
    files: list[Path] = []
    for path in settings.input:
        if path.is_dir():
            files += _data_in(path, settings)
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(
                f"the input {path} is not a file or folder; name text, JSONL or Parquet in --input"
            )
    for path in files:
        if not path.stat().st_size:
            raise ValueError(f"the input {path} is empty; leave it out, or get it again")
    return tuple(files)


def _data_in(folder: Path, settings: Settings) -> list[Path]:
    files = sorted(file for file in folder.rglob("*") if _may_be_data(folder, file, settings))
    data = [file for file in files if _is_named_like_data(file)]
    if not data:
        raise ValueError(
            f"the folder {folder} holds no data; give one with {', '.join(DATA_SUFFIXES)} "
            "files (.gz, .zst and .bz2 too), or wikiextractor's wiki_00 and so on"
        )
    if others := [str(file.relative_to(folder)) for file in files if not _is_named_like_data(file)]:
        names = ", ".join(others[:NAMES_SHOWN]) + ", ..." * (len(others) > NAMES_SHOWN)
        print(
            f"Skipped in {folder}: {len(others):,} files that are not named like data "
            f"({names}). If they are data, name them one by one in --input.",
            file=sys.stderr,
        )
    return data


def _may_be_data(folder: Path, file: Path, settings: Settings) -> bool:
    """Return whether a file may hold data: it is not hidden, metadata or the output of a run."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    if hidden or file.name in NOT_DATA or not file.is_file():
        return False
    return not (_is_unfinished(file.resolve()) or _is_output(file.resolve(), settings))


def _is_unfinished(file: Path) -> bool:
    """Return whether a file is in a folder that holds the unfinished output of a run."""
    return any(path.suffix == ".partial" and (path / "lock").is_file() for path in file.parents)


def _is_output(file: Path, settings: Settings) -> bool:
    """Return whether a file is output of this run, or published output of another run."""
    prefix = settings.output_prefix.resolve()
    own = (f"{prefix}_{key}_document.json" for key in settings.json_keys)
    if str(file) in (f"{prefix}_bad_lines.txt", *own):
        return True
    if file.name.endswith("_bad_lines.txt"):
        stem = glob.escape(file.name.removesuffix("_bad_lines.txt"))
        return any(file.parent.glob(f"{stem}_*_document.idx"))
    if file.suffix in (".bin", ".idx", ".json"):
        return file.with_suffix(".bin").is_file() and file.with_suffix(".idx").is_file()
    return False


def _is_named_like_data(file: Path) -> bool:
    name = file.name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name.endswith(DATA_SUFFIXES) or name.startswith("wiki_")
