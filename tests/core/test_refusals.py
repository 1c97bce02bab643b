"""A format or a collection that would not apply is an error, never a silent no-op."""

from pathlib import Path

import pytest

from tests import forks
from tests.core.gpt_runs import BUILD, PRELUDE
from tests.subprocesses import REPO, environment

WHEEL_LINEAR = """
from megatron.core.tensor_parallel import _upstream_layers as wheel
make = gpt_layer_specs.get_gpt_layer_local_spec
def spec(**options):
    found = make(**options)
    mlp = found.submodules.mlp  # a partial function since megatron-core 0.19
    mlp = getattr(mlp, "submodules", None) or mlp.keywords["submodules"]
    mlp.linear_fc1 = wheel.ColumnParallelLinear
    return found
gpt_layer_specs.get_gpt_layer_local_spec = spec
"""
WHEEL_ATTENTION = """
from megatron.core.transformer import _upstream_dot_product_attention as wheel
make = gpt_layer_specs.get_gpt_layer_local_spec
def spec(**options):
    found = make(**options)
    found.submodules.self_attention.submodules.core_attention = wheel.DotProductAttention
    return found
gpt_layer_specs.get_gpt_layer_local_spec = spec
"""
RECIPE = """
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.models.gpt import GPTModel
import megatron.core.transformer.transformer_config as config
recipe = RecipeConfig.from_config_dict({"matchers": {}, "configs": {}})
after = config.TransformerConfig.__post_init__
def post_init(self):
    after(self)
    self.quant_recipe = recipe
config.TransformerConfig.__post_init__ = post_init
"""


def snippet(code: str, **variables: str):
    env = environment(PYTHONPATH=REPO, **variables)
    return forks.run("-c", PRELUDE + code, env=env)


@pytest.mark.parametrize(
    ("foreign", "name"),
    [(WHEEL_LINEAR, "mlp.linear_fc1"), (WHEEL_ATTENTION, "self_attention.core_attention")],
    ids=["linear", "attention"],
)
@pytest.mark.parametrize("asked", ["format", "collection", "nothing"])
def test_layers_that_are_not_ours_are_refused(tmp_path, foreign, name, asked):
    variables = {
        "format": {"CUSTOM_QUANT_TYPE": "mxfp4"},
        "collection": {"TENSOR_SAVE_ENABLED": "true", "TENSOR_SAVE_DIR": str(tmp_path)},
        "nothing": {},
    }[asked]
    result = snippet(foreign + BUILD, **variables)
    if asked == "nothing":
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode != 0
        assert f"does not reach decoder.layers.0.{name}, a " in result.stderr


def test_a_recipe_next_to_a_format_is_refused():
    result = snippet(RECIPE + BUILD, CUSTOM_QUANT_TYPE="mxfp8")
    assert "format mxfp8 is set and so is the configuration's quant_recipe" in result.stderr
    assert snippet(RECIPE + BUILD).returncode == 0


def test_a_model_that_would_bypass_the_formats_is_refused():
    """Other trainers are stopped by the coverage check; our trainer already refuses the flags."""
    code = BUILD + (
        "from megatron.core.low_precision.coverage_check import check_coverage\n"
        "check_coverage(model, collecting=False)\n"
        "model.config.%s\n"
        "check_coverage(model, collecting=False)\n"
    )
    for bypass in ("cuda_graph_impl = 'local'", "overlap_moe_expert_parallel_comm = True"):
        result = snippet(code % bypass, CUSTOM_QUANT_TYPE="mxfp8")
        name, _, value = bypass.partition(" = ")
        assert f"format mxfp8 does not reach a model with {name}={value}" in result.stderr
    assert snippet(code % bypass).returncode == 0, "no format was requested"


def test_a_schedule_without_a_start_is_refused(tmp_path):
    """A trainer that resumes at iteration 1000 must report it, or the recipe starts at 1."""
    path = tmp_path / "late.yaml"
    matcher = "{config: mxfp8, type: glob, pattern: '*', iterations: 5-, enabled: true}"
    path.write_text(f"matchers:\n  late: {matcher}\n")
    code = BUILD + (
        "from megatron.core.pipeline_parallel import schedules\n"
        "%s"
        "schedules._counted(lambda **options: [])(model=model, seq_length=32)\n"
    )
    said = "tensor_saver.configure(dict(iteration=4), iteration=4)\n"
    assert snippet(code % said, QUANT_RECIPE=str(path)).returncode == 0
    result = snippet(code % "", QUANT_RECIPE=str(path))
    assert "depends on the iteration, but this trainer has not set the current one" in result.stderr


