"""Test arguments and outputs of megatron-core that only some of its releases have.

CONTRIBUTING.md explains how to run all tests with a release other than the recommended one.
"""

import pytest

from tests import forks
from tests.subprocesses import REPO, environment

SHARDED = """
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
matmul = ColumnParallelLinear._observed_matmul
flags = dict(gradient_accumulation_fusion=False, allreduce_dgrad=False, sequence_parallel=False)
matmul(None, None, None, None, None, bias=None, **flags, gtp_remat_size=4)
"""
OUTPUTS = """
import torch
from megatron.core.pipeline_parallel import schedules
x = torch.ones(1)
for output in (x, [x], {"vision": None, "text": x}, {"vision": [x], "text": None}, [{"text": x}]):
    assert schedules._first(output) is x, output
for output in (None, [], {}, {"vision": None}, [None]):
    assert not isinstance(schedules._first(output), torch.Tensor), output
"""
STEPS = """
import torch
from megatron.collection.training_clock import MicroBatch, clock
from megatron.core.pipeline_parallel import schedules
seen = []
x = torch.ones(1)
x._collected_micro_batch = MicroBatch(7, 3)
step = schedules._observed(lambda *tensors: seen.append((clock.micro_batch, clock.recomputing)))
step({"text": None}, {"text": x}, None)
assert seen == [(MicroBatch(7, 3), True)], seen
assert not clock.recomputing and clock.micro_batch != MicroBatch(7, 3)
if hasattr(schedules._upstream, "backward_step_multimodule"):
    replaced = schedules._upstream.backward_step_multimodule
    assert replaced is schedules.backward_step_multimodule and replaced.__wrapped__ is not replaced
"""


def run(code: str):
    return forks.run("-c", code, env=environment(PYTHONPATH=REPO))


def test_a_weight_that_is_sharded_inside_of_the_matmul_is_refused():
    result = run(SHARDED)
    assert result.returncode != 0
    assert "keeps 1/4 of its weight per rank and gathers it inside of the matmul" in result.stderr
    assert "set gtp_weight_remat_size and expert_gtp_weight_remat_size to 1" in result.stderr


@pytest.mark.parametrize("code", [OUTPUTS, STEPS], ids=["outputs", "steps"])
def test_the_modules_of_a_model_have_outputs_by_name(code):
    result = run(code)
    assert result.returncode == 0, result.stderr
