"""Test programs that replace the code of a layer, its formats or its compilation."""

import json
import sys

import pandas as pd
import pytest

from tests import subprocesses
from tests.core.own_loops import START, report, run
from tests.subprocesses import REPO, environment

REPLACED = """
from megatron.core.tensor_parallel import layers

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, 1).t() @ x.flatten(0, 1)

class OwnFunction(ColumnParallelLinear):
    def forward(self, x, weight=None, **_):
        return Product.apply(x, self.weight), None

class Elementwise(ColumnParallelLinear):
    def forward(self, x, weight=None, **_):
        return (x.unsqueeze(-2) * self.weight).sum(-1), None

class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
            return torch.autograd.grad(out, inputs, g)

class OwnAttention(type(built("gpt")[0].decoder.layers[0].self_attention.core_attention)):
    def forward(self, query, key, value, *args, **kwargs):
        out = Attention.apply(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
        return out.permute(2, 0, 1, 3).flatten(2)

def function(model):
    model.decoder.layers[0].mlp.linear_fc1.__class__ = OwnFunction

def elementwise(model):
    model.decoder.layers[0].mlp.linear_fc1.__class__ = Elementwise

def attention(model):
    model.decoder.layers[0].self_attention.core_attention.__class__ = OwnAttention

def plain(model):
    fc1 = model.decoder.layers[0].mlp.linear_fc1
    fc1._forward_impl = layers.linear_with_grad_accumulation_and_async_allreduce

def nothing(model):
    pass
"""
TRAINED = """
results = {}
for change in (function, elementwise, attention, plain, nothing):
    model, loss = built("gpt")
    change(model)
    def train(number):
        with training_iteration(number):
            step(model, loss)
    results[change.__name__] = refusal(lambda: train(1))
    if results[change.__name__] is None:
        step_two = refusal(lambda: train(2))
        fc1 = model.decoder.layers[1].mlp.linear_fc1
        fc1.forward = lambda x, **_: (torch.nn.functional.linear(x, fc1.weight), None)
        results["later"] = refusal(lambda: train(3))
        del fc1.forward
        results["again"] = refusal(lambda: train(4))
        upstream = ColumnParallelLinear.forward
        ColumnParallelLinear.forward = OwnFunction.forward
        results["class"] = refusal(lambda: train(5))
        ColumnParallelLinear.forward = upstream
        results["two"] = step_two
print(json.dumps(results))
"""
WARM_UP = """
configs: {}
matchers:
  warm: {config: bf16, type: glob, pattern: "*", iterations: 1-1, enabled: true}
  rest: {config: mxfp8, type: glob, pattern: "*.layers.*", enabled: true}
"""


@pytest.mark.parametrize("how", ["type", "recipe"])
def test_a_layer_whose_code_is_replaced_is_refused_however_it_multiplies(how, tmp_path):
    """The recipe has no format in the first iteration, in which the layers are observed."""
    recipe = tmp_path / "warm.yaml"
    recipe.write_text(WARM_UP)
    variables = {"CUSTOM_QUANT_TYPE": "mxfp8"} if how == "type" else {"QUANT_RECIPE": str(recipe)}
    results = report(REPLACED + TRAINED, **variables)
    fc1, attention = "0.mlp.linear_fc1", "0.self_attention.core_attention"
    classes = {"function": "OwnFunction", "elementwise": "Elementwise", "plain": "ColumnParallel"}
    for name, kind in classes.items():
        assert f" applies to decoder.layers.{fc1} ({kind}" in results[name], name
    assert f"decoder.layers.{attention} (OwnAttention), but other code has" in results["attention"]
    assert results["nothing"] is None
    assert results["two"] is None
    assert " applies to decoder.layers.1.mlp.linear_fc1" in results["later"]
    assert results["again"] is None
    assert " applies to decoder.layers.0.self_attention.linear_qkv" in results["class"]
    assert "modules of the model GPTModel were replaced before iteration 3" in results["log"]


COLLECTED = """
results = {}
for change in (function, nothing):
    model, loss = built("gpt")
    change(model)
    tensor_saver.configure(
        save_tensors=True, save_dir=f"{sys.argv[1]}/{change.__name__}", **json.loads(sys.argv[2])
    )
    def train():
        with training_iteration(1):
            step(model, loss)
    results[change.__name__] = refusal(train)
    tensor_saver.close()
print(json.dumps(results))
"""


