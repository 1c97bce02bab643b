"""Run programs whose training loops have no pipeline schedules, each in a process of its own."""

import json

from tests import forks
from tests.core.gpt_runs import PRELUDE
from tests.subprocesses import REPO, environment

START = PRELUDE + (
    """
import json, logging
import foreign_models
from foreign_models import BATCH, SEQ, HIDDEN
from megatron.core import tensor_parallel
from megatron.core.low_precision import program_end
from megatron.core.tensor_saver import training_iteration
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

def refusal(function):
    try:
        function()
    except ValueError as error:
        program_end._refused.clear()  # this program expects it
        return str(error)

def step(model, loss):
    value = loss(model)
    value.backward()
    return value.item()

def built(name="stack"):
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1)
    return foreign_models.BUILDERS[name]()
"""
)


def run(code: str, *words: object, **variables: str):
    return forks.run("-c", START + code, *words, env=environment(PYTHONPATH=REPO, **variables))


def report(code: str, *words: object, **variables: str) -> dict:
    done = run(code, *words, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"log": done.stderr}
