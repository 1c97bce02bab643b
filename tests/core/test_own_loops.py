"""Test training loops without the pipeline schedules, and models that change after building.

Each program trains tiny models of `foreign_models` in a process of its own.
"""

import json
import re
import sys

import pytest

from tests import forks, subprocesses
from tests.core.own_loops import START, report, run
from tests.subprocesses import REPO, environment

RANDOM = """
from torch.utils.checkpoint import checkpoint
model, loss = built()
results = {"outside": refusal(lambda: step(model, loss))}
x = torch.randn(SEQ, BATCH, HIDDEN)
with torch.no_grad():
    results["evaluation"] = torch.equal(model(x), model(x))

def gradients(number, forward):
    model.zero_grad()
    with training_iteration(number):
        outputs = [forward(x), forward(x)]
        differ = not torch.equal(*outputs)
        sum(output.square().sum() for output in outputs).backward()
    return differ, [p.grad.clone() for p in model.parameters()]

results["micro_batches_differ"], first = gradients(1, model)
_, second = gradients(2, model)
results["iterations_differ"] = not all(map(torch.equal, first, second))

class Recomputing(foreign_models.Stack):
    def forward(self, x):
        for block in self.blocks:
            part = lambda x, block=block: torch.tanh(block(x)[0])
            x = checkpoint(part, x, use_reentrant=REENTRANT)
        return self.readout(x)

from megatron.collection.training_clock import clock
for REENTRANT in (True, False):
    clock.iteration = 0
    model.__class__ = Recomputing
    x.requires_grad_()
    results[f"recomputed {REENTRANT}"] = all(map(torch.equal, first, gradients(1, model)[1]))
results["again"] = refusal(lambda: gradients(1, model))
with training_iteration(2):
    results["inside"] = refusal(lambda: gradients(3, model))
print(json.dumps(results))
"""


def test_random_numbers_follow_the_stated_iteration_and_the_micro_batch():
    results = report(RANDOM, CUSTOM_QUANT_TYPE="linear_mxfp4:sr")
    assert "rounding with random numbers needs the number of the iteration" in results["outside"]
    assert "with megatron.core.tensor_saver.training_iteration(n):`" in results["outside"]
    assert results["evaluation"]
    assert results["micro_batches_differ"]
    assert results["iterations_differ"]
    assert results["recomputed True"]
    assert results["recomputed False"]
    assert "training_iteration(1) follows iteration 1; give integers that incr" in results["again"]
    assert "is inside another one" in results["inside"]


RECIPE = """
model, loss = built()
results = {"outside": refusal(lambda: step(model, loss)), "formats": []}
for number in (1, 2, 3):
    with training_iteration(number):
        step(model, loss)
        formats = model.blocks[0].formats_of("linear")
        results["formats"].append(None if formats is None else str(formats.fprop_a))
print(json.dumps(results))
"""


def test_a_recipe_follows_the_stated_iteration(tmp_path):
    path = tmp_path / "late.yaml"
    matcher = "{config: mxfp8, type: glob, pattern: 'blocks.*', iterations: 3-, enabled: true}"
    path.write_text(f"matchers:\n  late: {matcher}\n")
    results = report(RECIPE, QUANT_RECIPE=str(path))
    assert "a recipe with iterations needs the number of the iteration" in results["outside"]
    assert results["formats"] == [None, None, "mxfp8"]
    other = matcher.replace("blocks", "decoder")
    path.write_text(f"matchers:\n  late: {matcher}\n  other: {other}\n")
    program = "model, loss = built()\nwith training_iteration(1): loss(model)"
    done = run(program, QUANT_RECIPE=str(path))
    assert done.returncode == 1
    assert "fits none of the 3 modules" in done.stderr
    path.write_text(f"matchers:\n  other: {other}\n")
    done = run(program, QUANT_RECIPE=str(path))
    assert "reaches no layer of the model Stack: it applies to none of blocks.0, " in done.stderr


COLLECTION = """
model, loss = built()
results = {"environment": refusal(lambda: step(model, loss))}
tensor_saver.configure(save_tensors=True, save_dir=sys.argv[1])
results["configured"] = refusal(lambda: step(model, loss))
with torch.no_grad():
    loss(model)
with training_iteration(5):
    step(model, loss)
    with torch.no_grad():
        loss(model)
tensor_saver.close()
print(json.dumps(results))
"""


def test_tensors_are_collected_in_the_stated_iteration_only(tmp_path):
    environ = {"TENSOR_SAVE_ENABLED": "true", "TENSOR_SAVE_DIR": str(tmp_path / "unused")}
    results = report(COLLECTION, tmp_path, **environ)
    for place in ("environment", "configured"):
        assert "the tensor collection needs the number of the iteration" in results[place]
    (index,) = tmp_path.glob("index_*.jsonl")
    records = [json.loads(line) for line in index.read_text().splitlines()]
    assert {(r["iteration"], r["micro_batch"]) for r in records} == {(5, 0)}
    assert len(records) == 3 * 6 - 1, "the first layer's input needs no gradient"
    (card,) = tmp_path.glob("run_*.json")
    assert json.loads(card.read_text())["status"] == "finished"


