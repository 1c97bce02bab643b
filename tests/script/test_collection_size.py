"""Test that a driver prints the size of a collection that `--collect-plan` measures."""

from __future__ import annotations

import re

import pytest

from configs.announce import announce, gb
from configs.collection_size import collection_size
from configs.lookup import ConfigError
from tests import forks
from tests.script.drivers import COLLECT, bash, dry
from tests.subprocesses import REPO, environment
from tests.training.runs import ENTRY, MODEL, NO_DROPOUT

SMALL = (*MODEL, *NO_DROPOUT, "--mock-data", "--seq-length", "32", "--collect-plan")
TOTAL = re.compile(r"    total +(\d+) +(\d+)  ")


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, "--control-iter 3 --collect-micro-batches 2 --collect-layers first,2-3 --bf16"),
        (
            1,
            "--recompute-activations --collect-tensors all attention_probs attention_scores"
            " --collect-slice s=4:20:2 h=0:16 k=0:8 --collect-modules linear_fc* core_attention",
        ),
        (1, "--control-iter 0 --collect-iterations 2-5:2 --collect-operations backward"),
        (2, "--tensor-model-parallel-size 2 --collect-ranks last"),
        (2, "--context-parallel-size 2 --collect-micro-batches 0"),
    ],
    ids=["selection", "recomputed-slice", "windows", "tp", "cp"],
)
def test_the_size_is_the_plans(tmp_path, ranks, options):
    words = [*SMALL, *options.split(), "--tensor-save-dir", str(tmp_path)]
    done = forks.run(
        ENTRY, *words, ranks=None if ranks == 1 else ranks, env=environment(PYTHONPATH=REPO)
    )
    [(files, size)] = TOTAL.findall(done.stdout)
    found = collection_size(["--nproc-per-node", str(ranks), *words])
    assert found.files == int(files), done.stderr
    assert found.bytes == pytest.approx(int(size), rel=0.03), "small files are mostly metadata"


def words_of_1b(files, *options):
    [words] = dry(COLLECT, "single", "mxfp8", "--preset", "1b", *files, *options)
    return words


def test_the_documented_sizes_of_the_1b_model(files):
    page = (REPO / "docs" / "collection.md").read_text()
    rows = re.findall(r"\| `bash run_tensor_collection.sh (.*?)` \| (\d+) \| (.*?) \|", page)
    assert len(rows) == 4
    for command, count, size in rows:
        [words] = dry(COLLECT, *command.split(), *files)
        found = collection_size(words)
        assert (str(found.files), gb(found.bytes)) == (count, size), command


def test_more_than_10_gb_asks_for_yes_or_a_limit(files, tmp_path):
    small = [*files, "--preset", "1b", "--tensor-path", tmp_path / "file/x"]
    (tmp_path / "file").write_text("")
    done = bash(COLLECT, "single", "mxfp8", *small)
    assert done.returncode == 2
    model, said, error = done.stderr.splitlines()
    assert model.startswith("No trained model is loaded, because this is not the default job")
    assert said == "Collection: 576 files, 27.8 GB."
    assert error.startswith("[ERROR] the collection would write 27.8 GB, more than 10 GB; ")
    assert "--yes (or COLLECT_YES=1), set a limit (--collect-max-gib X, " in error
    for agreed, variables in (
        (["--yes"], {}),
        (["--collect-max-gib", "20"], {}),
        ([], {"COLLECT_YES": "1"}),
    ):  # the folder that cannot be made causes the next error
        done = bash(COLLECT, "single", "mxfp8", *small, *agreed, **variables)
        assert "[ERROR] cannot write to " in done.stderr, done.stderr


def test_a_small_or_a_previewed_collection_asks_nothing(files, capsys):
    words = words_of_1b(files)
    announce(words, types=4, yes=False, dry_run=True)
    said = capsys.readouterr().err
    assert "2,304 files, 111 GB for 4 types" in said
    assert "Above 10 GB, a run requires --yes or a limit." in said
    announce([*words, "--collect-layers", "first"], types=1, yes=False, dry_run=False)
    with pytest.raises(ConfigError, match=r"27\.8 GB, more than 10 GB; give --yes"):
        announce(words, types=1, yes=False, dry_run=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--collect-layers", "first,99"], "--collect-layers first,99: 99 is not within"),
        (["--collect-slice", "x=0:3"], "--collect-slice: 'x=0:3' is not understood"),
        (["--collect-tensors", "inputs"], "--collect-tensors: unknown 'inputs'"),
        (["--collect-max-gib", "nan"], "--collect-max-gib is nan; give more than 0"),
    ],
)
def test_a_selection_is_checked_before_training(files, options, message):
    done = bash(COLLECT, "single", "mxfp8", "--preset", "tiny", *files, *options)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"[ERROR] {message}")


def test_models_that_the_arithmetic_does_not_know_are_said_to_be(capsys):
    words = [*MODEL, "--num-experts", "4"]
    assert collection_size(words) is None
    announce(words, types=1, yes=False, dry_run=False)
    assert "unknown size (experts" in capsys.readouterr().err
