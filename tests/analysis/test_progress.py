"""Tests of the progress of long commands: lines in a log, a bar on a terminal."""

from __future__ import annotations

import re
import sys
import threading
import time

import pytest

from megatron.analysis import progress
from megatron.analysis.__main__ import main
from megatron.analysis.progress import Progress, with_progress
from tests.analysis.fake_dump import write_dump


class Clock:
    """Stand-in for the module `time`; a test moves it forward."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_log_gets_a_line_every_few_seconds(clock, capsys):
    for _ in with_progress(range(10), "Reading", "tensor"):
        clock.now += 4
    assert capsys.readouterr().err.splitlines() == [
        "[PROGRESS] Reading: 3 of 10 tensors, 4 s per tensor, about 28 s left",
        "[PROGRESS] Reading: 6 of 10 tensors, 4 s per tensor, about 16 s left",
        "[PROGRESS] Reading: 9 of 10 tensors, 4 s per tensor, about 4 s left",
    ]


def test_the_estimate_leaves_out_the_first_unit_which_may_compile(clock, capsys):
    with Progress(100, "Reading", "tensor", thread=False) as bar:
        clock.now += 60
        for _ in range(8):  # a batch
            bar.update()
            clock.now += 0.01
        for _ in range(12):
            clock.now += 1
            bar.update()
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "[PROGRESS] Reading: 1 of 100 tensors after 60 s"
    assert others == ["[PROGRESS] Reading: 18 of 100 tensors, 1.01 s per tensor, about 83 s left"]


def test_a_long_unit_does_not_leave_the_log_silent(clock, monkeypatch, capsys):
    with Progress(2, "Drawing", "output", thread=False) as bar:
        for _ in range(12):
            clock.now += 5
            bar.tick()
        bar.update(2)
        clock.now += 60
        bar.tick()  # nothing is left
    assert capsys.readouterr().err.splitlines() == [
        "[PROGRESS] Drawing: 0 of 2 outputs after 25 s",
        "[PROGRESS] Drawing: 0 of 2 outputs after 50 s",
    ]
    monkeypatch.setattr(progress, "QUIET", 0.01)
    with Progress(2, "Drawing", "output") as bar:
        clock.now += 1
        deadline = time.monotonic() + 20
        while "0 of 2" not in capsys.readouterr().err:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not any(thread.name.endswith("(_tick)") for thread in threading.enumerate())


def test_fast_work_has_a_rate_and_short_or_hidden_work_no_line(clock, capsys):
    with Progress(1000, "Reading", "tensor") as bar:
        clock.now += 20
        bar.update(500)
    with Progress(1000, "Reading", "tensor", shown=False) as bar:
        clock.now += 20
        bar.update(500)
    with Progress(2, "Reading", "tensor") as bar:
        bar.update()
        clock.now += 20
        bar.update()  # the last unit needs no line
    line = "[PROGRESS] Reading: 500 of 1000 tensors, 25 per second, about 20 s left\n"
    assert capsys.readouterr().err == line


def test_a_terminal_gets_a_bar(clock, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(with_progress([7, 8], "Reading", "tensor")) == [7, 8]
    said = capsys.readouterr().err
    assert "PROGRESS" not in said
    assert re.search(r"Reading: .*\| 0/2", said)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["stats", "--formats", "mxfp8", "--cache", "none"], ["Measuring"]),
        (["verify"], ["Verifying"]),
        (["study", "--formats", "mxfp8"], ["Studying"]),
        (["draw", "--figures", "heatmaps", "comparisons", "statistics"], ["Measuring", "Drawing"]),
        (["quick"], ["Reading"]),
    ],
)
def test_every_long_command_reports_its_progress(tmp_path, monkeypatch, capsys, command, words):
    write_dump(tmp_path / "logs", layers=1)
    monkeypatch.setattr(progress, "PERIOD", 0.0)
    name, *options = command
    if name in ("draw", "quick", "study"):
        options += ["--output-dir", str(tmp_path / "out")]
    main([name, str(tmp_path / "logs"), *options])
    said = capsys.readouterr().err
    for word in words:
        assert re.search(rf"\[PROGRESS\] {word}: \d+ of \d+ ", said)


def test_an_option_of_another_command_is_named_as_such(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["study", str(tmp_path), "--figures", "heatmaps"])
    assert "(--figures is an option of another command)" in capsys.readouterr().err
