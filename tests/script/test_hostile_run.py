"""Test hostile files in the folder of a collection: special files and forged texts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from index_follower import IndexFollower, Tally
from megatron.tensor_record import LINE_LIMIT
from tests.script.watching import collect

EVIL = "x\n[ERROR] forged\x1b[2J\u202e"
SPECIAL = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "deep JSON": lambda path: path.write_text("[" * 100_000),
    "number": lambda path: path.write_text("7"),
    "large": lambda path: path.write_bytes(b" " * (17 << 20)),
}
LINE = {
    "run_id": "r",
    "iteration": 1,
    "layer_idx": 0,
    "phase": "pre",
    "operation": "forward",
    "component": "linear",
    "rank": {"world": 0},
    "bytes": 10,
}


def follower(folder, *, card=True):
    """Return a follower of one run that has written its run card."""
    made = IndexFollower(folder, "token")
    if card:
        text = json.dumps({"environment": {"TENSOR_SAVE_LAUNCH": "token"}})
        (folder / "run_r.json").write_text(text)
    return made


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_card_that_cannot_be_read_is_named_once(tmp_path, kind):
    made = follower(tmp_path, card=False)
    SPECIAL[kind](tmp_path / "run_r.json")
    (tmp_path / "index_r_rank00.jsonl").write_text(json.dumps(LINE) + "\n")
    began = time.monotonic()
    for _ in range(3):
        assert made.poll() == 0
    assert time.monotonic() - began < 10
    [problem] = made.problems
    assert problem.startswith(f"{tmp_path / 'run_r.json'}: ")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_an_index_that_cannot_be_read_is_named_once(tmp_path, kind):
    made = follower(tmp_path)
    SPECIAL[kind](tmp_path / "index_r_rank00.jsonl")
    (tmp_path / "index_r_rank01.jsonl").write_text(json.dumps(LINE) + "\n")
    assert made.poll() == 1
    assert made.poll(last=True) == 0
    [problem] = made.problems
    assert problem.startswith(f"{tmp_path / 'index_r_rank00.jsonl'}: ")
    assert "not a regular file" in problem


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b"7",
        b"[1]",
        b'"text"',
        b"{}\xff",
        b"x" * (2 * LINE_LIMIT),
        json.dumps(LINE | {"bytes": "9" * 5000}).encode(),
        json.dumps(LINE).replace("10", "9" * 5000).encode(),
        json.dumps(LINE | {"layer_idx": "one"}).encode(),
        json.dumps(LINE | {"layer_idx": [1]}).encode(),
        json.dumps(LINE | {"iteration": float("inf")}).encode(),
        json.dumps(LINE | {"rank": [1]}).encode(),
        json.dumps(LINE | {"rank": {"world": 1 << 70}}).encode(),
        json.dumps({"event": "dropped", "tensors": "many"}).encode(),
    ],
    ids=range(14),
)
def test_a_line_that_is_no_record_is_skipped(tmp_path, line):
    made = follower(tmp_path)
    good = json.dumps(LINE).encode()
    (tmp_path / "index_r_rank00.jsonl").write_bytes(b"\n".join([good, line, good, line[:99]]))
    assert made.poll() == 2
    assert made.poll() == 0
    tally = made.tally
    assert (tally.tensors, tally.bytes, tally.dropped) == (2, 20, 0)
    assert tally.iterations == {1}
    assert dict(tally.counts["layer_idx"]) == {0: 2}


def test_texts_of_an_index_are_safe_to_print():
    tally = Tally()
    tally.add(LINE | {"run_id": EVIL, "phase": EVIL})
    for event in ("limited", "kept", "let_go"):
        tally.add({"event": event, "why": EVIL * 1000})
    texts = [*tally.runs, *tally.counts["phase"], *tally.limits, *tally.kept, *tally.let_go]
    assert len(texts) == 5
    assert all(text.isprintable() and len(text) < 5000 for text in texts)


@pytest.mark.parametrize("options", [(), ("--verbose",)], ids=["quiet", "verbose"])
def test_the_log_and_the_index_forge_no_line(tmp_path, options):
    """The command prints and records texts that imitate errors or control the terminal."""
    done = collect(tmp_path, "forge", *options)
    assert done.returncode == 1
    told = done.stdout + done.stderr
    assert "forged" in told
    assert all(letter.isprintable() or letter == "\n" for letter in told)
    lines = [line.lstrip() for line in told.splitlines()]
    assert not [line for line in lines if line.startswith("[ERROR] forged")]


def test_a_pipe_as_run_card_does_not_hold_up_the_collection(tmp_path):
    done = collect(tmp_path, "pipe")
    assert done.returncode == 1
    assert "a named pipe (FIFO), not a regular file; tensors of this run are not counted" in (
        done.stderr
    )