EVALUATION = """
model, loss = built(sys.argv[1])
with torch.no_grad():
    loss(model)
"""


@pytest.mark.parametrize(
    ("model", "variables", "message"),
    [
        ("plain", {"CUSTOM_QUANT_TYPE": "mxfp8"}, "format mxfp8 reached no layer of Plain"),
        ("stack", {"CUSTOM_QUANT_TYPE": "FA_mxfp8"}, "format FA_mxfp8 reached no layer of Stack"),
        ("stack", {"TENSOR_SAVE_ENABLED": "true"}, "nothing was collected: no training ran"),
        ("stack", {"CUSTOM_QUANT_TYPE": "mxfp8"}, None),
        ("plain", {}, None),
    ],
)
def test_a_program_whose_request_reached_nothing_fails(model, variables, message):
    done = run(EVALUATION, model, **variables)
    assert done.returncode == (0 if message is None else 1), done.stderr
    assert message is None or f"{message}\n" in done.stderr


CHANGED_MODELS = """
from megatron.core.pipeline_parallel import get_forward_backward_func

class Foreign(torch.nn.Linear):
    def forward(self, x, weight=None):
        return super().forward(x), None

class Functional(foreign_models.Stack):
    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(torch.nn.functional.linear(x, block.weight))
        return self.readout(x)

def foreign(model):
    model.decoder.layers[1].self_attention.linear_proj = Foreign(HIDDEN, HIDDEN)

def functional(model):
    model.__class__ = Functional

def nothing(model):
    pass
"""
EVALUATED = (
    CHANGED_MODELS
    + """
model, loss = built(sys.argv[2])
globals()[sys.argv[1]](model)
if sys.argv[3] == "eval":
    model.eval()
    step(model, loss)
elif sys.argv[3] == "schedule":
    get_forward_backward_func()(
        forward_step_func=lambda _, model: (loss(model), lambda x: (x, {})), forward_only=True,
        data_iterator=None, model=model, num_microbatches=2, seq_length=SEQ, micro_batch_size=BATCH,
    )
else:
    with torch.no_grad():
        loss(model)
if sys.argv[3] == "teacher":
    student, loss = built(sys.argv[2])
    step(student, loss)
"""
)


@pytest.mark.parametrize("way", ["no_grad", "eval", "schedule", "teacher"])
@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        ("foreign", "gpt", "and format mxfp8 does not reach decoder.layers.1.self_attention."),
        ("functional", "stack", "reached nothing: the forward passes of Functional called none"),
        ("nothing", "gpt", None),
    ],
)
def test_a_model_that_is_only_evaluated_is_checked_too(change, model, message, way):
    """A teacher may consist of any layers if another model is trained."""
    done = run(EVALUATED, change, model, way, CUSTOM_QUANT_TYPE="mxfp8")
    failed = message is not None and way != "teacher"
    assert done.returncode == int(failed), done.stderr
    assert done.stderr.count("format mxfp8 in the evaluation of ") == 1
    assert ("[ERROR]" in done.stderr) == failed
    assert not failed or message in done.stderr.partition("[ERROR]")[2]


@pytest.mark.parametrize(
    ("done", "pattern", "message"),
    [
        (0, "decoder.*", "the evaluation had the formats of iteration 1; pass the number of"),
        (7, "decoder.*", None),
        (7, "encoder.*", "format recipe_late reached no layer of GPTModel"),
    ],
)
def test_an_evaluation_needs_the_iteration_of_a_recipe(tmp_path, done, pattern, message):
    recipe = tmp_path / "late.yaml"
    matcher = f"{{config: mxfp8, type: glob, pattern: '{pattern}', iterations: 5-, enabled: true}}"
    recipe.write_text(f"matchers:\n  late: {matcher}\n")
    start = f"tensor_saver.configure(iteration={done})\n" if done else ""
    result = run(start + EVALUATION, "gpt", QUANT_RECIPE=str(recipe))
    assert result.returncode == int(message is not None), result.stderr
    assert message is None or message in result.stderr


LATER_CALLED = """
class Model(foreign_models.Stack):
    def forward(self, x, whole):
        return super().forward(x) if whole else self.readout(x)

teacher = torch.nn.Linear(HIDDEN, HIDDEN).eval()
with training_iteration(1):
    x = teacher(torch.randn(SEQ, BATCH, HIDDEN)).detach()
    model = Model()
    with torch.no_grad():
        for whole in (False, False, True, True):
            model(x, whole)
"""


