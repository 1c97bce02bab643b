"""Write the output of a preprocessing run so that an interrupted run can be resumed.

Until it is complete, the output is in the folder `<output-prefix>.partial`:

    <key>.bin         token ids of all documents, concatenated
    <key>.lengths     number of tokens of each document (int32)
    bad_lines.txt     skipped documents: file:line: reason
    progress.json     sizes of these files at the last commit, and the position in the input
    lock              file that the writing process locks

Twice a minute, and when a run stops for any reason, the files are flushed to disk and then
`progress.json` is replaced atomically. A resumed run truncates the files to the recorded sizes and
continues reading, so its output is the same as without the interruption. At the end, the run writes
the index and moves the files to their final names, the index last.

megatron-core's IndexedDatasetBuilder writes the same bytes, which a test checks. It is not used
here because it needs a hundred bytes of memory per document and cannot resume.
"""

from __future__ import annotations

import copy
import fcntl
import json
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from batch import Position
from documents import Settings, Tokens
from index_file import LENGTH_BYTES, write_index
from resume_point import Count, ResumePoint, identity

COMMIT_SECONDS = 30.0
STATE_LIMIT = 256 << 20  #: maximum size in bytes of progress.json, which lists all input files
#: Number of bad documents, with no valid one before them, after which an input file is refused.
HOPELESS = 1000