@pytest.mark.parametrize("selected", [{}, {"collect_modules": ["core_attention"]}])
def test_a_layer_whose_code_is_replaced_is_refused_if_it_is_to_be_collected(selected, tmp_path):
    results = report(REPLACED + COLLECTED, tmp_path, json.dumps(selected))
    message = "tensor collection includes decoder.layers.0.mlp.linear_fc1 (OwnFunction), but other"
    assert (results["function"] is None) == bool(selected)
    assert selected or message in results["function"]
    assert results["nothing"] is None


FORMATS = """
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import dot_product_attention
from megatron.fake_quant import policy

ran = []
def counted(a, b, formats, **rest):
    ran.append(formats.fprop_a.format.name)
    return matmul(a, b, formats, **rest)
matmul = layers.quantized_matmul
layers.quantized_matmul = dot_product_attention.quantized_matmul = counted

model, loss = built("gpt")
def scheduled(number):
    get_forward_backward_func()(
        forward_step_func=lambda _, m: (loss(m), lambda x: (x, {"loss": x.detach()})),
        data_iterator=None, model=model, num_microbatches=2, seq_length=SEQ,
        micro_batch_size=BATCH,
    )
def looped(number):
    with training_iteration(number):
        step(model, loss)
def evaluated(number):
    with torch.no_grad():
        loss(model)

results = {}
for number, kind in enumerate(sys.argv[2:], 1):
    policy.configure(custom_quant_type=kind)
    ran.clear()
    globals()[sys.argv[1]](number)
    results[kind] = sorted(set(ran)), len(ran)
if sys.argv[1] == "evaluated":
    import copy
    groups = {id(x): x for m in model.modules() for x in vars(m).values()
              if isinstance(x, torch.distributed.ProcessGroup)}
    groups |= {id(x): x for m in model.modules() if hasattr(m, "pg_collection")
               for x in [m.pg_collection]}
    model = copy.deepcopy(model, dict(groups))
    policy.configure(custom_quant_type="mxfp4")
    ran.clear()
    evaluated(0)
    results["copy"] = sorted(set(ran)), len(ran)
print(json.dumps(results))
"""


@pytest.mark.parametrize("how", ["scheduled", "looped", "evaluated"])
def test_other_formats_apply_from_the_next_forward_pass_on(how):
    kinds = ["mxfp8", "linear_mxfp4", "none", "nvfp4:sr"]
    kinds += [] if how == "evaluated" else ["fp8_e4m3:delayed"]
    results = report(FORMATS, how, *kinds)
    passes = 2 if how == "scheduled" else 1
    assert results["mxfp8"] == [["mxfp8"], 12 * passes]
    assert results["linear_mxfp4"] == [["mxfp4"], 8 * passes]
    assert results["none"] == [[], 0]
    assert results["nvfp4:sr"] == [["nvfp4:sr"], 12 * passes]
    if how != "evaluated":
        assert results["fp8_e4m3:delayed"] == [["fp8_e4m3:delayed"], 12 * passes]
    else:
        assert results["copy"] == [["mxfp4"], 12]
    assert results["log"].count("decoder.layers.0-1.mlp.linear_fc1") >= len(kinds) - 1, "audits"


DELAYED = """
from megatron.fake_quant import policy
losses = []
for evaluates in (False, True):
    model, loss = built("gpt")
    policy.configure(custom_quant_type="none")
    if evaluates:
        policy.configure(custom_quant_type="fp8_e4m3:delayed")  # after the model was built
    else:
        policy.configure(custom_quant_type="fp8_e4m3:delayed")
        model, loss = built("gpt")
    from megatron.collection.training_clock import clock
    clock.iteration = 0
    for number in range(1, 6):
        with training_iteration(number):
            losses.append(step(model, loss))
        if number == 3:
            if evaluates:
                policy.configure(custom_quant_type="none")
            with torch.no_grad():
                loss(model)  # takes a batch in both cases
            policy.configure(custom_quant_type="fp8_e4m3:delayed")
print(json.dumps({"losses": losses}))
"""


def test_amax_histories_stay_while_other_formats_are_evaluated():
    losses = report(DELAYED)["losses"]
    assert losses[:5] == losses[5:]


