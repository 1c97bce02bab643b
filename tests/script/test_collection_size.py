"""Test that a driver prints the size of a collection that `--collect-plan` measures."""

from __future__ import annotations

import re
import shlex

import pytest

from configs.announce import announce, gb
from configs.collection_size import collection_size
from configs.lookup import ConfigError
from tests import forks
from tests.script.drivers import COLLECT, bash, dry
from tests.subprocesses import REPO, environment
from tests.training.runs import DEEPSEEK, ENTRY, MODEL, NO_DROPOUT, without_split
from train_config import main

SHORT = ("--mock-data", "--seq-length", "32", "--collect-plan")
SMALL = (*without_split(MODEL), *NO_DROPOUT, *SHORT)
MIXTURE = (*without_split(DEEPSEEK), *SHORT)
TOTAL = re.compile(r"    total +(\d+) +(\d+)  ")


@pytest.mark.parametrize(
    ("model", "ranks", "options"),
    [
        (SMALL, 1, "--control-iter 3 --collect-micro-batches 2 --collect-layers first,2-3 --bf16"),
        (
            SMALL,
            1,
            "--recompute-activations --collect-tensors all attention_probs attention_scores"
            " --collect-slice s=4:20:2 h=0:16 k=0:8 --collect-modules linear_fc* core_attention",
        ),
        (SMALL, 1, "--control-iter 0 --collect-iterations 2-5:2 --collect-operations backward"),
        (SMALL, 2, "--tensor-model-parallel-size 2 --collect-ranks last"),
        (SMALL, 2, "--context-parallel-size 2 --collect-micro-batches 0"),
        (MIXTURE, 2, "--expert-model-parallel-size 2 --recompute-activations --bf16"),
        pytest.param(
            *(MIXTURE, 1, "--q-lora-rank 24 --collect-modules *.experts.* self_attention.*"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(MIXTURE, 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "selection",
        "recomputed-slice",
        "windows",
        "tp",
        "cp",
        "experts",
        "queries",
        "tp-experts",
    ],
)
def test_the_size_is_the_plans(tmp_path, model, ranks, options):
    words = [*model, *options.split(), "--tensor-save-dir", str(tmp_path)]
    done = forks.run(
        ENTRY, *words, ranks=None if ranks == 1 else ranks, env=environment(PYTHONPATH=REPO)
    )
    assert done.returncode == 0, done.stderr
    [(files, size)] = TOTAL.findall(done.stdout)
    found = collection_size(["--nproc-per-node", str(ranks), *words])
    assert found.files == int(files)
    assert found.bytes == pytest.approx(int(size), rel=0.04), "small files are mostly metadata"


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


@pytest.mark.parametrize(
    "options",
    ["--multi-latent-attention", "--num-experts 4 --moe-layer-freq [0]*3", "--num-experts 4 "
     "--expert-tensor-parallel-size 1"],
)  # fmt: skip
def test_models_that_the_arithmetic_does_not_know_are_said_to_be(capsys, options):
    words = [*MODEL, *options.split()]
    assert collection_size(words) is None
    announce(words, types=1, yes=False, dry_run=False)
    assert "unknown size, because of" in capsys.readouterr().err


def test_the_cluster_page_has_the_sizes_that_a_dry_run_prints(capsys, plain_environment):
    page = (REPO / "docs" / "cluster.md").read_text()
    [command] = re.findall(r"train_config\.py (.*?) \\\n +ROW\n", page)
    rows = re.findall(r"\| `(--model .+?)` \| (.+?) \| (.+?) \| (.+?) \|", page)
    assert len(rows) == 12
    for row, *expected in rows:
        assert main(shlex.split(f"{command} {row}")) == 0
        printed = capsys.readouterr().err
        files, total, each = re.search(
            r"Collection: (\S+) files, ([\d.]+ .B)(?: \((.+) for each of \d+ ranks\))?\.", printed
        ).groups()
        assert [files, each or total, total] == expected, row
