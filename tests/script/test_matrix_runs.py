"""Test that the scripts of the matrix train tiny models in the formats that their names give."""

from __future__ import annotations

import re
import sys

import pytest

from configs.datasets import DATASETS
from configs.models import MODELS
from configs.quantizations import QUANTIZATIONS
from tests import forks
from tests.script.meaning import MEANING
from tests.subprocesses import REPO, environment, run
from tests.training.runs import Training

#: Scripts that together cover each model, dataset, format and group of matmuls.
SAMPLE = (
    ("llama31-8b", "wikipedia", "FA_mxfp8"),
    ("llama32-1b", "dolma", "linear_mxfp4"),
    ("deepseek2_lite", "wikipedia", "FA_linear_hifp8"),
)
OTHERS = [
    (model, dataset, quantization)
    for model in MODELS
    for dataset in DATASETS
    for quantization in QUANTIZATIONS
    if (model, dataset, quantization) not in SAMPLE
]
ROW = re.compile(r"> {3}(?P<module>\S+) +(?P<operation>linear|qk|pv) +(?P<what>\S.*?) {2,}.*")
SHARE = re.compile(r"> matmuls in low precision: (?P<percent>\S+)% of the FLOPs of all matmuls")
#: Modules that only a recipe can quantize.
ALWAYS_HIGH = re.compile(r"output_layer|.*\.router")


def train(folder, model, dataset, quantization):
    """Train two iterations from a folder other than the root."""
    script = REPO / f"script/{model}/pretrain_{model}_{dataset}_{quantization}.sh"
    options = ["--preset", "tiny", "--training-config", "fast", "--train-iters", "2"]
    where = ["--tensorboard-path", folder / "events", "--", "--seed", "7"]
    env = environment(LAB_PYTHON=forks.interpreter("training"))
    done = run(["bash", script, *options, *where], cwd=folder, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return Training(done.returncode, done.stdout, done.stderr)


def check(training, quantization):
    """Check that both iterations have a loss and every matmul has the format of the name."""
    assert list(training.losses) == [1, 2]
    assert all(7 < loss < 8.5 for loss in training.losses.values()), "ln 2048 is 7.6"
    assert "--seed 7" in training.errors
    lines = training.output.splitlines()
    rows = [match for line in lines if (match := ROW.fullmatch(line))]
    expected = dict(zip(("linear", "qk", "pv"), MEANING[quantization], strict=True))
    assert {row["operation"] for row in rows} == expected.keys()
    for row in rows:
        name = "bf16" if ALWAYS_HIGH.fullmatch(row["module"]) else expected[row["operation"]]
        assert row["what"] == ("high precision" if name == "bf16" else name), row[0]
    [share] = [float(match["percent"]) for line in lines if (match := SHARE.fullmatch(line))]
    assert (share > 0) == (quantization != "bf16")
    assert "the default corpus is used" in training.errors


@pytest.mark.parametrize(("model", "dataset", "quantization"), SAMPLE)
def test_a_script_of_each_model_trains(tmp_path, model, dataset, quantization):
    check(train(tmp_path, model, dataset, quantization), quantization)


#: Flags that make the sizes of a published model small; all its other flags stay.
SMALL = {
    "llama31-8b": "--tp 2 -- --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 "
    "--num-attention-heads 4 --num-query-groups 2 --kv-channels 32",
    "deepseek2_lite": "--ep 2 -- --num-layers 3 --moe-layer-freq [0]+[1]*2 --hidden-size 128 "
    "--ffn-hidden-size 256 --num-attention-heads 4 --kv-lora-rank 32 --qk-head-dim 32 "
    "--qk-pos-emb-head-dim 32 --v-head-dim 32 --num-experts 8 --moe-ffn-hidden-size 64 "
    "--moe-shared-expert-intermediate-size 128 --make-vocab-size-divisible-by 128",
}


@pytest.mark.slow
@pytest.mark.parametrize("model", SMALL)
def test_the_flags_of_a_published_model_train_on_two_ranks(tmp_path, model):
    """The command uses a distributed optimizer, overlapped communication and recomputation."""
    env = environment(LAB_PYTHON=sys.executable)
    made = run([sys.executable, REPO / "script/data/default_corpus.py"], env=env)
    assert made.returncode == 0, made.stderr
    script = REPO / f"script/{model}/pretrain_{model}_dolma_FA_linear_mxfp8.sh"
    options = [
        *("--preset", "full", "--nproc-per-node", "2", "--seq-length", "128"),
        *("--global-batch-size", "4", "--train-iters", "2"),
        *("--tokenizer-path", REPO / "model/default/tokenizer.model"),
        *("--data-path", REPO / "dataset/default/corpus_text_document"),
        *("--tensorboard-path", tmp_path / "events", "--checkpoint-path", tmp_path / "checkpoint"),
    ]
    small = [*SMALL[model].split(), "--eval-interval", "1", "--eval-iters", "1"]
    done = run(["bash", script, *options, *small], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(Training(0, done.stdout, done.stderr).losses) == [1, 2]
    assert "validation loss at iteration 1" in done.stdout
    latest = tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt"
    assert latest.read_text().strip() == "2"


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dataset", "quantization"), OTHERS)
def test_every_other_script_trains(tmp_path, model, dataset, quantization):
    check(train(tmp_path, model, dataset, quantization), quantization)
