"""Hostile indexes and run cards for tests, each beside a good tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Change = Callable[[dict[str, Any]], Iterator[bytes]]


def _changed(**changes: Any) -> Change:
    """Return a function that replaces some fields of a good line."""
    return lambda line: iter([json.dumps(line | changes).encode() + b"\n"])


def _replaced(old: str, new: str) -> Change:
    """Return a function that replaces a piece of text in a good line."""

    def write(line: dict[str, Any]) -> Iterator[bytes]:
        text = json.dumps(line)
        assert old in text
        yield text.replace(old, new, 1).encode("utf-8", "surrogateescape") + b"\n"

    return write


def _rank(**changes: Any) -> Change:
    return lambda line: _changed(rank=line["rank"] | changes)(line)


def _bytes(content: bytes, times: int = 1) -> Change:
    """Return a function that inserts `content`, `times` times, before a good line."""

    def write(line: dict[str, Any]) -> Iterator[bytes]:
        block = max(1, min(times, (1 << 20) // len(content)))
        for _ in range(times // block):
            yield content * block
        yield json.dumps(line).encode() + b"\n"

    return write


#: Functions that make the only line of an index hostile, and the message of a reader, by name.
INDEXES: dict[str, tuple[Change, str]] = {
    "out by dots": (_changed(file="../../../../../etc/passwd"), "plain file name"),
    "absolute": (_changed(file="/etc/passwd"), "plain file name"),
    "dots": (_changed(file=".."), "plain file name"),
    "null byte in file": (_changed(file="a\0.pt"), "plain file name"),
    "no tensor file": (_changed(file="passwd"), "plain file name"),
    "file of a million letters": (_changed(file="f" * 1_000_000 + ".pt"), "too long"),
    "lone surrogate": (_changed(module="decoder.\ud800.linear_qkv"), "surrogate"),
    "lone surrogate in file": (_changed(file="\ud800.pt"), "plain file name|surrogate"),
    "not UTF-8": (_replaced('"module": "', '"module": "\udcff\udc80'), "utf-8|UTF-8|JSON"),
    "deep nesting": (_replaced('"slice": null', '"slice": ' + "[" * 90_000), "nested|JSON"),
    "deep nesting, closed": (
        _replaced('"slice": null', '"slice": ' + "[" * 500 + "]" * 500),
        "slice|nested",
    ),
    "duplicate key": (_replaced('{"run_id"', '{"layer_idx": 7, "run_id"'), "twice"),
    "NaN": (_changed(wall_time=float("nan")), "wall_time is nan"),
    "Infinity": (_changed(iteration=float("inf")), "iteration is inf"),
    "number of 5000 digits": (
        _replaced('"counter": 1,', f'"counter": {"9" * 5000},'),
        "4300",
    ),
    "number beyond 64 bits": (_changed(counter=1 << 70), "64 bits"),
    "negative counter": (_changed(counter=-5), "counter is -5"),
    "negative iteration": (_changed(iteration=-1), "iteration is -1"),
    "negative layer": (_changed(layer_idx=-2), "layer_idx is -2"),
    "negative bytes": (_changed(bytes=-1), "bytes is -1"),
    "boolean iteration": (_changed(iteration=True), "iteration is True"),
    "boolean rank": (_rank(world=True), "world is True"),
    "negative rank": (_rank(tp=-1), "tp is -1"),
    "no ranks": (_rank(world_size=0), "world_size is 0"),
    "rank beyond its group": (_rank(world=5, world_size=2), "world is 5"),
    "negative shape": (_changed(shape=[-1, 4]), "shape"),
    "boolean shape": (_changed(shape=[True, 4]), "shape"),
    "shape of a million axes": (_changed(shape=[1] * 300_000), "shape|too long"),
    "slice of no numbers": (_changed(slice={"of": "a", "start": None, "step": 3}), "slice"),
    "slice with no step": (_changed(slice={"of": [4], "start": [0], "step": [0]}), "slice"),
    "codes of nothing": (_changed(codes={"shape": -1, "axis": "x"}), "codes"),
    "an amax below zero": (_changed(amax={"linear_fprop_a": -1.0}), "amax has -1.0"),
    "an amax of 5000 bits": (_changed(amax={"linear_fprop_a": 1 << 5000}), "amax has 1"),
    "an amax that is a list": (_changed(amax={"linear_fprop_a": [1]}), "amax has a list"),
    "dims of a million letters": (_changed(dims="a " * 400_000), "characters|too long"),
    "module of 60,000 letters": (_changed(module="m" * 60_000), "characters"),
    "a list": (_bytes(b"[1, 2]\n"), "JSON list"),
    "null bytes": (_bytes(b"\0" * 4000 + b"\n"), "JSON"),
    "line of 100 MB": (_bytes(b" " * (1 << 20), 100), "too long"),
    "line of 100 MB without an end": (_bytes(b'{"a": "' + b"x" * (1 << 20), 100), "too long"),
    "10 million lines": (_bytes(b"{}\n", 10_000_000), "lines"),
    "10 million blank lines": (_bytes(b"\n", 10_000_000), "lines|JSON"),
    "10 million events": (_bytes(b'{"event":1}\n', 10_000_000), "events|lines"),
    "10 million records": (_bytes(b'{"file":"a.pt"}\n', 10_000_000), "lines"),
}

Write = Callable[[Path, dict[str, Any]], object]


def _card(**changes: Any) -> Write:
    return lambda path, card: path.write_text(json.dumps(card | changes))


def _text(content: str | bytes) -> Write:
    raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return lambda path, card: path.write_bytes(raw)


def _sparse(size: int) -> Write:
    """Return a function that writes a file of zeros, which takes no space on the disk."""

    def write(path: Path, card: dict[str, Any]) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return write


def _instead(make: Callable[[Path], object]) -> Write:
    return lambda path, card: make(path)


#: Functions that write a hostile run card, and the message of a reader, by name.
CARDS: dict[str, tuple[Write, str]] = {
    "cut short": (_text('{"run_id": "r", '), "JSON"),
    "a number": (_text("7"), "not a run card: it holds a JSON int"),
    "not UTF-8": (_text(b'{"a": "\xff\xfe"}'), "UTF-8"),
    "deep nesting": (_text('{"a": ' + "[" * 200_000), "nested"),
    "nested 200 levels": (_text('{"a": ' + "[" * 200 + "]" * 200 + "}"), "nested"),
    "duplicate key": (_text('{"status": "finished", "status": "killed"}'), "twice"),
    "NaN": (_text('{"iterations": NaN}'), "iterations has type float, not int"),
    "number of 5000 digits": (_text('{"iterations": ' + "9" * 5000 + "}"), "JSON"),
    "lone surrogate": (_text('{"status": "\\ud800"}'), "surrogate"),
    "100 GB": (_sparse(100 << 30), "larger than"),
    "status is a list": (_card(status=["finished"]), "status"),
    "iterations are text": (_card(iterations="ten"), "iterations"),
    "arguments are a list": (_card(arguments=[1]), "arguments"),
    "ranks are numbers": (_card(ranks=[1, 2]), "ranks"),
    "audit of numbers": (_card(quantization=[3]), "quantization"),
    "pipe": (_instead(os.mkfifo), "FIFO"),
    "link to /dev/zero": (_instead(lambda p: p.symlink_to("/dev/zero")), "device"),
    "link to nothing": (_instead(lambda p: p.symlink_to("nothing")), "No such file|not there"),
    "folder": (_instead(Path.mkdir), "folder"),
}

#: Functions that put something else in the place of an index, and a reader's message, by name.
INDEX_PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "FIFO"),
    "link to /dev/zero": (lambda p: p.symlink_to("/dev/zero"), "device"),
    "link to itself": (lambda p: p.symlink_to(p.name), "symbolic links"),
    "folder": (Path.mkdir, "folder"),
}