def test_a_later_evaluation_may_be_the_first_to_call_a_layer():
    """The teacher is in evaluation mode, and runs before the first layer is built."""
    done = run(LATER_CALLED, CUSTOM_QUANT_TYPE="mxfp8")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("in the evaluation of Model:") == 1
    done = run(
        LATER_CALLED.replace("(False, False, True, True)", "(False, False)"),
        CUSTOM_QUANT_TYPE="mxfp8",
    )
    assert "[ERROR] format mxfp8 reached nothing: the forward passes of Model call" in done.stderr


def test_a_model_in_evaluation_mode_trains_in_an_iteration():
    code = CHANGED_MODELS + (
        "model, loss = built('gpt')\n"
        "foreign(model.eval())\n"
        "with training_iteration(1):\n"
        "    print(json.dumps({'error': refusal(lambda: step(model, loss))}))\n"
    )
    error = report(code, CUSTOM_QUANT_TYPE="mxfp8")["error"]
    assert "does not reach decoder.layers.1.self_attention.linear_proj, a Foreign" in error


def test_a_collection_without_an_iteration_fails(tmp_path):
    code = "tensor_saver.configure(save_tensors=True, save_dir=sys.argv[1])"
    done = run(code, tmp_path)
    assert done.returncode == 1
    assert "[ERROR] nothing was collected: no training iteration ran" in done.stderr
    (card,) = tmp_path.glob("run_*.json")
    assert json.loads(card.read_text())["status"] == "failed"


BUILT = """
import os
model, loss = built()
if "fork" in sys.argv[-1] and not os.fork():
    if "training" in sys.argv[-1]:
        step(model, loss)
    os._exit(0)
if "fork" in sys.argv[-1]:
    os.wait()
if "compiled" in sys.argv:
    torch.compile(lambda: loss(model), backend="eager")()
if "failing" in sys.argv:
    raise RuntimeError("the program fails")
"""


@pytest.mark.parametrize(
    ("word", "variables", "message"),
    [
        ("", {"CUSTOM_QUANT_TYPE": "mxfp8"}, "format mxfp8 was requested"),
        ("", {"TENSOR_SAVE_ENABLED": "true"}, "tensor collection was requested"),
        ("fork", {"CUSTOM_QUANT_TYPE": "mxfp8"}, "format mxfp8 was requested"),
        ("training fork", {"CUSTOM_QUANT_TYPE": "mxfp8"}, None),
        ("", {}, None),
    ],
)
def test_a_program_that_builds_a_model_and_runs_none_fails(word, variables, message):
    """A fork that runs the model counts; other forks, such as those that read data, do not."""
    done = run(BUILT, word, **variables)
    assert done.returncode == (0 if message is None else 1), done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("[ERROR]")]
    text = "and the program built a model but ran none; run it, or switch the format and the"
    assert errors == ([] if message is None else [f"[ERROR] {message}, {text} collection off"])


def test_a_model_in_a_compiled_function_counts_as_run():
    env = environment(PYTHONPATH=REPO, CUSTOM_QUANT_TYPE="mxfp8", TORCHDYNAMO_DISABLE="0")
    done = subprocesses.run([sys.executable, "-c", START + BUILT, "compiled"], env=env)
    assert done.returncode == 0, done.stderr


CHILD = """
import multiprocessing

def train():
    model, loss = built("gpt")
    attention = model.decoder.layers[1].self_attention
    attention.linear_proj = torch.nn.Linear(HIDDEN, HIDDEN)
    try:
        step(model, loss)
    except ValueError:
        if sys.argv[1] == "raised":
            raise

child = multiprocessing.get_context("fork").Process(target=train)
child.start()
child.join()
sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("end", ["raised", "handled"])
def test_a_process_of_multiprocessing_ends_with_an_error_too(end):
    """Before Python 3.13, a child process of multiprocessing does not run functions of `atexit`.

    Since then, it runs them when its error is gone, so the error is also the last line.
    """
    done = run(CHILD, end, CUSTOM_QUANT_TYPE="mxfp8")
    assert done.returncode == 1
    assert ("Traceback" in done.stderr) == (end == "raised")
    errors = [line for line in done.stderr.splitlines() if line.startswith("[ERROR]")]
    newer = sys.version_info >= (3, 13)
    handled = "" if newer else "the program handled this error and continued: "
    assert len(errors) == int(newer or end == "handled"), done.stderr
    assert all(f"{handled}format mxfp8 does not reach" in line for line in errors)


def test_an_error_of_a_program_that_runs_no_model_is_the_only_one():
    done = run(BUILT, "failing", CUSTOM_QUANT_TYPE="mxfp8")
    assert done.returncode == 1
    assert "RuntimeError: the program fails" in done.stderr
    assert "[ERROR]" not in done.stderr


FULL = """
import resource
model, loss = built()
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
with training_iteration(1):
    step(model, loss)
