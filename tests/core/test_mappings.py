"""Test communication between two gloo ranks where megatron-core itself is wrong or fails."""

import json
from pathlib import Path

import pytest

from tests import forks
from tests.subprocesses import REPO, environment

SCRIPT = """
import json, os, sys
import torch
import megatron.cpu_backend
if not torch.cuda.is_available():
    megatron.cpu_backend.activate()
from megatron.core.tensor_parallel import mappings
torch.distributed.init_process_group("gloo")
rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD

x = torch.ones(2, 3, requires_grad=True)
gradient = (torch.arange(6.0).view(3, 2) + 10 * rank).t()  # not contiguous
mappings.copy_to_tensor_model_parallel_region(x, group=group).backward(gradient)
said = {"sum": x.grad.tolist()}
for sizes in ([1, 3], [0, 2], [2, 2]):
    own = torch.full((sizes[rank], 2), rank + 1.0, requires_grad=True)
    gathered = mappings.gather_from_sequence_parallel_region(
        own, group=group, output_split_sizes=sizes
    )
    gathered.backward(torch.arange(2.0 * sum(sizes)).view(-1, 2) * (rank + 1))
    said[str(sizes)] = [gathered.tolist(), own.grad.tolist()]
open(sys.argv[1] + str(rank), "w").write(json.dumps(said))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("mappings")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    result = forks.run(script, folder / "rank", ranks=2, env=environment(PYTHONPATH=REPO))
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(Path(f"{folder / 'rank'}{rank}").read_text()) for rank in (0, 1)]


def test_a_gradient_that_is_not_contiguous_is_summed(said):
    expected = [[10.0, 14.0, 18.0], [12.0, 16.0, 20.0]]
    assert [each["sum"] for each in said] == [expected, expected]


@pytest.mark.parametrize("sizes", [[1, 3], [0, 2], [2, 2]], ids=str)
def test_parts_of_any_size_are_gathered_and_their_gradients_summed(said, sizes):
    whole = [[1.0, 1.0]] * sizes[0] + [[2.0, 2.0]] * sizes[1]
    gradient = [[6.0 * row, 6.0 * row + 3.0] for row in range(sum(sizes))]
    parts = [gradient[: sizes[0]], gradient[sizes[0] :]]
    for rank, each in enumerate(said):
        assert each[str(sizes)] == [whole, parts[rank]]
