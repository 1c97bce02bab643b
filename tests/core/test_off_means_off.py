"""Test that training without a format is bit-identical to plain megatron-core, collected or not."""

from pathlib import Path

import pytest

from tests.core.gpt_runs import reports
from tests.subprocesses import REPO, environment

CASES = [
    pytest.param("fp32", 1, (), id="fp32"),
    pytest.param("bf16", 1, ("--attention-dropout", "0.1"), id="bf16-dropout"),
    pytest.param("fp32", 2, ("--tp", "2"), id="fp32-tp2"),
    pytest.param("bf16", 2, ("--tp", "2"), id="bf16-tp2"),
    pytest.param("bf16", 2, ("--pp", "2", "--micro-batches", "3"), id="bf16-pp2"),
    pytest.param("bf16", 1, ("--recompute", "--bias"), id="bf16-recompute-bias"),
    pytest.param("fp32", 1, ("--bias",), id="fp32-bias"),
    pytest.param("fp32", 1, ("--freeze", "fc1.weight", "proj.weight"), id="fp32-frozen"),
    pytest.param("fp32", 2, ("--pp", "2", "--vpp", "2", "--layers", "4"), id="fp32-interleaved"),
]


@pytest.mark.parametrize(("dtype", "ranks", "options"), CASES)
def test_loss_gradients_and_random_state_equal_the_plain_wheel(tmp_path, dtype, ranks, options):
    options = ("--dtype", dtype, *options)
    plain = reports(tmp_path / "plain", environment(), ranks, *options)  # finds the wheel alone
    off = reports(tmp_path / "off", environment(PYTHONPATH=REPO), ranks, *options)
    dump = tmp_path / "dump"
    collecting = environment(PYTHONPATH=REPO, TENSOR_SAVE_ENABLED="true", TENSOR_SAVE_DIR=dump)
    on = reports(tmp_path / "on", collecting, ranks, *options)
    for a, b, c in zip(plain, off, on, strict=True):
        assert not Path(a["layers"]).is_relative_to(REPO / "megatron")
        assert Path(b["layers"]).is_relative_to(REPO / "megatron")
        for key in ("losses", "grads", "rng", "tracker"):
            assert a[key] == b[key], f"{key} differ although there is no format or collection"
            assert b[key] == c[key], f"{key} differ when tensors are collected"
        assert a["grads"]
    assert list(dump.glob("*.pt")), "the collecting run collected nothing"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_our_attention_without_formats_equals_the_wheels(tmp_path, dtype):
    """This test allows `DotProductAttention.forward` to be rewritten."""
    options = ("--dtype", dtype, "--attention-dropout", "0.1")
    (plain,) = reports(tmp_path / "plain", environment(), 1, *options)
    env = environment(PYTHONPATH=REPO)
    (ours,) = reports(tmp_path / "ours", env, 1, *options, "--own-attention")
    for key in ("losses", "grads", "rng", "tracker"):
        assert plain[key] == ours[key]


def test_a_format_changes_the_loss(tmp_path):
    """The tests above would also pass if no format ever reached the layers."""
    off = reports(tmp_path / "off", environment(PYTHONPATH=REPO), 1)
    for operation in ("LINEAR", "QK", "PV"):
        env = environment(PYTHONPATH=REPO, **{f"{operation}_QUANT_TYPE": "mxfp4"})
        quantized = reports(tmp_path / operation, env, 1)
        assert quantized[0]["losses"] != off[0]["losses"]
