"""Test which finished runs of script/study.py are reused, with made-up logs and files."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from configs.lookup import ConfigError
from loss_gaps import held_out
from loss_gaps.configurations import BASELINE, Configuration
from loss_gaps.offline import check_dump, study_dump
from loss_gaps.run_heads import CAUSES, changed, checkpoint_files, files_in, head_of, state_of
from loss_gaps.run_log import FAILED, ending
from loss_gaps.trainings import Trainings, tokenized
from megatron.training.data.indexed_data import LENGTH
from tests.analysis.fake_dump import write_dump
from tests.script.study_logs import LOG

LOAD = ["--load", "start/checkpoint", "--finetune"]
OLD = f"pretrain_gpt.py --lr 1 {' '.join(LOAD)} # recipe 0123\n"


class Programs:
    """Launcher that starts nothing: it writes logs, and counts them by name."""

    def __init__(self):
        self.started, self.loss, self.status = [], "7.375000E+00", 0

    def train(self, arguments, log, head):
        self.started.append(log.stem)
        log.parent.mkdir(parents=True, exist_ok=True)
        text = LOG.format(head=head, end=ending(self.status, 1.0))
        if arguments[arguments.index("--train-iters") + 1] == "1":
            text = re.sub(r"^.* iteration +2/.*\n", "", text, flags=re.M)
        log.write_text(text.replace("7.375000E+00", self.loss))
        for flag in ("--save", "--tensor-save-dir"):
            if flag in arguments:
                Path(arguments[arguments.index(flag) + 1]).mkdir(parents=True)
        return self.status

    def train_all(self, runs, jobs):
        assert jobs == 1
        for index, run in enumerate(runs):
            self.train(*run)
            yield index

    def analyze(self, arguments, log, head):
        self.started.append(log.stem)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(head + ending(0, 1.0))
        rows = {"format": ["mxfp4"], "accumulator": [None], "recipe": [None]}
        pd.DataFrame(rows).to_csv(log.parent / "study.csv")
        return 0


def data_set(folder):
    """Write two documents, and return the prefix of their files."""
    data = str(folder / "data")
    np.arange(200, dtype=np.uint16).tofile(f"{data}.bin")
    lengths = folder / "lengths"
    np.asarray([100, 100], LENGTH).tofile(lengths)
    held_out.write_index(Path(f"{data}.idx"), lengths, documents=2, dtype=np.uint16)
    return data


def dump_of_run(folder, entries):
    """Write a dump whose run card has the given entries, and return its folder."""
    write_dump(folder, quant_type=entries.get("quant_type", "bf16"))
    (card,) = folder.glob("run_*.json")
    card.write_text(json.dumps(entries))
    return folder


@pytest.fixture
def trainings(tmp_path):
    """Return the runs of a study of two iterations, with a launcher that does not train."""
    made = object.__new__(Trainings)
    made.options = argparse.Namespace(
        load=None,
        from_scratch=None,
        dump=None,
        report_only=False,
        start_iterations=2,
        continue_iterations=2,
        continue_lr=None,
        seeds=1,
        jobs=1,
        flags=[],
    )
    made.folder, made.flags, made.launcher = tmp_path, ["--lr", "1"], Programs()
    made.causes = {"files": "f", "processes": "1 on cpu", "versions": "torch 2"}
    return made


def compare(trainings):
    """Train what is missing, and return the names of the runs that were started."""
    trainings.launcher.started.clear()
    trainings.train_start()
    trainings.compare([Configuration(BASELINE), Configuration("mxfp4")])
    return trainings.launcher.started


def test_another_start_repeats_the_runs_that_continue_from_it(trainings, capsys):
    everything = ["start", "bf16_seed1", "mxfp4_seed1"]
    assert compare(trainings) == everything
    assert compare(trainings) == []
    # The command of the runs is the same, but the weights in the checkpoint have changed.
    trainings.options.start_iterations = 3
    with pytest.raises(RuntimeError, match="2 of 3 iterations are in the log"):
        compare(trainings)
    trainings.options.start_iterations = 2
    trainings.launcher.loss = "7.125000E+00"
    capsys.readouterr()
    assert compare(trainings) == everything
    assert (
        "0 of 2 runs were trained earlier (2 ended earlier and cannot be used, because their logs "
        "have different values, or none, for the checkpoint at the start); logs in"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("cause", ["files", "processes", "versions"])
def test_other_data_processes_or_packages_repeat_all_runs(trainings, cause):
    compare(trainings)
    trainings.causes[cause] = "other"
    assert compare(trainings) == ["start", "bf16_seed1", "mxfp4_seed1"]


def test_a_start_with_equal_losses_is_the_same_start(trainings):
    compare(trainings)
    (trainings.folder / "start" / "checkpoint").rmdir()
    assert compare(trainings) == ["start"]


def test_operands_are_collected_after_the_start_and_given_ones_before_it(trainings, tmp_path):
    trainings.options.dump = dump_of_run(tmp_path / "dump", {})
    assert trainings.collect() == tmp_path / "dump"
    assert trainings.launcher.started == []
    trainings.options.dump = None
    assert trainings.collect() == tmp_path / "operands"
    assert trainings.launcher.started == ["start", "operands"]


def test_report_only_returns_failed_runs_and_says_why_others_are_left_out(trainings, capsys):
    compare(trainings)
    log = trainings.folder / "runs" / "mxfp4_seed1.log"
    complete = log.read_text()
    head = complete.partition("\n")[0]
    log.write_text(f"{head}\n[ERROR] no memory\n{ending(1, 2.0)}")
    trainings.options.report_only = True
    both = [Configuration(BASELINE), Configuration("mxfp4")]
    result = trainings.compare(both)["mxfp4", 1]
    assert (result.status, result.message) == (FAILED, "no memory")
    log.write_text(complete.replace(head, head.partition(" # ")[0]))  # of an earlier version
    capsys.readouterr()
    assert [*trainings.compare(both)] == [(BASELINE, 1)]
    assert "1 ended earlier and cannot be used, because its log has" in capsys.readouterr().err
    (trainings.folder / "start.log").write_text(OLD + ending(0, 1.0))
    with pytest.raises(RuntimeError, match=r"not complete .1 ended earlier .*nothing to report"):
        trainings.train_start()


def test_a_head_names_what_has_changed():
    head = head_of(["--lr", "1", *LOAD], {"start": "a", "recipe": "", "versions": "torch 2"})
    assert head == (
        'pretrain_gpt.py --lr 1 --load start/checkpoint --finetune # {"start": "a", '
        '"versions": "torch 2"}\n'
    )
    assert changed(head, head) == []
    other = head_of(["--lr", "2", *LOAD], {"start": "b", "versions": "torch 2"})
    command = "the command (--lr 2, now 1)"
    assert changed(f"{other}text\n", head) == [command, "the checkpoint at the start"]
    for old in (OLD, "pretrain_gpt.py --tokenizer-model 'a # {b'\n", "x # 3\n", "'\n"):
        first, *rest = changed(old, head)
        assert first.startswith("the command")
        assert rest == [list(CAUSES.values())[1], "the versions of the packages"]
    many = head_of(["--a", "1", "2", "--b=3", "--c", "--d", "4"], {})
    assert changed(many, head_of(["--c", "--d", "4", "5"], {})) == [
        "the command (--a 1 2, now left out; --b 3, now left out; --d 4, now 4 5)"
    ]
    marked = head_of(["--tokenizer-model", "a # {b"], {"start": "a"})
    assert changed(marked, marked) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"quant_type": "mxfp4"}, "has operands of a run in mxfp4; collect them in bf16"),
        ({"arguments": {"hidden_size": 64}}, "another model: its run had hidden_size = 64, and"),
        ({"arguments": {"num_layers": 4, "hidden_size": 256, "num_experts": None}}, None),
    ],
)
def test_the_operands_of_another_model_or_type_are_refused(change, message, tmp_path):
    dump = dump_of_run(tmp_path / "dump", change)
    flags = ["--num-layers", "4", "--hidden-size", "512", "--hidden-size", "256"]
    if message is None:
        return check_dump(dump, flags)
    with pytest.raises(ValueError, match=message):
        check_dump(dump, flags)


def test_a_checkpoint_is_identified_by_its_files(tmp_path):
    with pytest.raises(ConfigError, match=r"has no latest_checkpointed_iteration\.txt"):
        checkpoint_files(tmp_path, [])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    with pytest.raises(ConfigError, match="no checkpoint of iteration 7"):
        checkpoint_files(tmp_path, [])
    for iteration in (5, 7):
        folder = tmp_path / f"iter_{iteration:07d}" / "weights"
        folder.mkdir(parents=True)
        (folder / "a.distcp").write_bytes(b"weights")
    files = checkpoint_files(tmp_path, ["--lr-warmup-iters", "3"])
    assert files == [folder / "a.distcp"]
    assert checkpoint_files(tmp_path, ["--ckpt-step=5"])[0].parents[1].name == "iter_0000005"
    before = state_of(files)
    (tmp_path / "log.txt").write_text("of another program")
    assert state_of(checkpoint_files(tmp_path, [])) == before
    os.utime(files[0], ns=(1, 1))
    assert state_of(checkpoint_files(tmp_path, [])) != before


def test_the_files_of_a_command_are_its_data_and_its_tokenizer(tmp_path):
    data = data_set(tmp_path)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").touch()
    (tmp_path / "flags.yaml").touch()
    words = ["--train-data-path", data, "--tokenizer-model", str(folder), "--lr", "1"]
    found = files_in([*words, f"--other={tmp_path / 'flags.yaml'}"])
    names = ["tokenizer.json", "flags.yaml"]
    assert [path.name for path in found[2:]] == names
    assert [path.suffix for path in found[:2]] == [".bin", ".idx"]


def test_a_text_is_tokenized_again_for_another_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr("loss_gaps.trainings.resolve.has_data", lambda data: True)
    text, folder = tmp_path / "text.txt", tmp_path / "tokenizer"
    text.write_text("text")
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    before = tokenized(text, str(folder), tmp_path)
    assert tokenized(text, str(folder), tmp_path) == before
    (folder / "tokenizer.json").write_text("{ }")  # does not change the folder's modification time
    assert tokenized(text, str(folder), tmp_path) != before


def test_the_last_tokens_of_a_data_set_are_not_taken_for_its_first(tmp_path):
    data = data_set(tmp_path)
    last = held_out.cut(data, None, 64, tmp_path / "parts")
    first = held_out.cut(data, data, 64, tmp_path / "parts")
    tokens = [list(np.fromfile(f"{each.held_out}.bin", np.uint16)) for each in (last, first)]
    assert tokens == [[*range(100, 164)], [*range(64)]]


def test_changed_operands_or_code_are_studied_again(tmp_path, monkeypatch):
    dump = tmp_path / "dump" / "rank0"
    dump.mkdir(parents=True)
    (dump / "a.pt").write_bytes(b"tensor")
    programs = Programs()

    def count():
        study_dump(programs, tmp_path / "dump", [Configuration("mxfp4")], tmp_path / "offline")
        return len(programs.started)

    assert (count(), count()) == (1, 1)
    (dump / "a.pt").write_bytes(b"another")  # does not change the folder's modification time
    assert (count(), count()) == (2, 2)
    (dump / "statistics.sqlite").touch()
    assert count() == 2
    monkeypatch.setattr("loss_gaps.offline.source_version", lambda: "other")
    assert (count(), count()) == (3, 3)


def test_runs_at_a_time_have_caches_of_their_own(trainings):
    log = trainings.folder / "runs" / "mxfp4_seed2.log"
    assert trainings._cache(log) == []
    trainings.options.jobs = 2
    own = str(trainings.folder / "data" / "cache" / "mxfp4_seed2")
    assert trainings._cache(log) == ["--data-cache-path", own]
    trainings.options.flags = ["--data-cache-path=/fast"]
    assert trainings._cache(log) == ["--data-cache-path", "/fast/mxfp4_seed2"]
