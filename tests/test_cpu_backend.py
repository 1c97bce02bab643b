"""Test that megatron-core runs without CUDA, and that nothing is replaced if there is a device."""

import pytest

from tests import forks
from tests.subprocesses import REPO, environment

PREAMBLE = "import torch\nfrom megatron import cpu_backend\n"


def python(code: str, **env: str):
    env = environment(PYTHONPATH=REPO, **env)
    return forks.run("-c", PREAMBLE + code, env=env, libraries_only=True)


def test_every_name_has_a_reason_and_exists_in_torch():
    result = python(
        "from operator import attrgetter\n"
        "for name in cpu_backend.NAMES + cpu_backend.SCRIPT_NAMES:\n"
        "    assert len(name.reason) > 10, name\n"
        "    assert attrgetter(name.path)(torch) is not None, name\n"
        "paths = [name.path for name in cpu_backend.NAMES + cpu_backend.SCRIPT_NAMES]\n"
        "assert len(paths) == len(set(paths))\n"
    )
    assert result.returncode == 0, result.stderr


def test_importing_it_changes_nothing_and_activating_changes_what_it_lists():
    result = python(
        "from operator import attrgetter\n"
        "before = {n.path: attrgetter(n.path)(torch) for n in cpu_backend.NAMES}\n"
        "assert not cpu_backend.is_active()\n"
        "assert all(before[n.path] is not n.value for n in cpu_backend.NAMES)\n"
        "assert cpu_backend.activate() is True\n"
        "assert cpu_backend.activate() is False, 'the second call does nothing'\n"
        "assert cpu_backend.is_active()\n"
        "assert all(attrgetter(n.path)(torch) is n.value for n in cpu_backend.NAMES)\n"
        "assert not torch.cuda.is_available(), 'a program may still ask'\n"
    )
    assert result.returncode == 0, result.stderr


def test_tensors_stay_on_the_cpu():
    result = python(
        "cpu_backend.activate()\n"
        "here = torch.device('cpu')\n"
        "made = [torch.zeros(2, device='cuda'), torch.ones(2).cuda(),"
        " torch.tensor(1, device='cuda'), torch.tensor(1, device='cpu', pin_memory=True),"
        " torch.empty(2, device=torch.cuda.current_device()), torch.cuda.FloatTensor([1.0]),"
        " torch.nn.Linear(2, 2).cuda().weight]\n"
        "assert all(t.device == here for t in made)\n"
        "assert torch.ones(1).type() == 'torch.cuda.FloatTensor'\n"
        "assert torch.ones(1).type('torch.cuda.HalfTensor').dtype == torch.float16\n"
    )
    assert result.returncode == 0, result.stderr