"""


def test_a_collection_that_cannot_write_fails_at_the_end(tmp_path):
    """Only the environment requests the collection, so no trainer closes it."""
    done = run(FULL, TENSOR_SAVE_ENABLED="true", TENSOR_SAVE_DIR=str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert f"cannot write to {tmp_path}: [Errno 27]" in done.stderr
    assert "[ERROR]" in done.stderr


RING = """
model, loss = built()
tensor_saver.configure(save_tensors=True, save_dir=sys.argv[1], collect_ring=2)
for number in range(1, int(sys.argv[2]) + 1):
    with training_iteration(number):
        value = step(model, loss)
    if len(sys.argv) > 3:
        tensor_saver.observe(value, None)
"""


def test_a_ring_without_losses_is_refused(tmp_path):
    message = "a ring of iterations (--collect-ring) needs the loss of each iteration; call meg"
    for iterations in ("1", "2"):
        done = run(RING, tmp_path / iterations, iterations)
        assert (done.returncode, message in done.stderr) == (1, True)
        (card,) = (tmp_path / iterations).glob("run_*.json")
        assert json.loads(card.read_text())["status"] != "finished"
    assert run(RING, tmp_path / "observed", "2", "observe").returncode == 0


CHANGED = """
results = {}

def trained(change):
    model, loss = built("gpt")
    change(model)
    return refusal(lambda: step(model, loss))

class OwnAttention(type(built("gpt")[0].decoder.layers[0].self_attention.core_attention)):
    def forward(self, query, key, value, *args, **kwargs):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)

def own_attention(model):
    model.decoder.layers[1].self_attention.core_attention.__class__ = OwnAttention

class OwnLinear(ColumnParallelLinear):
    def forward(self, x, weight=None, **_):
        return torch.nn.functional.linear(x, self.weight), self.bias

def own_linear(model):
    model.decoder.layers[0].mlp.linear_fc1.__class__ = OwnLinear

def replaced(model):
    linear = torch.nn.Linear(HIDDEN, HIDDEN)
    model.decoder.layers[1].self_attention.linear_proj = linear

def skipped(model):
    model.decoder.layers[1].forward = lambda hidden_states, **_: (hidden_states, None)

for change in (own_attention, own_linear, replaced, skipped):
    results[change.__name__] = trained(change)
print(json.dumps(results))
"""


def test_a_model_that_changed_after_it_was_built_is_compared_with_the_audit():
    results = report(CHANGED, CUSTOM_QUANT_TYPE="mxfp8")
    attention = "decoder.layers.1.self_attention.core_attention (OwnAttention)"
    assert f"format mxfp8 applies to {attention}, but" in results["own_attention"]
    assert "decoder.layers.0.mlp.linear_fc1 (OwnLinear), but" in results["own_linear"]
    assert (
        "does not reach decoder.layers.1.self_attention.linear_proj, a Linear"
        in results["replaced"]
    )
    assert results["skipped"] is None
    assert "not called: decoder.layers.1.self_attention.core_attention, " in results["log"]


HANDLED = (
    CHANGED[: CHANGED.index("for change in")]
    + """
model, loss = built("gpt")
globals()[sys.argv[1]](model)
for number in (1, 2, 3):
    try:
        with training_iteration(number):
            step(model, loss)
    except ValueError:
        results[number] = True
assert len(results) == 3, results
"""
)


@pytest.mark.parametrize("change", ["own_linear", "replaced"])
def test_a_program_that_handles_a_refusal_is_refused_again_and_fails(change):
    done = run(HANDLED, change, CUSTOM_QUANT_TYPE="mxfp8")
    assert done.returncode == 1, done.stderr
    assert "[ERROR] the program handled this error and continued: format mxfp8" in done.stderr


FUNCTIONAL = """
class Functional(foreign_models.Stack):
    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x)[0] if CALLED else torch.nn.functional.linear(x, block.weight))
        return self.readout(x)

model = Functional()
for number, CALLED in enumerate(map(int, sys.argv[1]), start=1):
    with training_iteration(number):
        model(torch.randn(SEQ, BATCH, HIDDEN)).sum().backward()
"""


@pytest.mark.parametrize(("called", "status"), [("00", 1), ("01", 0), ("10", 0)])
def test_a_model_that_never_calls_its_layers_fails(called, status):
    done = run(FUNCTIONAL, called, CUSTOM_QUANT_TYPE="mxfp8")
    assert done.returncode == status, done.stderr
    text = "[ERROR] format mxfp8 reached nothing: the forward passes of Functional called none of"
    assert (text in done.stderr) == bool(status)


ADAPTER = """
model, loss = built("gpt")
layer = model.decoder.layers[0].mlp.linear_fc1

