"""Test stochastic rounding in the layers: repeatable where it must be, different elsewhere."""

import json
from pathlib import Path

from tests import forks
from tests.core.gpt_runs import BUILD, PRELUDE, reports
from tests.subprocesses import REPO, environment

SEEDS = """
import json
from megatron.collection.training_clock import MicroBatch, clock
layers = [model.decoder.layers[i].mlp.linear_fc1 for i in (0, 1)]
attention = model.decoder.layers[0].self_attention.core_attention
formats = layers[0].formats_of("linear")
clock.seed = 7

def seeds():
    found = [layer.rounding_seed(formats) for layer in layers]
    return found + [attention.rounding_seed(formats, op) for op in ("qk", "pv")]

report = {"places": [], "tracked": []}
for iteration, index in ((1, 0), (1, 1), (2, 0)):
    clock.micro_batch = MicroBatch(iteration, index)
    report["places"] += seeds()
torch.manual_seed(99)  # also what a fork of the random states does
report["again"] = seeds()
clock.micro_batch = None
with torch.no_grad():
    report["evaluation"] = seeds()
before = torch.get_rng_state()
tokens = torch.zeros(2, 32, dtype=torch.long)
mask = torch.ones(32, 32).triu(1).bool().view(1, 1, 32, 32)
with torch.no_grad():
    losses = [model(tokens, torch.arange(32).expand(2, 32), mask, labels=tokens) for _ in range(2)]
report["same_loss"] = torch.equal(*losses)
report["same_state"] = torch.equal(before, torch.get_rng_state())
clock.seed = 8
with torch.no_grad():
    report["other"] = seeds()
print(json.dumps(report))
"""


def test_a_seed_follows_from_run_layer_operation_iteration_and_micro_batch():
    done = forks.run(
        "-c",
        PRELUDE + BUILD + SEEDS,
        env=environment(PYTHONPATH=REPO, CUSTOM_QUANT_TYPE="mxfp4:sr"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    all_seeds = report["places"] + report["evaluation"] + report["other"]
    assert len(set(all_seeds)) == len(all_seeds) == 12 + 4 + 4
    assert report["again"] == report["places"][-4:], "the seeds depend on torch's generator"
    assert report["same_loss"]
    assert report["same_state"], "evaluation draws from torch's generator"


def test_a_recomputed_forward_pass_rounds_as_the_first_one_did(tmp_path):
    env = environment(PYTHONPATH=REPO, CUSTOM_QUANT_TYPE="mxfp4:sr")
    (kept,) = reports(tmp_path / "kept", env, 1)
    (recomputed,) = reports(tmp_path / "recomputed", env, 1, "--recompute")
    (again,) = reports(tmp_path / "again", env, 1)
    nearest = env | {"CUSTOM_QUANT_TYPE": "mxfp4"}
    (plain,) = reports(tmp_path / "plain", nearest, 1)
    for key in ("losses", "grads"):
        assert kept[key] == recomputed[key] == again[key]
        assert kept[key] != plain[key]


RANKS = """
import json, os
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.low_precision.quantized_module import Quantized
seeds, own = [], Quantized.rounding_seed

def noted(self, *args):
    seeds.append(own(self, *args))
    return seeds[-1]

Quantized.rounding_seed = noted
get_forward_backward_func()(
    forward_step_func=gpt_worker.forward_step, data_iterator=gpt_worker.batches(), model=model,
    num_microbatches=2, seq_length=gpt_worker.SEQ, micro_batch_size=gpt_worker.BATCH,
)
open(sys.argv[1] + os.environ["RANK"], "w").write(json.dumps(seeds))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_tensor_parallel_ranks_have_the_same_seeds(tmp_path):
    """The ranks' inputs are replicas of one tensor, so they need the same random bits.

    The wheel's forked random states differ between the ranks under sequence parallelism.
    """
    script, out = tmp_path / "script.py", tmp_path / "seeds"
    start = PRELUDE.replace("parse([])", "parse(['--tp', '2', '--sequence-parallel'])")
    script.write_text(start + BUILD + RANKS)
    env = environment(PYTHONPATH=REPO, CUSTOM_QUANT_TYPE="mxfp4:sr")
    done = forks.run(script, out, ranks=2, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (json.loads(Path(f"{out}{rank}").read_text()) for rank in (0, 1))
    assert first == second
    matmuls = 2 * (4 + 2)  # two layers, each with four linear layers, QK^T and PV
    assert len(set(first)) == len(first) == 2 * matmuls
