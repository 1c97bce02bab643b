"""The folder that `--save-hf` writes: refused before training if it is taken, and put in place once
it is whole.

    DIR.partial      while it is written, with a marker that it is ours to remove; config.json,
                     without which no reader takes it, comes last
    DIR              the whole of it
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from megatron.training.checkpointing.disk import folder_to_disk, to_disk
from megatron.training.errors import RunError, UserError
from megatron.training.hf.architectures import CONFIG
from megatron.training.hf.reading import INDEX

#: What stands beside weights: a tokenizer, and how text is sampled.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
MARKER = ".written-by-save-hf"  #: in a folder that is not whole yet
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def check_target(folder: str) -> None:
    """Refuse a folder that cannot be written or holds something.

    Raises:
        UserError: says why.
    """
    path = Path(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise UserError(
            f"--save-hf {folder} cannot be made: {error.strerror}; choose another folder"
        ) from error
    if taken:
        raise UserError(
            f"--save-hf {folder} exists and is not empty; choose another folder or remove it"
        )
    partial = _partial(folder)
    if partial.exists() and not _is_ours(partial):
        raise UserError(_foreign(partial))
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--save-hf {folder} cannot be written; choose another folder")


def _partial(folder: str) -> Path:
    final = Path(folder)
    return final.with_name(final.name + ".partial")


def _is_ours(partial: Path) -> bool:
    """Whether this program began a folder of that name, or nothing is in it."""
    return partial.is_dir() and ((partial / MARKER).exists() or not any(partial.iterdir()))


def begin(folder: str) -> Path:
    """Make the folder to write to; one that an interrupted run has left is removed.

    Raises:
        RunError: something else has that name.
    """
    partial = _partial(folder)
    if partial.exists():
        if not _is_ours(partial):
            raise RunError(_foreign(partial))
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    (partial / MARKER).touch()
    return partial


def _foreign(partial: Path) -> str:
    return (
        f"{partial}, where --save-hf would be written until it is whole, was not begun by this "
        "program; move it away or choose another --save-hf"
    )


def put_in_place(partial: Path, folder: str) -> None:
    """Give the whole folder its name.

    Raises:
        RunError: the name was taken meanwhile.
    """
    final = Path(folder)
    folder_to_disk(partial)
    try:
        partial.rename(final)  # also onto an empty folder, never onto another
    except OSError as error:
        raise RunError(
            f"{final} was made by another while this run trained ({error.strerror}); the weights "
            f"are whole in {partial}"
        ) from error
    to_disk(final.parent)
    (final / MARKER).unlink()


def write_index(folder: Path, of_tensor: dict[str, str], total: int) -> None:
    """Say which file holds which tensor."""
    index = {"metadata": {"total_size": total}, "weight_map": of_tensor}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_config(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Describe the model, in the type that it was written in."""
    # Code that the original brought with it is not beside the new one.
    kept = {name: value for name, value in config.items() if name != "auto_map"}
    name = "dtype" if "dtype" in kept else "torch_dtype"
    text = json.dumps(kept | {name: _NAMES[dtype]}, indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def copy_companions(
    folder: Path, source: Path | None, file: tuple[Path, str] | None = None
) -> None:
    """Put the tokenizer's files beside the weights.

    source: a folder with such files.
    file: the tokenizer's only file, and its name there; it goes before one of `source`.
    """
    for name in COMPANIONS if source is not None else ():
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if file is not None:
        path, name = file
        shutil.copyfile(path, folder / name)