WRAPPED = """
from megatron.fake_quant import policy
class Distill(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.loss = built("gpt")
        self.student = built("gpt")[0]
    def forward(self, _):
        policy.configure(custom_quant_type="none")
        with torch.no_grad():
            target = self.loss(self.teacher)
        policy.configure(custom_quant_type="mxfp8")
        return (self.loss(self.student) - target).square()
model = Distill()
print(json.dumps({"refusals": [refusal(lambda: step(model, lambda m: m(1))) for _ in range(2)]}))
"""


def test_formats_may_change_within_a_forward_pass():
    assert report(WRAPPED)["refusals"] == [None, None]


SKIPPED = """
class Dropped(ColumnParallelLinear):
    skip = True
    def forward(self, x, weight=None, **rest):
        if self.skip:
            return torch.cat([x] * 4, -1)[..., : self.weight.shape[0]], None
        return super().forward(x, weight, **rest)

model, loss = built("gpt")
fc1 = model.decoder.layers[0].mlp.linear_fc1
fc1.__class__ = Dropped
results = []
for number, Dropped.skip in enumerate((True, False, True), 1):
    def train():
        with training_iteration(number):
            step(model, loss)
    results.append(refusal(train))
print(json.dumps({"refusals": results}))
"""


def test_a_layer_that_is_skipped_is_not_taken_for_replaced():
    assert report(SKIPPED, CUSTOM_QUANT_TYPE="mxfp8")["refusals"] == [None] * 3


LATE = """
from megatron.fake_quant import policy
model, loss = built("gpt")
from megatron.core.low_precision import model_roots
with torch.no_grad():
    loss(model)
    model_roots._calls = model_roots.PATIENCE  # as after many calls
    model_roots._hook and model_roots._hook.remove()
    model_roots._hook = None
    policy.configure(custom_quant_type="linear_mxfp4")
    loss(model)
print(json.dumps({}))
"""


def test_formats_that_change_after_many_calls_are_announced():
    log = report(LATE, CUSTOM_QUANT_TYPE="mxfp8")["log"]
    assert "format mxfp8 in the evaluation of GPTModel" in log
    assert "format linear_mxfp4 in the evaluation of GPTModel" in log


CARD = """
from megatron.fake_quant import policy
model, loss = built("gpt")
policy.configure(custom_quant_type="mxfp8")
tensor_saver.configure(save_tensors=True, save_dir=sys.argv[1])
def train(number):
    with training_iteration(number):
        step(model, loss)
train(1)
results = {"open": refusal(lambda: policy.configure(custom_quant_type="mxfp4"))}
results["type"] = policy.current().quant_type
policy.configure(linear="mxfp8", qk="mxfp8", pv="mxfp8")
tensor_saver.close()
policy.configure(custom_quant_type="mxfp4")
results["closed"] = policy.current().quant_type
print(json.dumps(results))
"""


def test_the_formats_stay_while_a_run_card_states_them(tmp_path):
    results = report(CARD, tmp_path)
    assert "the formats cannot change while tensors are collected" in results["open"]
    assert (results["type"], results["closed"]) == ("mxfp8", "mxfp4")


COMPILED = """
results = {}
for what in sys.argv[1:]:
    model, loss = built("gpt")
    if what == "whole":
        model.compile(backend="eager")
    elif what == "layers":
        for layer in model.decoder.layers:
            layer.mlp.linear_fc1.compile(backend="eager")
    elif what == "methods":
        fc1 = model.decoder.layers[0].mlp.linear_fc1
        fc1.forward = torch.compile(fc1.forward, backend="eager")
    elif what == "teacher":
        teacher = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
        teacher.compile(backend="eager")
        with torch.no_grad():
            results[what] = refusal(lambda: teacher(torch.ones(2, 4)))
        continue
    elif what == "part":
        model.decoder.layers[1].mlp.compile(backend="eager")
        function(model)
    else:
        del model.decoder.layers[1:]  # one layer is enough, and tracing each takes seconds
        model = torch.compile(model, backend="eager")
    results[what] = refusal(lambda: step(model, loss))
print(json.dumps(results))
"""


