"""A loaded checkpoint has the logits of transformers in every layout, and is written back bit for
bit.
"""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from tests import forks
from tests.subprocesses import REPO, environment
from tests.training.hf import hf_models
from tests.training.hf.hf_models import DEEPSEEK, LLAMA, LLAMA3_ROPE, YARN

WORKER = Path(__file__).with_name("hf_worker.py")
TOLERANCE = 1e-4  #: largest difference, relative to the largest logit

CHECKPOINTS = {
    "llama": LLAMA,
    "llama32": LLAMA | {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "deepseek": DEEPSEEK | {"rope_parameters": YARN},
    "deepseek-q-lora": DEEPSEEK
    | {"q_lora_rank": 40, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2},
}
TENSOR = ("--tensor-model-parallel-size", "2")
SEQUENCE = (*TENSOR, "--sequence-parallel")
PIPELINE = ("--pipeline-model-parallel-size", "2")
INTERLEAVED = (*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "1")
EXPERTS = ("--expert-model-parallel-size", "2")
#: Lists of (checkpoint, layout) by the number of ranks.
CASES = {
    1: [(name, ()) for name in CHECKPOINTS],
    2: [
        ("llama", TENSOR),
        ("llama", PIPELINE),
        ("llama32", SEQUENCE),
        ("llama32", INTERLEAVED),
        ("deepseek", SEQUENCE),
        ("deepseek", PIPELINE),
        ("deepseek", EXPERTS),
        ("deepseek", (*SEQUENCE, *EXPERTS, "--expert-tensor-parallel-size", "1")),
        ("deepseek-q-lora", SEQUENCE),
        ("deepseek-q-lora", INTERLEAVED),
    ],
    4: [
        ("llama32", (*TENSOR, *PIPELINE)),
        ("llama", (*TENSOR, *INTERLEAVED)),
        ("deepseek", (*SEQUENCE, *PIPELINE)),
        ("deepseek", (*SEQUENCE, *EXPERTS)),
        ("deepseek", (*PIPELINE, *EXPERTS)),
        ("llama", ("--tensor-model-parallel-size", "4")),
    ],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("theirs")
    return {name: hf_models.write(folder / name, **config) for name, config in CHECKPOINTS.items()}


@pytest.fixture(scope="module")
def theirs(checkpoints) -> dict[str, torch.Tensor]:
    return {name: hf_models.logits(hf_models.read(folder)) for name, folder in checkpoints.items()}


def name_of(case) -> str:
    checkpoint, layout = case
    return "_".join((checkpoint, *(word.strip("-") for word in layout)))


def worked(ranks: int, checkpoints: dict[str, Path], folder: Path) -> dict[str, Path]:
    """Run all cases of a number of ranks in one set of processes; return the folder of each."""
    results, cases = {}, []
    for case in CASES[ranks]:
        checkpoint, layout = case
        out = results[name_of(case)] = folder / name_of(case)
        out.mkdir()
        options = [
            *("--load-hf", checkpoints[checkpoint], "--save-hf", out / "back", *layout),
            *("--train-iters", "0", "--make-vocab-size-divisible-by", "32"),
            *("--seq-length", hf_models.TOKENS, "--micro-batch-size", "2"),
            *("--global-batch-size", 16),
        ]
        cases.append({"options": [str(o) for o in options], "folder": str(out)})
    (folder / "cases.json").write_text(json.dumps(cases))
    env = environment(PYTHONPATH=REPO)
    done = forks.run(*(WORKER, folder / "cases.json"), ranks=ranks if ranks > 1 else None, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = re.findall(r"^ > number of parameters of the model: (\d+)$", done.stdout, re.M)
    for out, count in zip(results.values(), counts, strict=True):
        (out / "parameters").write_text(count)
    return results


@pytest.fixture(scope="module")
def two_ranks(checkpoints, tmp_path_factory):
    return worked(2, checkpoints, tmp_path_factory.mktemp("ranks2"))


@pytest.fixture(scope="module", params=[1, 2, pytest.param(4, marks=pytest.mark.slow)])
def results(request, checkpoints, tmp_path_factory, two_ranks):
    ranks = request.param
    if ranks == 2:
        return ranks, two_ranks
    return ranks, worked(ranks, checkpoints, tmp_path_factory.mktemp(f"ranks{ranks}"))


def test_logits_are_those_of_transformers(results, theirs):
    ranks, found = results
    for case in CASES[ranks]:
        ours, reference = torch.load(found[name_of(case)] / "logits.pt"), theirs[case[0]]
        assert ours.shape == (*reference.shape[:2], 128), "the padded vocabulary"
        difference = (ours[..., : hf_models.VOCABULARY] - reference).abs().max()
        assert difference < TOLERANCE * reference.abs().max(), name_of(case)
        assert not ours[..., hf_models.VOCABULARY :].any(), "rows of padding are zero"


def test_every_layout_counts_the_parameters_of_transformers(results, checkpoints):
    """Copies of a norm, of a tied embedding or of an expert are not counted.

    The weights are not initialized here, so the code under test must itself mark those that are
    split between ranks. The gradient norm needs these marks, too.
    """
    ranks, found = results
    for case in CASES[ranks]:
        model = hf_models.read(checkpoints[case[0]])
        tied = model.config.tie_word_embeddings
        rows = (128 - hf_models.VOCABULARY) * (1 if tied else 2)  # padding of the vocabulary
        expected = model.num_parameters() + rows * model.config.hidden_size
        assert int((found[name_of(case)] / "parameters").read_text()) == expected, name_of(case)


def test_weights_come_back_bit_for_bit(results, checkpoints, theirs):
    ranks, found = results
    for case in CASES[ranks]:
        back = hf_models.read(found[name_of(case)] / "back")
        original = hf_models.read(checkpoints[case[0]])
        assert back.config.to_dict() == original.config.to_dict() | {
            "_name_or_path": back.config._name_or_path
        }
        ours, reference = back.state_dict(), original.state_dict()
        assert list(ours) == list(reference)
        for name, tensor in reference.items():
            assert ours[name].dtype == tensor.dtype
            assert torch.equal(ours[name], tensor), f"{name} of {name_of(case)}"
        assert torch.equal(hf_models.logits(back), theirs[case[0]])


def reads_of(folder: Path, ranks: int) -> list[dict[str, int]]:
    return [json.loads((folder / f"reads_{rank}.json").read_text()) for rank in range(ranks)]


def sizes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor from the headers of the files."""
    shapes = {}
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        shapes |= {k: tuple(v["shape"]) for k, v in header.items() if k != "__metadata__"}
    return shapes


def expected_reads(case, rank: int, name: str, shape: tuple[int, ...]) -> int:
    """Return how many elements of a tensor one of two ranks needs by the rules of its layout."""
    checkpoint, layout = case
    count = math.prod(shape)
    layer = re.search(r"layers\.(\d+)", name)
    if PIPELINE[0] in layout:
        if layer is None:
            shared = checkpoint == "llama32" and "embed" in name
            return count if shared or rank == int("embed" not in name) else 0
        per_rank = int(layer[1]) // 2 if "--num-layers-per" not in str(layout) else int(layer[1])
        return count if per_rank % 2 == rank else 0
    expert = re.search(r"\.experts\.(\d+)", name)
    if EXPERTS[0] in layout and expert:
        return count if int(expert[1]) // 2 == rank else 0
    if TENSOR[0] in layout and shape[0] == hf_models.VOCABULARY:
        return (64, 56)[rank] * shape[1]  # 128 rows on two ranks; the last 8 are padding
    if TENSOR[0] in layout and len(shape) == 2 and "mlp.gate.weight" not in name:
        return count // 2
    return count


@pytest.mark.parametrize("case", CASES[2], ids=name_of)
def test_a_rank_reads_what_it_needs_and_no_more(case, two_ranks, checkpoints):
    reads = reads_of(two_ranks[name_of(case)], 2)
    shapes = sizes_of(checkpoints[case[0]])
    assert shapes
    for rank, found in enumerate(reads):
        wanted = {name: expected_reads(case, rank, name, shape) for name, shape in shapes.items()}
        assert found == {name: count for name, count in wanted.items() if count}


def test_weights_are_written_to_numbered_files_of_bounded_size(two_ranks, checkpoints):
    case = ("deepseek", (*SEQUENCE, *EXPERTS, "--expert-tensor-parallel-size", "1"))
    back = two_ranks[name_of(case)] / "back"
    files = sorted(back.glob("*.safetensors"))
    number = len(files)
    assert number > 5
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)
    ]
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f.name for f in files}
    shapes = sizes_of(back)
    assert shapes == sizes_of(checkpoints["deepseek"])
    assert index["metadata"]["total_size"] == 4 * sum(map(math.prod, shapes.values()))
    for file in files:
        held = [name for name, where in index["weight_map"].items() if where == file.name]
        assert len(held) == 1 or sum(4 * math.prod(shapes[n]) for n in held) <= 100_000
    assert not back.with_name("back.partial").exists()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama32", {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}),
        ("llama32", {"rope_parameters": LLAMA3_ROPE | {"factor": 8.0}}),
        ("llama", {"rms_norm_eps": 1e-2}),
        ("deepseek", {"rope_parameters": YARN | {"mscale": 1.0}}),
        ("deepseek", {"rope_parameters": YARN | {"mscale_all_dim": 0.707}}),
        ("deepseek", {"rope_parameters": YARN | {"beta_fast": 4}}),
        ("deepseek", {"rope_parameters": YARN | {"original_max_position_embeddings": 4096}}),
        ("deepseek-q-lora", {"routed_scaling_factor": 1.0}),
    ],
)
def test_the_comparison_would_notice(checkpoints, theirs, name, changes):
    """Losing any of these settings would change the logits by far more than the tolerance."""
    other = hf_models.logits(hf_models.read(checkpoints[name], **changes))
    difference = (other - theirs[name]).abs().max()
    assert difference > 20 * TOLERANCE * theirs[name].abs().max()
