"""The output of a preprocessing run while it is made, and how an interrupted run goes on.

Beside the output there is a folder `<output-prefix>.partial`:

    <key>.bin         token ids, one document after another
    <key>.lengths     tokens of each document (int32)
    bad_lines.txt     what was left out: file:line: reason
    progress.json     how long each of these was, and where the input was read from next
    lock              held by the process that writes

Twice a minute, and when a run stops for any reason, the files are flushed to the disk and then
`progress.json` is replaced in one step. A run that starts cuts the files to the lengths there and
reads on, so what it writes is what one run would have written. At the end the index is made and the
files are moved to their names, the index last.

megatron-core's IndexedDatasetBuilder writes the same bytes, which a test holds; but it keeps a
hundred bytes of every document in memory, and what it wrote cannot be continued.
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
STATE_LIMIT = 256 << 20  # largest progress.json in bytes; it lists every input file
HOPELESS = 1000  # bad documents of a file that has not a single good one


def _is_at(file: TextIO, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


class DamagedStateError(ValueError):
    """The state of an interrupted run that no run can go on from."""


class PartialOutput:
    """The files of a run, written in the order of the input. Use it as a context manager."""

    def __init__(self, settings: Settings, tokenizer: dict[str, Any], dtype: type) -> None:
        import numpy as np

        self.settings, self.dtype = settings, np.dtype(dtype)
        self.folder = Path(f"{settings.output_prefix}.partial")
        # What the output depends on beside the input.
        self.options = {
            "tokenizer": tokenizer,
            "json_keys": list(settings.json_keys),
            "input_format": settings.input_format,
            "document_separator": settings.document_separator,
            "wikipedia": settings.wikipedia,
            "append_eod": settings.append_eod,
            "strict": settings.strict,
        }
        # How far it is, and how far it was when it began the file that is read. They change in one
        # assignment: an interrupt that comes within `add` must find both as they were.
        self.marks = (ResumePoint(counts={key: Count() for key in settings.json_keys}),) * 2
        self.inputs: list[list[Any]] = []  # identities, up to the file that is read
        self.resumed = False
        self.complete = False  # all is read; the files are being moved to their names
        self.files: dict[str, BinaryIO] = {}

    @property
    def mark(self) -> ResumePoint:
        """How far the run is. It is never changed, but replaced."""
        return self.marks[0]

    def __enter__(self) -> PartialOutput:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(self.lock, self.folder / "lock"):  # it was published, folder and all
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
                self.settings.check_free()  # again: another run may have published since
                self._open()
        except BaseException:
            if not (self.folder / "progress.json").exists():
                shutil.rmtree(self.folder, ignore_errors=True)
            self._close()
            raise
        self.committed = time.monotonic()
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Keep what is there for a later run; nothing, where there is nothing."""
        try:
            if self.complete:
                return
            if any(count.documents for count in self.mark.counts.values()):
                self.commit()
            else:
                shutil.rmtree(self.folder, ignore_errors=True)
        except OSError:
            if kind is None:
                raise  # else the reason for leaving counts: most likely the same full disk
        finally:
            self._close()

    def _open(self) -> None:
        sizes = self._sizes(self.mark)
        for name, size in sizes.items():
            file = self.files[name] = (self.folder / name).open("ab")
            if file.tell() < size:
                raise DamagedStateError(
                    f"{self.folder / name} is shorter than progress.json says; delete the folder "
                    f"{self.folder} to start anew"
                )
        if self.resumed:
            self.commit()  # before the cut, which may go back to the start of a file
        for name, size in sizes.items():
            self.files[name].truncate(size)

    def _close(self) -> None:
        for file in (*self.files.values(), self.lock):
            try:
                file.close()
            except OSError:  # a full disk: what was not committed is written again
                continue
        self.files = {}

    def _sizes(self, mark: ResumePoint) -> dict[str, int]:
        sizes = {"bad_lines.txt": mark.bad_bytes}
        for key, count in mark.counts.items():
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
                "anew"
            )
        else:
            now, start = (
                ResumePoint.from_json(state["mark"]),
                ResumePoint.from_json(state["file_start"]),
            )
            inputs, files = state["inputs"], self.settings.input
            # A partly read file may have been repaired since; it is then read again from its start.
            same = now.file >= len(inputs) or (
                now.file < len(files) and identity(files[now.file]) == inputs[now.file]
            )
            self.marks = (now if same else start), start
            self.inputs = inputs[: now.file]
            self.resumed, self.complete = True, state["complete"]

    def _read_state(self, path: Path) -> dict[str, Any]:
        """Return the content of progress.json.

        Raises:
            ValueError: if a run would not write such content.
        """
        from megatron.bounded_files import read_json

        try:
            state = read_json(path, limit=STATE_LIMIT)
            for name in ("mark", "file_start"):
                ResumePoint.from_json(copy.deepcopy(state[name]))
            known = [[str(name), int(size), int(time)] for name, size, time in state["inputs"]]
            if known != state["inputs"] or not self.options.keys() <= state["options"].keys():
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
        for path, known in zip(self.settings.input, done, strict=False):
            if identity(path) != known:
                return f"the input {path} has changed since, or {known[0]} was read in its place"
        if state["complete"] and len(done) < len(self.settings.input):
            return f"it was complete without {self.settings.input[len(done)]}"
        if len(done) > len(self.settings.input):
            return f"with more input ({done[len(self.settings.input)][0]})"
        return ""

    def begin_file(self, number: int) -> None:
        """Note the file as it is when it is opened."""
        if len(self.inputs) <= number:
            self.inputs.append(identity(self.settings.input[number]))

    def add(self, tokens: Tokens) -> None:
        """Write a batch.

        Raises:
            ValueError: nothing in this file can be used.
        """
        path = self.settings.input[tokens.file]
        mark, start = self.mark.copy(), self.marks[1]
        for key in mark.counts:
            self.files[f"{key}.bin"].write(tokens.ids[key].data)
            self.files[f"{key}.lengths"].write(tokens.lengths[key].data)
        lines = "".join(f"{path}:{line}: {why}\n" for line, why in tokens.bad)
        said = lines.encode(errors="backslashreplace")  # a file's name may be invalid UTF-8
        self.files["bad_lines.txt"].write(said)
        for key, count in mark.counts.items():
            count.documents += len(tokens.lengths[key])
            count.tokens += len(tokens.ids[key])
            count.text_bytes += tokens.text_bytes[key]
        mark.bad_lines += len(tokens.bad)
        mark.bad_bytes += len(said)
        mark.file_read += tokens.read
        mark.file_bad += len(tokens.bad)
        mark.position = tokens.end
        self._check_use(path, mark, last=tokens.last)
        if tokens.last:
            mark.file, mark.position = tokens.file + 1, Position()
            mark.file_read = mark.file_bad = 0
            start = mark
        self.marks = mark, start
        if time.monotonic() - self.committed >= COMMIT_SECONDS:
            self.commit()

    def _check_use(self, path: Path, mark: ResumePoint, *, last: bool) -> None:
        if mark.file_read or not (last or mark.file_bad >= HOPELESS):
            return
        start = self.marks[1]
        self.marks = start, start  # so that a repaired file is read from its start
        if not mark.file_bad:
            raise ValueError(f"{path} holds no document; leave it out, or get it again")
        with (self.folder / "bad_lines.txt").open("rb") as file:
            self.files["bad_lines.txt"].flush()
            file.seek(start.bad_bytes)
            first = file.readline().decode().strip()
        raise ValueError(
            f"none of the first {mark.file_bad} documents of {path} can be used; {first}"
        )

    def commit(self) -> None:
        """Make what was added survive anything that happens from now on."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        state = {
            "options": self.options,
            "mark": asdict(self.marks[0]),
            "file_start": asdict(self.marks[1]),
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
        """Give the files their names, the index last, and forget the folder.

        Interrupted at any point, the same command does the rest.
        """
        if not self.complete:
            self.settings.check_free()
            for file in self.files.values():
                file.flush()
            for key, manifest in manifests.items():
                write_index(
                    self.folder / f"{key}.idx",
                    self.folder / f"{key}.lengths",
                    documents=self.mark.counts[key].documents,
                    dtype=self.dtype.type,
                )
                (self.folder / f"{key}.json").write_text(manifest)
            self.complete = True
            self.commit()
        for key in self.mark.counts:
            prefix = self.settings.prefix(key)
            if (self.folder / f"{key}.idx").exists():
                Path(f"{prefix}.idx").unlink(missing_ok=True)  # never an old one beside new tokens
            for suffix in (".json", ".bin", ".idx"):
                if (source := self.folder / f"{key}{suffix}").exists():
                    source.replace(f"{prefix}{suffix}")
        report, bad_lines = self.report, self.folder / "bad_lines.txt"
        if self.mark.bad_lines and bad_lines.exists():
            bad_lines.replace(report)
        elif not self.mark.bad_lines:
            report.unlink(missing_ok=True)  # of an earlier run
        shutil.rmtree(self.folder)
        self._close()

    @property
    def report(self) -> Path:
        """The lines that were left out, where there are any."""
        return Path(f"{self.settings.output_prefix}_bad_lines.txt")
