"""Tests of `pretrain_gpt.py` with `--load-hf` and `--save-hf`, started as a user would."""

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.training.hf import folders
from tests import forks
from tests.subprocesses import REPO, environment
from tests.training.hf import hf_models
from tests.training.hf.hf_models import DEEPSEEK, LLAMA, YARN
from tests.training.runs import DEEPSEEK as DEEPSEEK_FLAGS
from tests.training.runs import ENTRY, MODEL, NO_DROPOUT, Training, train

WORKER = REPO / "tests/training/killed_worker.py"
#: Options of a run with a vocabulary of 120 tokens, of which the corpus uses 97.
BATCH = (
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "119", "--seq-length", "64"),
    *("--make-vocab-size-divisible-by", "8"),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--split", "80,10,10"),
    *("--train-iters", "4", "--eval-iters", "0"),
)
STILL = ("--lr", "0", "--weight-decay", "0")
MOVING = ("--lr", "1e-3")
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PERIOD = torch.arange(64) * 3 % 97
DISTRIBUTED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = hf_models.write(tmp_path_factory.mktemp("hf") / "llama", **LLAMA, dtype=torch.bfloat16)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "deepseek"
    return hf_models.write(folder, **DEEPSEEK, rope_parameters=YARN)


def finished(*options, ranks: int = 1, model: tuple[str, ...] = BATCH) -> Training:
    training = train(*options, ranks=ranks, model=model)
    assert training.status == 0, training.errors[-3000:]
    return training


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return hf_models.read(folder).state_dict()


def equal(a: Path, b: Path) -> bool:
    ours, theirs = weights(a), weights(b)
    assert list(ours) == list(theirs)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_optimizer_trains_the_weights_that_were_read(corpus, llama, tmp_path):
    """The optimizer's fp32 copies equal the weights: with a learning rate of 0 nothing changes."""
    out = tmp_path / "out"
    options = ("--data-path", corpus, "--load-hf", llama, "--bf16", *DISTRIBUTED)
    done = finished(*options, *STILL, "--save-hf", out, "--exit-interval", "2", ranks=2)
    assert list(done.lines) == [1, 2]
    assert f"successfully saved weights to {out}" in done.output
    assert equal(out, llama)
    assert (out / "tokenizer.json").exists()
    assert hf_models.read(out).dtype == torch.bfloat16
    assert f"> --load-hf {llama} (LlamaForCausalLM) sets --no-add-bias-linear " in done.output


@pytest.fixture(scope="module")
def whole(corpus, deepseek, tmp_path_factory) -> tuple[Training, Path]:
    """Return an uninterrupted run on one rank, and the folder with its weights."""
    out = tmp_path_factory.mktemp("hf") / "whole"
    return finished("--data-path", corpus, "--load-hf", deepseek, *MOVING, "--save-hf", out), out


def test_two_tensor_parallel_ranks_have_the_gradients_of_one(corpus, deepseek, whole):
    """Shards that are not marked as such would be missing from the gradient norm.

    The weights are not initialized, so megatron-core marks no shards.
    """
    vocabulary = ("--make-vocab-size-divisible-by", "4")  # as large as on one rank
    options = ("--data-path", corpus, "--load-hf", deepseek, *MOVING, "--exit-interval", "1")
    shared = finished(*options, *TENSOR, *vocabulary, ranks=2)
    assert shared.lines[1] == whole[0].lines[1]


def test_a_restarted_run_resumes_and_exports_what_an_uninterrupted_one_does(
    corpus, deepseek, whole, tmp_path
):
    """The same command runs three times.

    The first run is stopped halfway, the second is killed while it exports the weights, and the
    third only has to export them.
    """
    common = ("--data-path", corpus, "--load-hf", deepseek, *MOVING)
    uninterrupted, theirs = whole
    assert not equal(theirs, deepseek)

    out, folder = tmp_path / "out", tmp_path / "ck"
    restart = (*common, "--save-hf", out, "--save", folder, "--load", folder)
    half = finished(*restart, "--exit-interval", "2")
    assert f"> no checkpoint in {folder} yet: starting from --load-hf {deepseek}" in half.output
    assert "> --save-hf writes nothing before --train-iters 4" in half.output

    env = environment(PYTHONPATH=REPO, KILL_AT="megatron.training.hf.folders:write_config:1")
    killed = forks.run(WORKER, *BATCH, *restart, env=env)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert f"> resuming from --load {folder}: the weights of --load-hf are not" in killed.stdout
    rest = Training(0, killed.stdout, killed.stderr)
    assert half.lines | rest.lines == uninterrupted.lines
    assert not out.exists()
    left = {path.name for path in out.with_name("out.partial").iterdir()}
    assert left == {"model.safetensors", "generation_config.json", folders.MARKER}
    with pytest.raises(ValueError, match="Unrecognized model"):
        hf_models.read(out.with_name("out.partial"))

    assert not finished(*restart).lines
    assert equal(out, theirs)
    assert not out.with_name("out.partial").exists()

    again = ("--load", folder, "--load-hf", deepseek, "--save-hf", tmp_path / "again")
    finished(*again, "--train-iters", "0", model=("--make-vocab-size-divisible-by", "8"))
    assert equal(tmp_path / "again", out)