class Adapted(type(layer)):
    def forward(self, x, weight=None, **options):
        output, bias = super().forward(x, weight, **options)
        return output + (x @ self.down) @ self.up, bias

layer.__class__ = Adapted
layer.down = torch.nn.Parameter(torch.zeros(HIDDEN, 2))
layer.up = torch.nn.Parameter(torch.zeros(2, len(layer.weight)))
step(model, loss)
"""


def test_matmuls_that_a_subclass_adds_to_a_layer_are_named():
    done = run(ADAPTER, CUSTOM_QUANT_TYPE="mxfp8")
    assert done.returncode == 0, done.stderr
    name = "decoder.layers.0.mlp.linear_fc1 (Adapted)"
    assert f"outside of the audit, in high precision: {name}: matmul x2\n" in done.stderr


DIRECT = """
model, loss = built("gpt")
before = type(model).__call__
type(model).__call__ = lambda self, *inputs, **named: self.forward(*inputs, **named)
results = {"direct": refusal(lambda: step(model, loss))}
type(model).__call__ = before
results["called"] = refusal(lambda: step(model, loss))
results["name"] = model.output_layer.identity.name
print(json.dumps(results))
"""


def test_a_direct_call_of_a_models_forward_is_refused():
    results = report(DIRECT, CUSTOM_QUANT_TYPE="mxfp8")
    assert "calls GPTModel.forward(...), so that its layers cannot" in results["direct"]
    assert (results["called"], results["name"]) == (None, "output_layer")


LATE_VARIABLE = """
import os
from megatron.fake_quant import policy
model, loss = built()
policy.configure()
os.environ["CUSTOM_QUANT_TYPE"] = "mxfp8"
results = {"late": refusal(lambda: step(model, loss))}
policy.configure()
results["again"] = refusal(lambda: step(model, loss))
print(json.dumps(results))
"""


def test_a_variable_that_is_set_too_late_is_refused():
    results = report(LATE_VARIABLE)
    assert "CUSTOM_QUANT_TYPE was not set when the formats of this run were" in results["late"]
    assert results["again"] is None


RANKS = """
import os
if os.environ["RANK"] == "1":
    os.environ["CUSTOM_QUANT_TYPE"] = "mxfp8"
"""


def test_ranks_with_different_formats_are_refused(tmp_path):
    """The variable is set on one of two machines."""
    script = tmp_path / "script.py"
    train = "model, loss = built()\nwith training_iteration(1): step(model, loss)\n"
    script.write_text(RANKS + START + train)
    done = forks.run(script, ranks=2, env=environment(PYTHONPATH=REPO))
    assert done.returncode == 1
    message = "the ranks have different formats: bf16 on rank(s) 0; mxfp8 on rank(s) 1; set the"
    assert message in done.stderr


def test_ranks_with_different_formats_are_refused_also_without_iterations(tmp_path):
    """In a loop without iterations, no rank waits for the others."""
    script = tmp_path / "script.py"
    train = (
        "import time\n"
        "model, loss = built()\n"
        "step(model, loss)\n"
        "time.sleep(20)  # torchrun ends this rank when the other one fails\n"
    )
    script.write_text(RANKS + START + train)
    done = forks.run(script, ranks=2, env=environment(PYTHONPATH=REPO))
    assert done.returncode == 1
    kinds = r"(bf16 on rank 0; mxfp8 on rank 1|mxfp8 on rank 1; bf16 on rank 0); set the same"
    assert re.search(f"the ranks have different formats: {kinds}", done.stderr), done.stderr


DIFFERENT = """
import os
from megatron.fake_quant import policy
rank = torch.distributed.get_rank()
for words in sys.argv[1:]:
    settings = json.loads(words)
    policy.configure(**(settings[rank] if isinstance(settings, list) else settings))
    model, loss = built()
    try:
        step(model, loss)
    except ValueError as error:
        print(error, file=sys.stderr)