def _is_at(file: TextIO, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


class DamagedStateError(ValueError):
    """Error raised if an interrupted run cannot be resumed because its saved state is damaged."""


class PartialOutput:
    """Context manager for a run's unfinished output, which is written in the order of the input."""

    def __init__(self, settings: Settings, tokenizer: dict[str, Any], dtype: type) -> None:
        import numpy as np

        self.settings, self.dtype = settings, np.dtype(dtype)
        self.folder = Path(f"{settings.output_prefix}.partial")
        # Settings that affect the output; a resumed run must have the same values.
        self.options = {
            "tokenizer": tokenizer,
            "json_keys": list(settings.json_keys),
            "input_format": settings.input_format,
            "document_separator": settings.document_separator,
            "wikipedia": settings.wikipedia,
            "append_eod": settings.append_eod,
            "strict": settings.strict,
        }
        # The current resume point, and the one at the start of the current input file. A single
        # assignment replaces both, so that an interrupt during `add` cannot leave only one updated.
        self.points = (ResumePoint(counts={key: Count() for key in settings.json_keys}),) * 2
        # identity of each input file so far, as the function `identity` returns it
        self.inputs: list[list[Any]] = []
        self.resumed = False
        self.complete = False  # True if the output is ready to be published
        self.files: dict[str, BinaryIO] = {}

    @property
    def point(self) -> ResumePoint:
        """Current resume point, an object that is replaced but never modified."""
        return self.points[0]

    def __enter__(self) -> PartialOutput:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another run may have removed the folder (see `publish`) before this run took the lock.
            if not _is_at(self.lock, self.folder / "lock"):
                raise BlockingIOError
        except BlockingIOError as error:
            self.lock.close()
            raise ValueError(
                f"another process is writing {self.settings.output_prefix}; wait for it, or give "
                "another --output-prefix"
            ) from error
        try:
            self._resume()
            if not self.complete:
                # Another run may have published its output under the same prefix.
                self.settings.check_free()
                self._open()
        except BaseException:
            if not (self.folder / "progress.json").exists():
                shutil.rmtree(self.folder, ignore_errors=True)
            self._close()
            raise
        self.committed = time.monotonic()
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Commit unfinished output for a later run; if it has no documents, remove its folder."""
        try:
            if self.complete:
                return
            if any(count.documents for count in self.point.counts.values()):
                self.commit()
            else:
                shutil.rmtree(self.folder, ignore_errors=True)
        except OSError:
            if kind is None:
                # An error of the `with` block is raised alone, because this one probably has the
                # same cause.
                raise
        finally:
            self._close()

    def _open(self) -> None:
        sizes = self._sizes(self.point)
        for name, size in sizes.items():
            file = self.files[name] = (self.folder / name).open("ab")
            if file.tell() < size:
                raise DamagedStateError(
                    f"{self.folder / name} is shorter than progress.json states; delete the folder "
                    f"{self.folder} to start over"
                )
        if self.resumed:
            # Save the resume point before truncating: it may be earlier than the saved one, and the
            # output files must not be shorter than the saved one states.
            self.commit()
        for name, size in sizes.items():
            self.files[name].truncate(size)

    def _close(self) -> None:
        for file in (*self.files.values(), self.lock):
            try:
                file.close()
            except OSError:  # full disk; a resumed run writes the lost data again
                continue
        self.files = {}

    def _sizes(self, point: ResumePoint) -> dict[str, int]:
        sizes = {"bad_lines.txt": point.bad_bytes}
        for key, count in point.counts.items():
            sizes[f"{key}.bin"] = count.tokens * self.dtype.itemsize
            sizes[f"{key}.lengths"] = count.documents * LENGTH_BYTES
        return sizes

    def _resume(self) -> None:
        path = self.folder / "progress.json"
        if not path.is_file():
            return
        state = self._read_state(path)
        problem = self._differs(state)
        if problem and self.settings.overwrite:
            path.unlink()
        elif problem:
            raise ValueError(
                f"{self.folder} holds an interrupted run, but {problem}; give --overwrite to start "
                "over"
            )
        else:
            now, start = (
                ResumePoint.from_json(state["mark"]),
                ResumePoint.from_json(state["file_start"]),
            )
            inputs, files = state["inputs"], self.settings.input
            # If a partly read input file has changed, perhaps because it was repaired, read it from
            # its start.
            same = now.file >= len(inputs) or (
                now.file < len(files) and identity(files[now.file]) == inputs[now.file]
            )
            self.points = (now if same else start), start
            self.inputs = inputs[: now.file]
            self.resumed, self.complete = True, state["complete"]

    def _read_state(self, path: Path) -> dict[str, Any]:
        """Return the content of `path`, the file progress.json.

        Raises:
            DamagedStateError: if the file is damaged, or was not written by this program.
        """
        from megatron.bounded_files import read_json

        try:
            state = read_json(path, limit=STATE_LIMIT)
            for name in ("mark", "file_start"):
                ResumePoint.from_json(copy.deepcopy(state[name]))
            inputs = [[str(name), int(size), int(time)] for name, size, time in state["inputs"]]
            if inputs != state["inputs"] or not self.options.keys() <= state["options"].keys():
                raise ValueError("unexpected fields or values")
            bool(state["complete"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedStateError(
                f"{path} is damaged or not written by this program ({error}); delete the folder "
                f"{self.folder} to start over"
            ) from error
        return state

    def _differs(self, state: dict[str, Any]) -> str:
        for name, value in self.options.items():
            if state["options"][name] != value:
                return f"with another {name.replace('_', ' ')}"
        done = state["inputs"][: state["mark"]["file"]]
        for path, recorded in zip(self.settings.input, done, strict=False):
            if identity(path) != recorded:
                return f"the input {path} has changed since, or {recorded[0]} was read in its place"
        if state["complete"] and len(done) < len(self.settings.input):
            return f"it was complete without {self.settings.input[len(done)]}"
        if len(done) > len(self.settings.input):
            return f"with more input ({done[len(self.settings.input)][0]})"
        return ""

    def begin_file(self, number: int) -> None:
        """Record the name, size and modification time of an input file when it is opened."""
        if len(self.inputs) <= number:
            self.inputs.append(identity(self.settings.input[number]))

    def add(self, tokens: Tokens) -> None:
        """Append a batch's tokens to the output; commit if the last commit is `COMMIT_SECONDS` old.

        Raises:
            ValueError: if the input file has no valid document; see `_check_use`.
        """
        path = self.settings.input[tokens.file]
        point, start = self.point.copy(), self.points[1]
        for key in point.counts:
            self.files[f"{key}.bin"].write(tokens.ids[key].data)
            self.files[f"{key}.lengths"].write(tokens.lengths[key].data)
        lines = "".join(f"{path}:{line}: {why}\n" for line, why in tokens.bad)
        report = lines.encode(errors="backslashreplace")  # A path may be invalid UTF-8.
        self.files["bad_lines.txt"].write(report)
        for key, count in point.counts.items():
            count.documents += len(tokens.lengths[key])
            count.tokens += len(tokens.ids[key])
            count.text_bytes += tokens.text_bytes[key]
            count.empty += tokens.read - len(tokens.lengths[key])
        point.bad_lines += len(tokens.bad)
        point.bad_bytes += len(report)
        point.file_read += tokens.read
        point.file_bad += len(tokens.bad)
        point.position = tokens.end
        self._check_use(path, point, last=tokens.last)
        if tokens.last:
            point.file, point.position = tokens.file + 1, Position()
            point.file_read = point.file_bad = 0
            start = point
        self.points = point, start
        if time.monotonic() - self.committed >= COMMIT_SECONDS:
            self.commit()

    def _check_use(self, path: Path, point: ResumePoint, *, last: bool) -> None:
        """Raise ValueError if the first `HOPELESS` documents of an input file are all invalid.

        Raises:
            ValueError: also if a file with fewer documents has no valid one.
        """
        if point.file_read or not (last or point.file_bad >= HOPELESS):
            return
        start = self.points[1]
        self.points = start, start  # A repaired file is then read from its start.
        if not point.file_bad:
            raise ValueError(f"{path} holds no document; leave it out, or get it again")
        with (self.folder / "bad_lines.txt").open("rb") as file:
            self.files["bad_lines.txt"].flush()
            file.seek(start.bad_bytes)
            first = file.readline().decode().strip()
        raise ValueError(
            f"none of the first {point.file_bad} documents of {path} can be used; {first}"
        )

    def commit(self) -> None:
        """Flush the output files and the resume point to disk, so that they survive a crash."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        state = {
            "options": self.options,
            "mark": asdict(self.points[0]),
            "file_start": asdict(self.points[1]),
            "inputs": self.inputs,
            "complete": self.complete,
        }
        path = self.folder / "progress.json"
        partial = path.with_suffix(".new")
        with partial.open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        self.committed = time.monotonic()

    def publish(self, manifests: dict[str, str]) -> None:
        """Move the output files to their final names, the index last, and remove their folder.

        If this is interrupted at any point, running the same command again completes the move.
        """
        if not self.complete:
            self.settings.check_free()
            for file in self.files.values():
                file.flush()
            for key, manifest in manifests.items():
                write_index(
                    self.folder / f"{key}.idx",
                    self.folder / f"{key}.lengths",
                    documents=self.point.counts[key].documents,
                    dtype=self.dtype.type,
                )
                (self.folder / f"{key}.json").write_text(manifest)
            self.complete = True
            self.commit()
        for key in self.point.counts:
            prefix = self.settings.prefix(key)
            if (self.folder / f"{key}.idx").exists():
                # An old index must never exist next to new tokens.
                Path(f"{prefix}.idx").unlink(missing_ok=True)
            for suffix in (".json", ".bin", ".idx"):
                if (source := self.folder / f"{key}{suffix}").exists():
                    source.replace(f"{prefix}{suffix}")
        report, bad_lines = self.report, self.folder / "bad_lines.txt"
        if self.point.bad_lines and bad_lines.exists():
            bad_lines.replace(report)
        elif not self.point.bad_lines:
            report.unlink(missing_ok=True)  # the report of an earlier run
        shutil.rmtree(self.folder)
        self._close()

    @property
    def report(self) -> Path:
        """Path of the file that lists the skipped lines."""
        return Path(f"{self.settings.output_prefix}_bad_lines.txt")
