"""Manage the output folder of `--save-hf`: check it before training and rename it when complete.

DIR.partial      name of the folder while it is written; a marker file shows that this program may
                 remove it. config.json, which every reader needs, is written last
DIR              name of the complete folder
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from megatron.training.checkpointing.files import fsync, fsync_tree
from megatron.training.errors import RunError, UserError
from megatron.training.hf.architectures import CONFIG
from megatron.training.hf.reading import INDEX

#: Names of the files that accompany weights: tokenizer files and the settings of text generation.
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
MARKER = ".written-by-save-hf"  #: name of a file that shows that this program created the folder
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def check_target(folder: str) -> None:
    """Check that the output folder can be written, and that it is empty if it exists.

    Raises:
        UserError: if the folder cannot be used; the message gives the reason.
    """
    path = Path(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise UserError(
            f"--save-hf {folder} cannot be created: {error.strerror}; choose another folder"
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
    """Return whether the `.partial` folder is empty or was created by this program."""
    return partial.is_dir() and ((partial / MARKER).exists() or not any(partial.iterdir()))


def begin(folder: str) -> Path:
    """Create the `.partial` folder, after removing one that an interrupted run left behind.

    Raises:
        RunError: if a file or folder with this name exists that this program did not create.
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
        f"{partial}, where --save-hf is written until it is complete, was not created by this "
        "program; move it away or choose another --save-hf"
    )


def put_in_place(partial: Path, folder: str) -> None:
    """Rename the complete `.partial` folder to its final name.

    Raises:
        RunError: if the name was taken in the meantime.
    """
    final = Path(folder)
    fsync_tree(partial)
    try:
        partial.rename(final)  # fails if `final` exists and is not empty
    except OSError as error:
        raise RunError(
            f"{final} was created by another program while this run trained ({error.strerror}); "
            f"the complete weights are in {partial}"
        ) from error
    fsync(final.parent)
    (final / MARKER).unlink()


def write_index(folder: Path, file_of: dict[str, str], total: int) -> None:
    """Write the checkpoint's index, which maps each tensor to its file."""
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_config(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Write the config.json of the model, with the dtype of the written weights."""
    # `auto_map` refers to code next to the original config.json, and this code is not copied.
    settings = {name: value for name, value in config.items() if name != "auto_map"}
    name = "dtype" if "dtype" in settings else "torch_dtype"
    text = json.dumps(settings | {name: _NAMES[dtype]}, indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def copy_companions(
    folder: Path, source: Path | None, file: tuple[Path, str] | None = None
) -> None:
    """Copy the tokenizer files and the text generation settings to the folder of the weights.

    Args:
        folder: folder of the weights.
        source: folder that holds such files, or None.
        file: path of a tokenizer that consists of one file, and the file's name in `folder`. It
            takes precedence over a file with this name in `source`.
    """
    for name in COMPANIONS if source is not None else ():
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if file is not None:
        path, name = file
        shutil.copyfile(path, folder / name)