torch.distributed.barrier()
"""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("recipe", "recipe_same (SHA-256 "),
        ("accumulator", "fp8_e4m3 with accumulator hopper_fp8 on rank "),
        ("later", "mxfp4 on rank "),
        ("off", "bf16 on rank "),
        ("equal", None),
    ],
)
def test_everything_that_sets_formats_is_compared_and_an_error_cannot_be_ignored(
    tmp_path, kind, message
):
    recipes = []
    for name in ("mxfp8", "mxfp4"):
        recipes.append(tmp_path / name / "same.yaml")
        recipes[-1].parent.mkdir()
        matcher = f"{{config: {name}, type: glob, pattern: '*', enabled: true}}"
        recipes[-1].write_text(f"matchers:\n  all: {matcher}\n")
    fp8, mxfp8, mxfp4 = ({"custom_quant_type": f} for f in ("fp8_e4m3", "mxfp8", "mxfp4"))
    settings = {
        "recipe": [[{"recipe": str(path)} for path in recipes]],
        "accumulator": [[fp8, fp8 | {"accumulate": "hopper_fp8"}]],
        "later": [mxfp8, [mxfp8, mxfp4]],
        "off": [[{}, mxfp8]],
        "equal": [mxfp8, mxfp4, {"recipe": str(recipes[0])}],
    }[kind]
    script = tmp_path / "script.py"
    script.write_text(START + DIFFERENT)
    done = forks.run(script, *map(json.dumps, settings), ranks=2, env=environment(PYTHONPATH=REPO))
    assert done.returncode == int(message is not None), done.stderr
    error = "[ERROR] the program handled this error and continued: the ranks have different"
    assert (error in done.stderr) == (message is not None)
    assert message is None or message in done.stderr


LATE_RECIPE = """
from megatron.fake_quant import policy
policy.configure(recipe=sys.argv[1])
model, loss = built()
if sys.argv[2] == "given":
    tensor_saver.configure({"train_iters": 200})
for number in (1, 2):
    with training_iteration(number):
        step(model, loss)
"""


@pytest.mark.parametrize(
    ("first", "train_iters", "status"), [(3, "", 1), (2, "", 0), (3, "given", 0)]
)
def test_a_loop_that_ends_before_its_recipe_begins_fails(tmp_path, first, train_iters, status):
    recipe = tmp_path / "late.yaml"
    matcher = f"{{config: mxfp8, type: glob, pattern: '*', iterations: {first}-, enabled: true}}"
    recipe.write_text(f"matchers:\n  late: {matcher}\n")
    done = run(LATE_RECIPE, recipe, train_iters)
    assert done.returncode == status, done.stderr
    message = "sets its first format in iteration 3, and the run ended at iteration 2; train longer"
    assert (message in done.stderr) == (status == 1)


LACKING = """
model, loss = built()
flags = json.loads(sys.argv[2])
tensor_saver.configure(save_tensors=True, save_dir=sys.argv[1], **flags)
done = flags.get("iteration", 0)
for number in (done + 1, done + 2):
    with training_iteration(number):
        step(model, loss)
if sys.argv[3:]:
    print(json.dumps({"closed": tensor_saver.close()}))
"""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"collect_iterations": "1,9"}, "the run had collected 1 when it ended at iteration 2"),
        ({"collect_iterations": "9"}, "nothing was collected in 2 iteration(s) up to 2: none"),
        ({"control_iter": 3}, "3 iteration(s) were to be collected"),
        ({"control_iter": 3, "iteration": 9}, "3 iteration(s) were to be collected"),
        ({"control_iter": 3, "iteration": 1}, None),  # the earlier run has collected one
        ({"tensor_statistics": 9}, "--tensor-statistics 9 measures the iterations that"),
        ({"collect_layers": "0,9"}, "--collect-layers: the model has no layer 9; its layers are"),
        ({"collect_iterations": "2-"}, None),
    ],
)
def test_a_run_that_collects_less_than_requested_fails(tmp_path, flags, message):
    done = run(LACKING, tmp_path, json.dumps(flags))
    assert done.returncode == (0 if message is None else 1), done.stderr
    assert message is None or message in done.stderr


def test_a_collection_that_is_closed_before_it_is_complete_says_so(tmp_path):
    closed = report(LACKING, tmp_path, json.dumps({"control_iter": 3}), "close")
    assert closed["closed"].startswith("3 iteration(s) were to be collected")
    assert closed["closed"] in closed["log"]
    (card,) = tmp_path.glob("run_*.json")
    card = json.loads(card.read_text())
    assert (card["status"], card["reason"]) == ("aborted", closed["closed"])


CELLS = """
sys.ps1, sys.last_value = ">>> ", ZeroDivisionError("division by zero in an earlier cell")
model, loss = built()
tensor_saver.configure(save_tensors=True, save_dir=sys.argv[1], control_iter=2)
for number in range(1, 1 + int(sys.argv[2])):
    with training_iteration(number):
        step(model, loss)
"""


@pytest.mark.parametrize(("iterations", "status"), [(2, 0), (1, 1)])
def test_an_exception_in_a_cell_of_a_notebook_does_not_end_the_program(
    tmp_path, iterations, status
):
    done = run(CELLS, tmp_path, iterations)
    assert done.returncode == status, done.stderr
    (card,) = tmp_path.glob("run_*.json")
    assert "ZeroDivisionError" not in card.read_text()


MOVED = """
tensor_saver.configure(
    save_tensors=True, save_dir=sys.argv[1], collect_micro_batches=0, collect_tensors=["weight"]
)
model, loss = built()
with training_iteration(1):
    for change in (0.0, float(sys.argv[2])):
        with torch.no_grad():
            for parameter in model.parameters() if change else ():
                parameter.add_(change)
        step(model, loss)
