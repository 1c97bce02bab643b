"""Test that a recipe is refused if a model cannot follow all of it."""

import re

import pytest

from megatron.fake_quant.recipe import load_recipe
from tests import forks
from tests.subprocesses import REPO, environment

PLACES = """
from megatron.core.low_precision.recipe_check import Matmul, check_rules
places = [Matmul("output_layer", -1, ("linear",))]
for layer in range(4):
    name = f"decoder.layers.{layer}"
    places.append(Matmul(f"{name}.mlp.linear_fc1", layer, ("linear",)))
    places.append(Matmul(f"{name}.self_attention.core_attention", layer, ("qk", "pv")))
"""
CHECK = """
import sys
from pathlib import Path
from megatron.fake_quant.recipe import load_recipe
for path, operations in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        check_rules(load_recipe(Path(path)), operations.split(), places, 4)
        print("accepted")
    except ValueError as error:
        print(error)
"""
ALL = "linear qk pv"
M = "type: glob, enabled: true"
CASES = {
    "linear-on-attention": (
        f"  m: {{config: linear_mxfp8, pattern: '*.core_attention', {M}}}\n",
        ALL,
        r"line 2: matcher 'm' has the config 'linear_mxfp8', which sets linear, but "
        r"applies to modules with pv and qk, such as decoder.layers.0.self_attention.core_atten",
    ),
    "attention-on-linear": (
        f"  m: {{config: FA_mxfp8, pattern: '*.linear_*', {M}}}\n",
        ALL,
        r"sets qk, but applies to modules with linear, such as",
    ),
    "behind-two-halves": (
        f"  a: {{config: bf16, pattern: '*', iterations: 1-2, {M}}}\n"
        f"  b: {{config: bf16, pattern: '*', iterations: 3-, {M}}}\n"
        f"  c: {{config: mxfp8, pattern: '*', {M}}}\n",
        ALL,
        r"line 4: matcher 'c' is never reached",
    ),
    "behind-a-wider-window": (
        f"  a: {{config: bf16, pattern: '*', iterations: 1-10, {M}}}\n"
        f"  b: {{config: mxfp8, pattern: '*', iterations: 5-8, {M}}}\n",
        ALL,
        r"line 3: matcher 'b' is never reached",
    ),
    "layer-that-is-not-there": (
        f"  m: {{config: mxfp8, pattern: '*', layers: '0,99', {M}}}\n",
        ALL,
        r"line 2: matcher 'm' is for layer 99, but the last layer of the model is 3",
    ),
    "overruled-by-a-flag": (
        f"  m: {{config: mxfp8, pattern: '*.linear_*', {M}}}\n",
        "qk pv",
        r"line 2: matcher 'm' applies only to linear, whose formats a flag already sets",
    ),
    "off-where-nothing-else-is": (
        f"  m: {{config: bf16, pattern: '*.linear_*', {M}}}\n"
        f"  n: {{config: FA_mxfp8, pattern: '*.core_attention', {M}}}\n",
        ALL,
        "accepted",
    ),
    "a-gap-between-windows": (
        f"  a: {{config: bf16, pattern: '*', iterations: 1-2, {M}}}\n"
        f"  b: {{config: bf16, pattern: '*', iterations: 4-, {M}}}\n"
        f"  c: {{config: mxfp8, pattern: '*', {M}}}\n",
        ALL,
        "accepted",
    ),
    "ranges-beyond-the-end": (
        f"  m: {{config: mxfp8, pattern: '*', layers: '2-99', {M}}}\n",
        ALL,
        "accepted",
    ),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return the error of each case; all cases share one import of megatron-core."""
    folder = tmp_path_factory.mktemp("recipes")
    arguments = []
    for name, (matchers, operations, _) in CASES.items():
        (folder / f"{name}.yaml").write_text("matchers:\n" + matchers)
        assert load_recipe(folder / f"{name}.yaml").rules
        arguments += [folder / f"{name}.yaml", operations]
    code = "import torch\nfrom megatron import cpu_backend\ncpu_backend.activate()\n"
    done = forks.run(
        "-c",
        code + PLACES + CHECK,
        *arguments,
        env=environment(PYTHONPATH=REPO),
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, done.stdout.splitlines()[-len(CASES) :], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_rule_that_would_not_come_true_is_refused(answers, name):
    expected = CASES[name][2]
    pattern = expected if expected == "accepted" else rf"recipe .*{name}\.yaml: .*{expected}"
    assert re.match(pattern, answers[name]), answers[name]
