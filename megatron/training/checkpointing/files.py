"""Manage checkpoint folders, and the tracker file that names the latest checkpoint.

The functions find the checkpoint to read, and rename a new checkpoint once it is complete.
"""

import argparse
import contextlib
import os
import re
import shutil
from pathlib import Path

import torch.distributed as dist

from megatron.bounded_files import (
    UnusableFileError,
    check_regular,
    printable,
    read_json,
    read_text,
    refuse_special_files,
)
from megatron.training.collective_errors import first_rank_does
from megatron.training.errors import UserError
from megatron.training.printing import print_rank_0

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"  #: name of the file with the state that is the same on every rank
INDEX = ".metadata"  #: name of the index, which maps each part of a tensor to its file
_ITERATION = re.compile(r"[0-9]{1,15}")
_FOLDER = re.compile(r"iter_([0-9]{7,15})")
_TRACKER_LIMIT = 1024  #: maximum size of the tracker file, in bytes
#: content of a checkpoint's `metadata.json`; checkpoints of other formats cannot be read
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
#: pattern of the names of folders that a killed run left behind: a checkpoint that was being
#: written (.partial), or one that was being replaced by a new one (.old)
_LEFTOVER = re.compile(r"iter_\d{7,}\.(partial|old)")


def fsync(path: Path) -> None:
    """Flush a file, or a folder's list of entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to disk."""
    for path in folder.rglob("*"):
        fsync(path)
    fsync(folder)


def checkpoint_folder(directory: str, iteration: int) -> Path:
    """Return the path of the checkpoint folder for an iteration."""
    return Path(directory, f"iter_{iteration:07d}")


def latest_iteration(directory: str) -> int | None:
    """Return the iteration in the tracker file, or None if there is no tracker file.

    Raises:
        UserError: if the file cannot be read or does not contain an iteration.
    """
    path = Path(directory, TRACKER)
    advice = "give --ckpt-step with one of the folder's iterations"
    try:
        text = read_text(path, limit=_TRACKER_LIMIT).strip()
    except FileNotFoundError:
        return None
    except UnusableFileError as error:
        raise UserError(f"{path} cannot be read: {error.why}; {advice}") from error
    if not _ITERATION.fullmatch(text):
        shown = printable(repr(text), limit=60)
        raise UserError(f"{path} holds {shown}, not an iteration; {advice}")
    return int(text)


def iterations_in(directory: str) -> list[int]:
    """Return the iterations for which there is a checkpoint folder, in ascending order."""
    if not Path(directory).is_dir():
        return []
    matches = (_FOLDER.fullmatch(path.name) for path in Path(directory).iterdir())
    return sorted(int(match[1]) for match in matches if match)


def check_save_directory(args: argparse.Namespace) -> None:
    """Check that the `--save` folder can be written and does not belong to another run.

    Must be called on all ranks, before training starts.

    Raises:
        UserError: on all ranks, if the folder cannot be used; the message gives the reason.
    """
    if args.save is None:
        return

    def check() -> None:
        if problem := _problem_with(args):
            raise UserError(problem)

    first_rank_does(check)


def _problem_with(args: argparse.Namespace) -> str | None:
    try:
        Path(args.save).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--save {args.save} cannot be created: {error.strerror}; choose another folder"
    if not os.access(args.save, os.W_OK):
        return f"--save {args.save} cannot be written; choose another folder"
    if not resumes_in_place(args) and (latest := latest_iteration(args.save)) is not None:
        if args.finetune:
            return (
                f"--save {args.save} holds a checkpoint of iteration {latest}, and --finetune "
                "starts at iteration 0 and would overwrite it; give another --save"
            )
        return (
            f"--save {args.save} holds a checkpoint of iteration {latest}, which this run would "
            "overwrite; give --load with the same folder to resume it, or another --save"
        )
    return None


def resumes_in_place(args: argparse.Namespace) -> bool:
    """Return whether the run resumes from the same folder that it saves checkpoints to."""
    if args.load is None or args.save is None or args.finetune:
        return False
    return Path(args.load).resolve() == Path(args.save).resolve()