def test_a_checkpoint_of_ours_is_exported_and_converted_alike(corpus, tmp_path):
    """Two ranks export the same weights as a conversion of their checkpoint on one rank.

    The exported model has the same loss in transformers as in this program.
    """
    options = ("--data-path", corpus, "--save", tmp_path / "ck", "--save-hf", tmp_path / "out")
    shape = (*NO_DROPOUT, "--train-iters", "2")
    finished(*options, *shape, *TENSOR, ranks=2, model=MODEL)
    convert = ("--load", tmp_path / "ck", "--train-iters", "0", "--save-hf", tmp_path / "again")
    done = finished(*NO_DROPOUT, *convert, model=MODEL)
    assert "nothing is trained or evaluated" in done.output
    assert equal(tmp_path / "again", tmp_path / "out")

    assert_same_loss(tmp_path / "out", periodic(tmp_path))


def periodic(folder: Path) -> Path:
    """Write a data set of equal documents, so that every sample is the same in any order."""
    prefix = folder / "periodic"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(100):
        builder.add_item(PERIOD)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


@torch.no_grad()
def assert_same_loss(folder: Path, corpus: Path) -> None:
    """Assert that training starts with the loss that transformers computes."""
    model = hf_models.read(folder)
    assert model.config.vocab_size == 128, "padding would take a share of the softmax"
    labels = PERIOD.roll(-1)
    theirs = torch.nn.functional.cross_entropy(model(PERIOD[None]).logits[0], labels).item()
    ours = finished("--data-path", corpus, "--load-hf", folder, *MOVING, "--train-iters", "1")
    assert ours.losses[1] == pytest.approx(theirs, rel=1e-5)


def test_a_deepseek_of_ours_is_exported(corpus, tmp_path):
    pytest.importorskip("transformers", minversion="4.54")
    out = tmp_path / "out"
    options = ("--train-iters", "1", "--save-hf", out)
    finished("--data-path", corpus, *options, *MOVING, model=DEEPSEEK_FLAGS)
    assert_same_loss(out, periodic(tmp_path))


def one_line(done: Training) -> str:
    (line,) = [line for line in done.errors.splitlines() if line.strip()]
    assert done.status == 2
    assert line.startswith("[ERROR] ")
    assert not done.lines, "before training"
    return line


def test_mistakes_are_one_line_on_one_rank(corpus, llama, tmp_path):
    """Other mistakes are tested in test_hf_flags.py and test_hf_files.py."""
    options = ("--data-path", corpus, "--load-hf", llama, *MOVING)
    done = train(*options, "--vocab-size", "200", model=BATCH)
    assert "the tokenizer has 201 ids, but the vocabulary of --load-hf" in one_line(done)

    folder = Path(shutil.copytree(llama, tmp_path / "copy"))
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-10])
    done = train(*options, "--load-hf", folder, model=BATCH)
    assert f"{file} is incomplete or not a safetensors file" in one_line(done)


def test_two_ranks_stop_alike(corpus, llama, tmp_path):
    folder = Path(shutil.copytree(llama, tmp_path / "copy"))
    sorted(folder.glob("*.safetensors"))[1].unlink()
    options = ("--data-path", corpus, "--load-hf", folder, *MOVING, *TENSOR)
    done = train(*options, ranks=2, model=BATCH)
    assert done.status != 0
    assert done.errors.count("[ERROR] ") == 1
    assert 'pretrain_gpt.py", line' not in done.errors, "a rank printed a traceback"


def test_what_the_disk_refuses_ends_both_ranks_with_one_line(deepseek, tmp_path):
    """A limit of 100 KiB per file acts like a full disk."""
    out = tmp_path / "out"
    options = ("--load-hf", deepseek, "--save-hf", out, "--train-iters", "0", *TENSOR)
    command = (ENTRY, *options, "--make-vocab-size-divisible-by", "8")
    done = forks.run(*command, ranks=2, file_bytes=100 << 10)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if "[ERROR] " in line]
    assert f"[ERROR] the weights {out} could not be written: " in line
    assert 'pretrain_gpt.py", line' not in done.stderr, "a rank printed a traceback"
    assert not out.exists()