def test_a_model_that_is_compiled_with_its_hooks_is_refused():
    env = environment(PYTHONPATH=REPO, CUSTOM_QUANT_TYPE="mxfp8", TORCHDYNAMO_DISABLE="0")
    others = ["teacher", "layers", "methods", "returned"]
    words = [sys.executable, "-c", START + REPLACED + COMPILED, *others, "part", "whole"]
    done = subprocesses.run(words, env=env)
    results = json.loads(done.stdout)
    assert "GPTModel.compile() compiles together with its hooks" in results["whole"], done.stderr
    assert [results[what] for what in others] == [None] * 4
    assert "0.mlp.linear_fc1 (OwnFunction), but other code has" in results["part"]


def test_a_model_that_would_be_compiled_is_checked_where_nothing_is_compiled():
    results = report(COMPILED, "whole", CUSTOM_QUANT_TYPE="mxfp8")
    assert results["whole"] is None
    assert "format mxfp8 in the model GPTModel:" in results["log"]
    results = report(
        REPLACED + COMPILED.replace("model.comp", "function(model); model.comp"),
        "whole",
        CUSTOM_QUANT_TYPE="mxfp8",
    )
    assert "0.mlp.linear_fc1 (OwnFunction), but other code has" in results["whole"]


RETRIED = """
model, loss = built("gpt")
if len(sys.argv) > 2:
    tensor_saver.configure(save_tensors=True, save_dir=sys.argv[2], control_iter=2)
numbers = []
from megatron.collection.training_clock import clock
from megatron.core.pipeline_parallel import get_forward_backward_func
def failing(m):
    value = loss(m)
    numbers.append(clock.iteration)
    if len(numbers) == 1:
        raise RuntimeError("out of memory")
    return value
def train(number):
    if sys.argv[1] == "loop":
        with training_iteration(number):
            step(model, failing)
    else:
        get_forward_backward_func()(
            forward_step_func=lambda _, m: (failing(m), lambda x: (x, {"loss": x.detach()})),
            data_iterator=None, model=model, num_microbatches=1, seq_length=SEQ,
            micro_batch_size=BATCH,
        )
for number in (1, 2, 3):
    try:
        train(number)
    except RuntimeError:
        if sys.argv[-1] == "last":
            break
        train(number)
from megatron.core.low_precision import first_forward, quantized_module
assert not (first_forward._open or quantized_module.observers)
print(json.dumps({"numbers": numbers}))
"""


@pytest.mark.parametrize("how", ["loop", "schedule"])
def test_an_iteration_that_fails_may_be_repeated_but_is_not_a_whole_collection(how, tmp_path):
    assert report(RETRIED, how, CUSTOM_QUANT_TYPE="mxfp8")["numbers"] == [1, 1, 2, 3]
    for more in ([], ["last"]):
        folder = tmp_path / how / "".join(more)
        done = run(RETRIED, how, folder, *more)
        assert done.returncode == 1, done.stderr
        assert "iteration 1 ended with an exception that the program handled, so the" in done.stderr
        (card,) = folder.glob("run_*.json")
        assert json.loads(card.read_text())["status"] == "failed"


INTERRUPTED = """
from megatron.core.low_precision import first_forward, quantized_module
model, loss = built("gpt")
def interrupted(m):
    handle = m.decoder.register_forward_pre_hook(stop)
    try:
        return loss(m)
    finally:
        handle.remove()
def stop(*_):
    assert first_forward._open
    raise KeyboardInterrupt
try:
    with training_iteration(1):
        step(model, interrupted)
except KeyboardInterrupt:
    pass
assert not (first_forward._open or quantized_module.observers)
with training_iteration(1):
    step(model, loss)
print(json.dumps({}))
"""


def test_an_interrupted_forward_pass_leaves_no_observer():
    report(INTERRUPTED, CUSTOM_QUANT_TYPE="mxfp8")


STATISTICS = """
model, loss = built("gpt")
tensor_saver.configure(tensor_statistics=1, save_dir=sys.argv[1])
def failing(m):
    loss(m).backward()
    raise RuntimeError("out of memory")
for how in (failing, loss):
    try:
        with training_iteration(1):
            step(model, how)
    except RuntimeError:
        pass
print(json.dumps({"failure": tensor_saver.close()}))
"""


def test_statistics_of_a_failed_attempt_are_discarded(tmp_path):
    assert report(STATISTICS, tmp_path)["failure"] is None
    table = pd.read_parquet(next(tmp_path.rglob("operands_*.parquet")))
    keys = ["module", "operation", "gemm", "tensor"]
    assert len(table)
    assert not table.duplicated(keys).any()
