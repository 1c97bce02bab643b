"""Test copies of models, and evaluations between the training passes of an iteration."""

import json
from collections import Counter

import pytest

from tests.core.own_loops import report, run

START = """
import copy
copy._deepcopy_dispatch[torch.distributed.ProcessGroup] = lambda group, memo: group
from megatron.core.low_precision import model_roots

class Headed(torch.nn.Module):
    "A stack of linear layers with an LM head."
    def __init__(self):
        super().__init__()
        options = {"config": foreign_models.config(), "bias": False}
        options["init_method"] = torch.nn.init.xavier_normal_
        self.blocks = torch.nn.ModuleList(
            ColumnParallelLinear(HIDDEN, HIDDEN, **options) for _ in range(2)
        )
        self.output_layer = ColumnParallelLinear(HIDDEN, HIDDEN, **options)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x)[0])
        return self.output_layer(x)[0]

class Wrapper(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)

def headed():
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1)
    return Headed()

x = torch.randn(SEQ, BATCH, HIDDEN, generator=torch.Generator().manual_seed(2))
"""
PER_ITERATION = 2 * 6 - 1  #: two linear layers; the input of the first one needs no gradient


def records(folder) -> Counter:
    """Return the number of records by iteration, micro-batch, and whether they are recomputed."""
    (index,) = folder.glob("index_*.jsonl")
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    return Counter((r["iteration"], r["micro_batch"], r["recomputed"]) for r in lines)


EVALUATIONS = (
    START
    + """
way = sys.argv[2]
tensor_saver.configure(save_tensors=True, save_dir=sys.argv[1], control_iter=2)
model = headed()
train, other = model, model
if way == "another model":
    other = Headed()
elif way == "inner":
    train = Wrapper(model)
elif way == "outer":
    other = Wrapper(model)
for number in (1, 2):
    with training_iteration(number):
        with torch.no_grad():
            other.eval()(x)
        other.train()
        train(x).square().mean().backward()
        with torch.no_grad():
            other.eval()(x)
        other.train()
print(json.dumps({"closed": tensor_saver.close()}))
"""
)


@pytest.mark.parametrize("way", ["same", "another model", "inner", "outer"])
def test_an_evaluation_within_an_iteration_is_not_collected(tmp_path, way):
    assert report(EVALUATIONS, tmp_path, way, CUSTOM_QUANT_TYPE="mxfp8")["closed"] is None
    assert records(tmp_path) == {(n, 0, False): PER_ITERATION for n in (1, 2)}


LATE = (
    START
    + """
tensor_saver.configure(save_tensors=True, save_dir=sys.argv[1], control_iter=2)
model = headed()
for number in (1, 2):
    with training_iteration(number):
        loss = model(x).square().mean()
    loss.backward()
    with torch.no_grad():
        model(x)
print(json.dumps({"closed": tensor_saver.close()}))
"""
)


def test_an_evaluation_after_a_backward_pass_outside_of_the_block_is_not_collected(tmp_path):
    assert report(LATE, tmp_path)["closed"] is None
    assert records(tmp_path) == {(n, 0, False): PER_ITERATION for n in (1, 2)}


CHECKPOINTED = (
    START
    + """
from torch.utils.checkpoint import checkpoint

class Nested(torch.nn.Module):
    "Recomputes its model within a part that is recomputed, once without gradients."
    def __init__(self, model):
        super().__init__()
        self.model = model

    def inner(self, x):
        return checkpoint(self.model, x, use_reentrant=True)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)

def gradients(wrap):
    model = headed()
    root = wrap(model)
    with training_iteration(number[0]):
        root(x.clone().requires_grad_()).square().mean().backward()
    return [p.grad for p in model.parameters()]

number = [1]
plain = gradients(Wrapper)
from megatron.collection.training_clock import clock
clock.iteration = 0
nested = gradients(Nested)
print(json.dumps({"equal": all(map(torch.equal, plain, nested))}))
"""
)


def test_a_recomputation_without_gradients_has_the_random_numbers_of_its_micro_batch():
    assert report(CHECKPOINTED, CUSTOM_QUANT_TYPE="mxfp4:sr")["equal"]


COPIED = (
    START
    + """
tensor_saver.configure(save_tensors=True, save_dir=sys.argv[1], control_iter=3)
model = headed()
for number in (1, 2, 3):
    with training_iteration(number):
        model(x).square().mean().backward()
        if number == 1:
            model = copy.deepcopy(model)
print(json.dumps({"closed": tensor_saver.close()}))
"""
)


def test_a_copy_made_within_an_iteration_trains_in_the_later_ones(tmp_path):
    assert report(COPIED, tmp_path, CUSTOM_QUANT_TYPE="mxfp8")["closed"] is None
    assert records(tmp_path) == {(n, 0, False): PER_ITERATION for n in (1, 2, 3)}


TOGETHER = (
    START
    + """
if sys.argv[1:]:
    tensor_saver.configure(save_tensors=True, save_dir=sys.argv[1], control_iter=1)
model = headed()
model(x) if not sys.argv[1:] else None
with training_iteration(1):
    model(x).square().mean().backward()
    other = copy.deepcopy(model)
    other(x).square().mean().backward()
print(json.dumps({}))
"""
)


def test_a_model_and_its_copy_are_not_collected_together(tmp_path):
    done = run(TOGETHER, tmp_path, CUSTOM_QUANT_TYPE="mxfp8")
    assert done.returncode != 0
    assert "such as a model and its copy, have a layer blocks.0, so that" in done.stderr
    report(TOGETHER, CUSTOM_QUANT_TYPE="mxfp8")


LATER = (
    START
    + """
models = [headed(), Headed()]
whole = {"model": models} if sys.argv[2:] else {}
tensor_saver.configure(save_tensors=True, save_dir=sys.argv[1], collect_iterations="1,2", **whole)
with training_iteration(1):
    models[0](x).square().mean().backward()
with training_iteration(2):
    for model in models:
        model(x).square().mean().backward()
with training_iteration(3):
    copy.deepcopy(models[0])(x).square().mean().backward()  # not collected
    models[0](x).square().mean().backward()
print(json.dumps({}))
"""
)


def test_a_model_that_first_runs_later_is_collected_if_it_is_known(tmp_path):
    done = run(LATER, tmp_path / "unknown")
    assert "two models that train in iteration 2, such as a model and its copy" in done.stderr
    report(LATER, tmp_path / "known", "known")
    assert records(tmp_path / "known") == {
        (1, 0, False): PER_ITERATION,
        (2, 0, False): 2 * PER_ITERATION,
    }


UNNAMED = (
    START
    + """
model_roots.PATIENCE = 3
model = headed()
averaged = torch.optim.swa_utils.AveragedModel(model)
assert all(layer.identity is None for layer in model_roots.layers_of(averaged))
for number in range(1, int(sys.argv[1]) + 1):
    with training_iteration(number):
        model(x).square().mean().backward()
with torch.no_grad():
    expected, result = model.eval()(x), averaged.eval()(x)
names = [layer.identity.name for layer in model_roots.layers_of(averaged)]
print(json.dumps({"equal": torch.equal(expected, result), "names": names}))
"""
)


@pytest.mark.parametrize("calls", [1, 10])
def test_a_copy_of_a_model_that_has_not_run_leaves_its_lm_head_in_high_precision(calls):
    """The copy is evaluated before or after the number of hook calls exceeds `PATIENCE`."""
    found = report(UNNAMED, calls, CUSTOM_QUANT_TYPE="mxfp4")
    assert found["equal"]
    assert [name.rpartition(".")[2] for name in found["names"]] == ["0", "1", "output_layer"]