def begin(final: Path) -> Path:
    """Create and return the temporary folder to which a checkpoint is written.

    Temporary and replaced checkpoints that killed runs left in the same directory are removed.

    Args:
        final: folder to which the checkpoint is renamed once it is complete.
    """
    for path in final.parent.iterdir():
        if path.is_dir() and _LEFTOVER.fullmatch(path.name):
            replaced = path.with_suffix("").exists()
            if path.suffix == ".partial" or replaced:
                shutil.rmtree(path)
    partial = final.with_name(final.name + ".partial")
    partial.mkdir()
    return partial


def put_in_place(partial: Path, final: Path) -> None:
    """Flush a complete checkpoint to disk and rename its folder from `partial` to `final`.

    An existing checkpoint of the same iteration is replaced. Such a checkpoint exists if the run
    resumed from an earlier one.
    """
    fsync_tree(partial)
    if final.exists():
        outdated = final.with_name(final.name + ".old")
        shutil.rmtree(outdated, ignore_errors=True)
        final.rename(outdated)
        partial.rename(final)
        fsync(final.parent)
        shutil.rmtree(outdated)
    else:
        partial.rename(final)
        fsync(final.parent)


def write_tracker(directory: Path, iteration: int) -> None:
    """Write the tracker file, which names the latest complete checkpoint."""
    partial = directory / f"{TRACKER}.partial"
    # Writing to an existing path could follow a link or block on a FIFO.
    partial.unlink(missing_ok=True)
    partial.write_text(str(iteration), encoding="utf-8")
    fsync(partial)
    partial.replace(directory / TRACKER)
    fsync(directory)


def undo_replacement(args: argparse.Namespace) -> None:
    """Restore a checkpoint whose replacement was interrupted.

    A run can be killed in `put_in_place` after the outdated checkpoint was renamed, and before the
    new one has its final name. Must be called on all ranks.
    """
    if args.load is None:
        return
    if dist.get_rank() == 0:
        for outdated in Path(args.load).glob("iter_*.old"):
            final = outdated.with_suffix("")
            if not final.exists():
                with contextlib.suppress(OSError):  # `folder_to_load` reports the missing folder
                    outdated.rename(final)
    dist.barrier()


def resumes(args: argparse.Namespace) -> bool:
    """Return whether the run resumes from a checkpoint in `--load`.

    Such a checkpoint takes precedence over `--load-hf`.
    """
    if args.load is None:
        return False
    return args.ckpt_step is not None or latest_iteration(args.load) is not None


def folder_to_load(args: argparse.Namespace) -> Path | None:
    """Return the folder of the checkpoint to load, or None to start a new run.

    A new run starts if `--load` is not given, or if `--load` and `--save` are the same folder and
    it contains no checkpoint.

    Raises:
        UserError: if `--load` is any other folder without a complete checkpoint of the requested
            iteration.
    """
    if args.load is None:
        return None
    iteration = args.ckpt_step if args.ckpt_step is not None else latest_iteration(args.load)
    there = iterations_in(args.load)
    if iteration is None:
        if resumes_in_place(args) and not there:
            start = "scratch" if args.load_hf is None else f"--load-hf {args.load_hf}"
            print_rank_0(f"> no checkpoint in {args.load} yet: starting from {start}")
            return None
        if there:
            raise UserError(
                f"--load {args.load} has no {TRACKER}; name one of its checkpoints with "
                f"--ckpt-step ({', '.join(map(str, there))})"
            )
        raise UserError(
            f"--load {args.load} holds no checkpoint; name the folder that holds {TRACKER}, or "
            "leave --load out to start from scratch"
        )
    folder = checkpoint_folder(args.load, iteration)
    if problem := _problem_in(folder):
        others = [str(number) for number in there if number != iteration]
        advice = "name another --load"
        if others:
            advice = f"give --ckpt-step with one of {', '.join(others)}"
        raise UserError(f"{folder} is not a complete torch_dist checkpoint: {problem}; {advice}")
    return folder


def _problem_in(folder: Path) -> str | None:
    """Return why a folder is not a complete checkpoint, or None if it is one."""
    try:
        refuse_special_files(folder)
        for name in (COMMON, INDEX):
            check_regular(folder / name)
        content = read_json(folder / "metadata.json")
    except OSError as error:
        return f"{printable(error.filename or folder, limit=1000)}: {error.strerror}"
    except UnusableFileError as error:
        return str(error)
    is_object = isinstance(content, dict)
    if not is_object or "sharded_backend" not in content or FORMAT | content != FORMAT:
        return f"{folder / 'metadata.json'} describes a different format"
    return None