print(json.dumps({}))
"""


def test_weights_that_change_between_micro_batches_are_named_once(tmp_path):
    for change, count in ((0.0, 0), (1.0, 1)):
        folder = tmp_path / str(count)
        log = report(MOVED, folder, change)["log"]
        assert log.count("the weight of blocks.0 has changed within iteration 1; only the") == count
        (index,) = folder.glob("index_*.jsonl")
        records = [json.loads(line) for line in index.read_text().splitlines()]
        assert sorted(r["module"] for r in records) == [f"blocks.{block}" for block in range(3)]


TWICE = """
tensor_saver.configure(save_tensors=True, save_dir=sys.argv[1], control_iter=2)
model, loss = built()
if sys.argv[2] == "twice":
    model.blocks[1] = model.blocks[0]
elif sys.argv[2] == "saved":  # foreign code may save tensors of a layer one by one
    identity = model.blocks[0].identity
    save = lambda *_: tensor_saver.save_tensor(
        torch.ones(2, 3), "input", layer_type="linear", dims="t h", identity=identity
    )
    model.readout.register_forward_hook(save)
    model.readout.register_forward_hook(save)
elif sys.argv[2] == "shared":  # two models with one encoder
    model, other = model, foreign_models.Stack()
    other.blocks = model.blocks
for number in (1, 2):
    with training_iteration(number):
        step(model, loss)
        if sys.argv[2] == "shared":
            step(other, loss)
print(json.dumps({}))
"""


def test_a_layer_that_runs_twice_in_a_micro_batch_is_named_once(tmp_path):
    for way, count in (("once", 0), ("saved", 0), ("twice", 1), ("shared", 1)):
        log = report(TWICE, tmp_path / way, way)["log"]
        assert log.count("the layer blocks.0 runs more than once in micro-batch 0 of") == count


PARAMETRIZED = """
model, loss = built("gpt")
layer = model.decoder.layers[0].mlp.linear_fc1
torch.nn.utils.parametrizations.weight_norm(layer)
step(model, loss)
print(json.dumps({}))
"""


def test_a_parametrized_weight_is_reached():
    report(PARAMETRIZED, CUSTOM_QUANT_TYPE="mxfp8")


FAILED_PASS = """
tensor_saver.configure(save_tensors=True, save_dir=sys.argv[1], control_iter=2)
model, loss = built()
def fail(gradient):
    raise RuntimeError("out of memory")
with training_iteration(1):
    step(model, loss)
with training_iteration(2):
    value = loss(model)
    value.register_hook(fail)
    try:
        value.backward()
    except RuntimeError:
        pass
    with torch.no_grad():
        model.blocks[0](torch.randn(SEQ, BATCH, HIDDEN))  # an evaluation of a part
    step(model, loss)
print(json.dumps({}))
"""


def test_an_evaluation_after_a_failed_backward_pass_is_not_collected(tmp_path):
    report(FAILED_PASS, tmp_path)
    (index,) = tmp_path.glob("index_*.jsonl")
    records = [json.loads(line) for line in index.read_text().splitlines()]
    assert not any(record["recomputed"] for record in records)
    inputs = [r for r in records if (r["module"], r["tensor_name"]) == ("blocks.0", "input")]
    assert len(inputs) == 2


DIVIDED = """
from megatron.core import parallel_state
from megatron.fake_quant import policy
rank, options = torch.distributed.get_rank(), json.loads(sys.argv[2])
parallel_state.destroy_model_parallel()
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=options.pop("stages", 2))
policy.configure(recipe=options.pop("recipe", None))
idle = options.pop("idle", [])
model, loss = built(["stack", "gpt"][rank])
tensor_saver.configure(save_tensors=True, save_dir=sys.argv[1], **options)
with training_iteration(1):
    if rank not in idle:
        step(model, loss)
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collect_modules": ["blocks.*"]}, None),
        ({"collect_modules": ["nothing.*"]}, "'nothing.*' matches none of the "),
        ({"recipe": "recipe.yaml"}, "matcher 'other' with the pattern 'nothing' fits none"),
        ({"stages": 1, "idle": [0, 1]}, "nothing was collected in 1 iteration(s)"),
        ({"stages": 1, "idle": [0]}, None),
    ],
)
def test_what_no_rank_has_is_noticed_at_the_end_of_the_first_iteration(tmp_path, options, message):
    recipe = tmp_path / "recipe.yaml"
    matchers = [
        f"  {name}: {{config: mxfp8, type: glob, pattern: '{pattern}', enabled: true}}\n"
        for name, pattern in (("one", "blocks.*"), ("two", "decoder.*"), ("other", "nothing"))
    ]
    recipe.write_text("matchers:\n" + "".join(matchers))
    options |= {"recipe": str(recipe)} if "recipe" in options else {}
    script = tmp_path / "script.py"
    script.write_text(START + DIVIDED)
    words = [script, tmp_path / "dump", json.dumps(options)]
    done = forks.run(*words, ranks=2, env=environment(PYTHONPATH=REPO))
    assert done.returncode == int(message is not None), done.stderr
    assert message is None or message in done.stderr


