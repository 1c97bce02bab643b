"""Tests that flags that bypass a format or the collection are refused before anything is built."""

import argparse

import psutil
import pytest

from megatron.fake_quant import policy
from megatron.training.errors import UserError
from megatron.training.low_precision import configure_formats
from megatron.training.model import check_buildable
from tests import forks
from tests.subprocesses import NO_SETTINGS, REPO, environment


def arguments(**values) -> argparse.Namespace:
    given = {
        "custom_quant_type": None,
        "linear_quant": None,
        "qk_quant": None,
        "pv_quant": None,
        "quant_accumulate": None,
        "quant_recipe": None,
        "save_tensors": False,
        "tensor_statistics": None,
        "collect_plan": False,
        "transformer_impl": "local",
        "num_moe_experts": None,
        "add_bias_linear": True,
        "expert_model_parallel_size": 1,
    }
    return argparse.Namespace(**given | values)


@pytest.fixture(autouse=True)
def own_policy(monkeypatch):
    monkeypatch.setattr(policy, "_current", None)
    monkeypatch.setenv("QUANT_SETTINGS_FILE", str(NO_SETTINGS))
    for variable in ("CUSTOM_QUANT_TYPE", "TENSOR_SAVE_ENABLED"):
        monkeypatch.delenv(variable, raising=False)


BYPASSES = [
    ({"gradient_accumulation_fusion": True}, "--gradient-accumulation-fusion"),
    ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
    ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
]


@pytest.mark.parametrize(("flag", "named"), BYPASSES, ids=[named for _, named in BYPASSES])
def test_a_bypass_is_refused_with_a_format_or_a_collection_only(flag, named, monkeypatch):
    with pytest.raises(UserError, match=f"the format mxfp8 does not reach {named}: "):
        configure_formats(arguments(custom_quant_type="mxfp8", **flag))
    with pytest.raises(UserError, match=f"tensor collection does not reach {named}: "):
        configure_formats(arguments(save_tensors=True, **flag))
    configure_formats(arguments(**flag))
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "true")
    with pytest.raises(UserError, match="tensor collection does not reach"):
        configure_formats(arguments(**flag))


def test_transformer_engine_is_refused_with_a_format_only():
    flag = {"transformer_impl": "transformer_engine"}
    named = "--transformer-impl transformer_engine: its layers are not this project's; give"
    with pytest.raises(UserError, match=f"the format mxfp8 does not reach {named}"):
        configure_formats(arguments(custom_quant_type="mxfp8", save_tensors=True, **flag))
    configure_formats(arguments(save_tensors=True, **flag))


def test_grouped_experts_take_a_format_and_a_collection():
    formats = arguments(custom_quant_type="mxfp8", save_tensors=True, moe_grouped_gemm=True)
    configure_formats(formats)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"hierarchical_context_parallel_sizes": [2, 1]}, "--hierarchical-context-parallel-sizes"),
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
        (
            {"cp_comm_type": "p2p"},
            r"--cp-comm-type p2p \(the layers gather keys and values: all_gather\)",
        ),
        ({"cp_comm_type": ["all_gather", "a2a"]}, r"--cp-comm-type \['all_gather', 'a2a'\] .*"),
    ],
)
def test_what_the_local_layers_cannot_run_is_refused(given, named):
    plain = {
        "context_parallel_size": 2,
        "cp_comm_type": "all_gather",
        "hierarchical_context_parallel_sizes": None,
        "hybrid_context_parallel": False,
    }
    check_buildable(arguments(**plain))
    check_buildable(arguments(**plain | {"cp_comm_type": None}))
    check_buildable(arguments(**plain | {"context_parallel_size": 1, "cp_comm_type": "p2p"}))
    with pytest.raises(UserError, match=f"{named} does not run on the local layers"):
        check_buildable(arguments(**plain | given))


def test_experts_with_biases_on_one_expert_parallel_rank_are_refused():
    """megatron-core adds the biases in place to a view, and autograd would raise RuntimeError."""
    plain = {
        "context_parallel_size": 1,
        "hierarchical_context_parallel_sizes": None,
        "hybrid_context_parallel": False,
        "num_moe_experts": 4,
        "cp_comm_type": None,
    }
    check_buildable(arguments(**plain, add_bias_linear=False))
    check_buildable(arguments(**plain | {"expert_model_parallel_size": 2}))
    with pytest.raises(UserError, match=r"--num-experts 4 with biases .*--disable-bias-linear"):
        check_buildable(arguments(**plain))


def test_a_wrong_type_is_a_users_mistake():
    with pytest.raises(UserError, match="flag --qk-quant: unknown format 'fp3'"):
        configure_formats(arguments(qk_quant="fp3"))


@pytest.mark.parametrize("grouped", [False, True])
def test_a_mistake_keeps_its_exit_status_also_with_process_groups(grouped):
    """gloo may abort a process that destroys its groups after its peers are gone."""
    code = (
        "import atexit, os, torch\n"
        "from megatron.training import main\n"
        "from megatron.training.errors import UserError\n"
        "def failing(argv):\n"
        f"    if {grouped}:\n"
        "        store = torch.distributed.HashStore()\n"
        "        torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "        atexit.register(os.abort)  # what the destructors might do\n"
        "    raise UserError('this was wrong')\n"
        "main._run = failing\n"
        "raise SystemExit(main.main([]))\n"
    )
    result = forks.run("-c", code, env=environment(PYTHONPATH=REPO))
    assert result.returncode == 2
    assert result.stderr == "[ERROR] this was wrong\n"


def test_an_interrupted_run_leaves_no_child_behind():
    """Child processes write a checkpoint, and `os._exit` alone would leave them running."""
    code = (
        "import multiprocessing, time\n"
        "from megatron.training import main\n"
        "from megatron.training.errors import Interrupted\n"
        "def writing(argv):\n"
        "    child = multiprocessing.Process(target=time.sleep, args=(60,))\n"
        "    child.start()\n"
        "    print(child.pid, flush=True)\n"
        "    raise Interrupted(15)\n"
        "if __name__ == '__main__':\n"
        "    main._run = writing\n"
        "    main.main([])\n"
    )
    result = forks.run("-c", code, env=environment(PYTHONPATH=REPO))
    assert result.returncode == 143
    pid = int(result.stdout)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