def test_the_lm_head_stays_in_high_precision():
    code = BUILD + (
        "assert model.output_layer.formats_of('linear') is None\n"
        "assert model.output_layer.identity.is_lm_head\n"
        "formats = model.decoder.layers[1].mlp.linear_fc2.formats_of('linear')\n"
        "assert formats.wgrad_c.format.name == 'mxfp8'\n"
        "from megatron.core.low_precision import program_end\n"
        "program_end.leave_exit_to_launcher()  # no model runs\n"
    )
    result = snippet(code, CUSTOM_QUANT_TYPE="mxfp8")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "arguments",
    ["gradient_accumulation_fusion=True", "grad_output_buffer=[]"],
)
def test_weight_gradients_that_are_computed_elsewhere_are_refused(arguments):
    code = BUILD + (
        "layer = model.decoder.layers[0].mlp.linear_fc1\n"
        "options = dict(bias=None, gradient_accumulation_fusion=False, allreduce_dgrad=False,\n"
        f"    sequence_parallel=False, tp_group=layer.tp_group) | dict({arguments})\n"
        "layer._forward_impl(input=torch.ones(2, 1, 64), weight=layer.weight, **options)\n"
    )
    result = snippet(code, CUSTOM_QUANT_TYPE="mxfp8")
    assert "ValueError: gradient-accumulation fusion and deferred" in result.stderr


def test_attention_biases_are_refused_under_a_format():
    code = BUILD + (
        "attention = model.decoder.layers[0].self_attention.core_attention\n"
        "x = torch.ones(2, 1, 4, 16)\n"
        "attention(x, x[:, :, :2], x[:, :, :2], None, attention_bias=torch.ones(1))\n"
    )
    result = snippet(code, CUSTOM_QUANT_TYPE="FA_mxfp8")
    assert "ValueError: quantized attention takes neither an attention bias" in result.stderr


def test_a_schedule_that_bypasses_the_clock_is_refused(tmp_path):
    code = (
        "from megatron.core.pipeline_parallel import schedules\n"
        "schedules._counted(lambda **options: [])(model=None, seq_length=1)\n"
    )
    saving = {"TENSOR_SAVE_ENABLED": "true", "TENSOR_SAVE_DIR": str(tmp_path)}
    assert "does not call forward_step, so nothing was collected" in snippet(code, **saving).stderr
    assert snippet(code).returncode == 0


def test_an_expert_without_tokens_is_quantized_like_any_other():
    code = BUILD + (
        "layer = model.decoder.layers[0].mlp.linear_fc1\n"
        "output, _ = layer(torch.zeros(0, 64, requires_grad=True))\n"
        "assert output.shape == (0, 192)\n"
        "output.sum().backward()\n"
        "assert not layer.weight.grad.any()\n"
    )
    result = snippet(code, CUSTOM_QUANT_TYPE="mxfp8")
    assert result.returncode == 0, result.stderr


TWO_RANKS = (
    PRELUDE.replace("parse([])", "parse(['--tp', '2'])")
    + """
import os
rank = int(os.environ["RANK"])
%s
try:
    tensor_saver.configure(save_tensors=True, save_dir=sys.argv[1])
except ValueError as error:
    open(sys.argv[2] + str(rank), "w").write(str(error))
torch.distributed.barrier()  # a rank that left first would tear down the other's connections
torch.distributed.destroy_process_group()
"""
)


def both_ranks(tmp_path, code: str) -> list[str]:
    """Return what `configure` raised on each of two ranks."""
    script = tmp_path / "script.py"
    script.write_text(TWO_RANKS % code)
    said = tmp_path / "said"
    env = environment(PYTHONPATH=REPO)
    result = forks.run(script, tmp_path / "dump", said, ranks=2, env=env)
    assert result.returncode == 0, result.stderr[-2000:]
    return [Path(f"{said}{rank}").read_text() for rank in (0, 1)]


def test_what_one_rank_cannot_write_stops_all_ranks_and_none_hangs(tmp_path):
    code = "if rank == 1:\n    sys.argv[1] = '/proc/nowhere'"
    first, second = both_ranks(tmp_path, code)
    assert first == second
    assert "cannot write to the tensor folder /proc/nowhere" in first


def test_a_run_card_that_cannot_be_written_stops_all_ranks(tmp_path):
    code = (
        "from megatron.collection import record_writer\n"
        "def full(*args, **kwargs): raise OSError(28, 'No space left on device')\n"
        "if rank == 0:\n    record_writer.CardFile.write = full"
    )
    first, second = both_ranks(tmp_path, code)
    assert first == second
    assert "No space left on device" in first


def test_a_switch_that_differs_between_ranks_is_refused(tmp_path):
    code = (
        "configure = tensor_saver.configure\n"
        "tensor_saver.configure = lambda **options: configure(**options | "
        "{'save_tensors': rank == 1})"
    )
    first, second = both_ranks(tmp_path, code)
    assert first == second
    assert "saving tensors is enabled only on rank(s) 1 of 2;" in first