def test_scripts_create_and_move_tensors_on_the_cpu():
    result = python(
        "cpu_backend.activate_for_scripts()\n"
        "gpu, x = torch.device('cuda', 0), torch.ones(2)\n"
        "tensors = [x.to('cuda'), x.to(gpu, torch.float64), x.to(device='cuda:1'),"
        " x.new_zeros(2, device=gpu), x.pin_memory(), torch.rand_like(x, device=gpu),"
        " torch.arange(3, device='cuda'), torch.full((2,), 1.0, device=gpu),"
        " torch.randn(2, device='cuda', pin_memory=True), torch.as_tensor([1], device=gpu),"
        " torch.nn.Linear(2, 2).to(gpu).weight, x.to(0), x.to(device=1), torch.ones(2, device=0),"
        " torch.randn(2, device=0), torch.nn.Linear(2, 2, device=0).to(0).weight]\n"
        "assert all(t.device.type == 'cpu' for t in tensors)\n"
        "assert tensors[1].dtype == torch.float64\n"
        "with torch.cuda.device(1):\n"
        "    torch.cuda.set_device(gpu)\n"
        "assert x.new_full((2,), 0).tolist() == [0, 0], 'not the index of a device'\n"
        "assert torch.cuda.get_device_capability() == (0, 0)\n"
        "assert torch.cuda.is_bf16_supported()\n"
        "assert 'no memory' in torch.cuda.memory_summary()\n"
        "torch.set_default_device('cuda')\n"
        "assert torch.ones(1).device.type == 'cpu'\n"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("activate", ["activate", "activate_for_scripts"])
def test_the_default_device_counts_unless_it_is_a_gpu(activate):
    result = python(
        f"cpu_backend.{activate}()\n"
        "made = {\n"
        "    'zeros': lambda: torch.zeros(2), 'tensor': lambda: torch.tensor([1.0]),\n"
        "    'empty': lambda: torch.empty(2, dtype=torch.bfloat16),\n"
        "    'randn': lambda: torch.randn(2), 'full': lambda: torch.full((2,), 1.0),\n"
        "    'Linear': lambda: torch.nn.Linear(2, 3).weight,\n"
        "}\n"
        "def types():\n"
        "    return {name: make().device.type for name, make in made.items()}\n"
        "for device in ('meta', 'cpu', 'cuda', 'cuda:1'):\n"
        "    expected = dict.fromkeys(made, 'meta' if device == 'meta' else 'cpu')\n"
        "    with torch.device(device):\n"
        "        assert types() == expected, (device, types())\n"
        "        assert torch.zeros(2, device='cpu').device.type == 'cpu'\n"
        "    assert set(types().values()) == {'cpu'}, device\n"
        "    torch.set_default_device(device)\n"
        "    assert types() == expected, (device, types())\n"
        "    assert torch.get_default_device().type == expected['zeros']\n"
        "    torch.set_default_device(None)\n"
        "    assert set(types().values()) == {'cpu'}, device\n"
    )
    assert result.returncode == 0, result.stderr


def test_default_devices_end_with_their_blocks_and_may_be_set_before():
    result = python(
        "def kinds():\n"
        "    return torch.zeros(2).device.type, torch.nn.Linear(2, 2).weight.device.type\n"
        "torch.set_default_device('cuda')\n"
        "with torch.device('cuda:1'):\n"
        "    cpu_backend.activate()\n"
        "    assert kinds() == ('cpu', 'cpu')\n"
        "    with torch.device('meta'):\n"
        "        assert kinds() == ('meta', 'meta')\n"
        "        with torch.device('cuda'):\n"
        "            assert kinds() == ('cpu', 'cpu')\n"
        "        assert kinds() == ('meta', 'meta')\n"
        "        try:\n"
        "            with torch.device('cpu'):\n"
        "                raise ValueError\n"
        "        except ValueError:\n"
        "            assert kinds() == ('meta', 'meta')\n"
        "assert kinds() == ('cpu', 'cpu')\n"
    )
    assert result.returncode == 0, result.stderr


def test_only_the_script_is_told_that_there_is_a_device(tmp_path):
    question = "import torch\nanswers = torch.cuda.is_available(), torch.cuda.device_count()\n"
    for name in ("script", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}_module.py").write_text(question)
    result = python(
        "import sys\n"
        "from pathlib import Path\n"
        f"here = Path({str(tmp_path)!r})\n"
        "sys.path += [str(here / 'script'), str(here / 'other')]\n"
        "cpu_backend.activate_for_scripts(here / 'script')\n"
        "import other_module, script_module\n"
        "assert script_module.answers == (True, 4)\n"
        "assert other_module.answers == (False, 0)\n"
        "assert (torch.cuda.is_available(), torch.cuda.device_count()) == (False, 0)\n"
        "core = dict(__name__='megatron.core.part')\n"
        f"exec({question!r}, core)\n"
        "assert core['answers'] == (False, 4)\n",
        LOCAL_WORLD_SIZE="4",
    )
    assert result.returncode == 0, result.stderr


def test_nccl_is_gloo(tmp_path):
    result = python(
        "cpu_backend.activate_for_scripts()\n"
        f"store = 'file://{tmp_path}/store'\n"
        "torch.distributed.init_process_group('cpu:gloo,cuda:nccl', init_method=store, rank=0,"
        " world_size=1, device_id=torch.device('cuda:0'))\n"
        "assert torch.distributed.get_backend() == 'gloo'\n"
        "group = torch.distributed.new_group(backend='nccl')\n"
        "assert torch.distributed.get_backend(group) == 'gloo'\n"
        "torch.distributed.destroy_process_group()\n"
    )
    assert result.returncode == 0, result.stderr


AVERAGES = """
import torch
import torch.distributed as dist
from megatron import cpu_backend

cpu_backend.TORCH = (2, 6)
cpu_backend._replace([name for name in cpu_backend._names() if "distributed" in name.path])
dist.init_process_group("gloo")
reduced, part = torch.arange(3.0) + dist.get_rank(), torch.zeros(3)
sent = torch.arange(6.0) + dist.get_rank()
dist.all_reduce(reduced, op=dist.ReduceOp.AVG)
dist.reduce_scatter_tensor(part, sent, op=dist.ReduceOp.AVG)
assert reduced.tolist() == [0.5, 1.5, 2.5], reduced
assert part.tolist() == [value + 3 * dist.get_rank() for value in (0.5, 1.5, 2.5)], part
sums = torch.ones(2)
dist.all_reduce(sums)
assert sums.tolist() == [2, 2]
dist.destroy_process_group()
"""


def test_averages_of_an_older_gloo_are_sums_of_shares(tmp_path):
    """Before torch 2.8, gloo cannot average, as megatron-core does with losses of experts."""
    script = tmp_path / "averages.py"
    script.write_text(AVERAGES)
    env = environment(PYTHONPATH=REPO)
    result = forks.run(script, ranks=2, env=env, libraries_only=True)
    assert result.returncode == 0, result.stderr


def test_the_random_state_is_the_cpus():
    result = python(
        "cpu_backend.activate()\n"
        "torch.cuda.manual_seed(7)\n"
        "state = torch.cuda.get_rng_state()\n"
        "first = torch.rand(3)\n"
        "torch.cuda.set_rng_state(state)\n"
        "assert torch.equal(first, torch.rand(3))\n"
    )
    assert result.returncode == 0, result.stderr


def test_it_refuses_where_cuda_is_available():
    result = python("torch.cuda.is_available = lambda: True\ncpu_backend.activate()\n")
    assert result.returncode != 0
    assert "a CUDA device is available here; set CUDA_VISIBLE_DEVICES= (empty)" in result.stderr


def test_it_refuses_to_come_too_late():
    """The seed tracker would use torch's `_lazy_call`, and all ranks would have equal weights."""
    result = python("import megatron.core\ncpu_backend.activate()\n")
    assert result.returncode != 0
    assert "was imported before the CPU backend was activated" in result.stderr


def test_it_says_that_it_is_active():
    result = python(
        "import logging\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "cpu_backend.activate()\ncpu_backend.activate()\n"
    )
    assert result.stderr.count("no CUDA device: megatron-core runs on the CPU") == 1


def test_nothing_is_compiled_unless_asked_for():
    """Compiling megatron-core's fused functions takes longer than training a small model."""
    code = (
        "cpu_backend.activate()\n"
        "from megatron.core.fusions.fused_bias_swiglu import swiglu\n"
        "print(hasattr(swiglu, '_torchdynamo_orig_callable'))\n"
    )
    assert python(code).stdout.strip() == "False"
    assert python(code, TORCHDYNAMO_DISABLE="0").stdout.strip() == "True"


def test_scripted_functions_find_the_replaced_names():
    """torch.jit.script finds operators by their function, even those that torch itself scripts."""
    result = python(
        "cpu_backend.activate_for_scripts()\n"
        "torch.jit.script(torch.nn.LSTM(3, 3))\n"
        "square = torch.func.hessian(lambda x: (x**2).sum())(torch.ones(2))\n"
        "assert torch.equal(square, 2 * torch.eye(2))\n"
    )
    assert result.returncode == 0, result.stderr