LATER = """
model, loss = built("gpt")
with training_iteration(1):
    step(model, loss)
attention = model.decoder.layers[1].self_attention
first = attention.linear_proj
results = {}
with training_iteration(2):
    step(model, loss)
attention.linear_proj = torch.nn.Linear(HIDDEN, HIDDEN)
def train(number):
    with training_iteration(number):
        step(model, loss)
results["replaced"] = refusal(lambda: train(3))
attention.linear_proj = first
model.extra = torch.nn.Linear(HIDDEN, HIDDEN)
results["added"] = refusal(lambda: train(4))
print(json.dumps(results))
"""


def test_a_layer_that_is_replaced_after_the_first_iteration_is_noticed():
    results = report(LATER, CUSTOM_QUANT_TYPE="mxfp8")
    assert (
        "does not reach decoder.layers.1.self_attention.linear_proj, a Linear of"
        in (results["replaced"])
    )
    assert results["added"] is None
    log = "were replaced before iteration 4; not quantized and not collected: extra (Linear)"
    assert log in results["log"]


def test_fused_attention_is_refused_only_if_attention_was_requested():
    code = CHANGED.replace("(own_attention, own_linear, replaced, skipped)", "(own_attention,)")
    assert report(code, CUSTOM_QUANT_TYPE="linear_mxfp8")["own_attention"] is None
    message = report(code, CUSTOM_QUANT_TYPE="FA_mxfp8")["own_attention"]
    assert "core_attention (OwnAttention)" in message


NAMES = """
from megatron.collection.module_identity import Identified
def names(model):
    return [m.identity.name for m in model.modules() if isinstance(m, Identified)]

class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = foreign_models.Stack(), foreign_models.Stack()
        self.hidden = [foreign_models.Stack().blocks[0] for _ in range(2)]

    def forward(self, x):
        for layer in self.hidden:
            x = layer(x)[0]
        return self.left(x) + self.right(x)

x = torch.randn(SEQ, BATCH, HIDDEN)
two, stack, other = Two(), foreign_models.Stack(), foreign_models.Stack()
wrapped = torch.nn.ModuleDict({"module": stack})
wrapped.forward = lambda x: stack(x)
for model in (two, wrapped, other):
    model(x).sum().backward()
results = {
    "two": names(two), "stack": names(stack), "other": names(other),
    "hidden": [layer.identity.name for layer in two.hidden],
    "layers": [block.identity.layer_idx for block in other.blocks],
}
print(json.dumps(results))
"""


def test_names_come_from_the_outermost_module_and_are_unique():
    results = report(NAMES, CUSTOM_QUANT_TYPE="mxfp8")
    blocks = [f"blocks.{number}" for number in range(3)]
    assert results["two"] == [f"{side}.{name}" for side in ("left", "right") for name in blocks]
    assert results["stack"] == blocks
    assert results["other"] == [f"Stack_1.{name}" for name in blocks]
    assert results["hidden"] == [
        "ColumnParallelLinear",
        "ColumnParallelLinear_1.ColumnParallelLinear",
    ]
    assert results["layers"] == [0, 1, 2]


DELAYED = """
from megatron.core.pipeline_parallel import get_forward_backward_func
def gradients(train):
    model, loss = built("gpt")
    for number in (1, 2, 3):
        model.zero_grad()
        train(model, loss, number)
    return [p.grad for p in model.parameters() if p.grad is not None]

def schedules(model, loss, number):
    get_forward_backward_func()(
        forward_step_func=lambda _, model: (loss(model), lambda x: (x, {})),
        data_iterator=None, model=model, num_microbatches=2, seq_length=SEQ, micro_batch_size=BATCH,
    )

def loop(model, loss, number):
    with training_iteration(number):
        for _ in range(2):
            (loss(model) / 2).backward()

from megatron.collection.training_clock import clock
first = gradients(schedules)
clock.reset(0)
second = gradients(loop)
clock.reset(0)
print(json.dumps({"equal": all(map(torch.equal, first, second)), "count": len(first)}))
"""


@pytest.mark.parametrize("quantization", ["fp8_e4m3:delayed", "mxfp4:sr"])
def test_a_loop_computes_the_gradients_of_the_schedules(quantization):
    results = report(DELAYED, CUSTOM_QUANT_TYPE=quantization)
    assert results["count"] > 20
    assert results["equal"]
