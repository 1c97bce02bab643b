"""Test that an unmodified script of another tree runs under the launcher as it does by itself.

The folder `tree` holds the script and its own `megatron.training`, as Megatron-LM's checkout does.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from megatron.analysis.store import TensorStore
from megatron.analysis.verification.verify import verify
from megatron.core._overlay import installed_release
from megatron.overlay.module_sources import Sources
from tests import forks
from tests.subprocesses import REPO, environment

TREE = Path(__file__).with_name("tree")
SCRIPT = TREE / "train.py"
PLAIN = Path(__file__).with_name("plain_worker.py")


def overlay(
    *words: str | Path,
    flags=(),
    ranks: int | None = None,
    script: Path = SCRIPT,
    libraries_only: bool = False,
):
    env = environment(PYTHONPATH=REPO)
    command = ["-m", "megatron.overlay", *flags, script, *words]
    return forks.run(*command, ranks=ranks, cwd=TREE, env=env, libraries_only=libraries_only)


def output(result) -> list[str]:
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def iterations(result) -> list[str]:
    """Return the lines of the script about its iterations."""
    return [line for line in output(result) if line.startswith("iteration")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_flags_the_bits_are_those_of_the_plain_wheel(tmp_path, ranks):
    words = ["--tensor-model-parallel-size", str(ranks), "--train-iters", "3", "--save"]
    plain = forks.run(PLAIN, SCRIPT, *words, tmp_path / "plain", ranks=ranks, cwd=TREE)
    result = overlay(*words, tmp_path / "overlay", ranks=ranks)
    assert output(result) == output(plain)
    assert len(output(plain)) == 3
    states = [torch.load(tmp_path / name)["model"] for name in ("plain", "overlay")]
    names = [name for name, value in states[0].items() if value is not None]
    assert len(names) > 20
    assert all(torch.equal(states[0][name], states[1][name]) for name in names)
    assert "nothing is quantized or collected" in result.stderr
    assert result.stderr.count("megatron.training:") == 1, "the first rank announces"


def test_a_resumed_run_is_quantized_and_collected(tmp_path):
    dump, checkpoint = tmp_path / "dump", tmp_path / "checkpoint"
    flags = ["--quant", "mxfp8", "--save-tensors", dump, "--control-iter", "0"]
    flags += ["--collect-layers", "0", "--collect-modules", "linear_*,core_attention"]
    first = overlay("--save", checkpoint, flags=flags)
    second = overlay("--load", checkpoint, "--train-iters", "3", flags=flags)
    assert [line.split()[1] for line in iterations(first) + iterations(second)] == ["1", "2", "3"]
    table = TensorStore(dump).select()
    assert sorted(table["iteration"].unique()) == [1, 2, 3]
    assert set(table["layer_idx"]) == {0}
    assert not verify(TensorStore(dump)).errors
    losses = [float.fromhex(line.split()[3]) for line in iterations(first) + iterations(second)]
    assert TensorStore(dump).loss_curve().sort_values("iteration")["loss"].tolist() == losses
    cards = [json.loads(path.read_text()) for path in dump.glob("run*.json")]
    assert sorted(card["arguments"]["train_iters"] for card in cards) == [2, 3]
    assert {card["arguments"]["custom_quant_type"] for card in cards} == {"mxfp8"}
    assert "[megatron.overlay] saved " in second.stderr
    assert "format of linear: mxfp8" in second.stderr


def test_statistics_are_saved_with_the_losses_of_the_script(tmp_path):
    flags = ["--quant", "mxfp8", "--tensor-statistics", "1", "--tensor-save-dir", tmp_path]
    lines = iterations(overlay("--tensor-model-parallel-size", "2", flags=flags, ranks=2))
    expected = {float.fromhex(line.split()[3]) for line in lines}
    tables = [pd.read_parquet(path) for path in (tmp_path / "statistics").rglob("iterations_*")]
    assert len(expected) == 2
    assert {float(loss) for table in tables for loss in table["loss"]} == expected


@pytest.mark.parametrize("iterations", ["1", "2"])
def test_a_ring_without_losses_is_refused(tmp_path, iterations):
    """The trainer does not call `training_log`, from which the launcher gets the losses."""
    flags = ["--save-tensors", tmp_path / "dump", "--collect-ring", "2"]
    result = overlay("--do", "unlogged", "--train-iters", iterations, flags=flags)
    assert result.returncode == 1
    assert "a ring of iterations (--collect-ring) needs the loss of each" in result.stderr
    [card] = (tmp_path / "dump").glob("run*.json")
    assert json.loads(card.read_text())["status"] != "finished"


def test_only_code_of_the_trees_sees_a_cuda_device():
    """The parent of an installed `megatron` also contains torch, which must not see the device."""
    installed = Path("/env/lib/python3.12/site-packages/megatron")
    sources = Sources((Path("/home/Megatron-LM/megatron"), installed))
    assert sources.trees() == [Path("/home/Megatron-LM"), installed]


def test_the_script_is_started_as_a_plain_script():
    lines = dict(
        line.split(" ", 1) for line in output(overlay("--do", "show", "--quant", "its own flag"))
    )
    assert lines["argv"] == str([str(SCRIPT), "--do", "show", "--quant", "its own flag"])
    assert lines["path"] == f"{TREE} sibling of the script"
    assert lines["main"] == f"{SCRIPT} None __main__ True"
    assert lines["pickle"] == "unpickled"
    assert lines["tests"] == "False", "this tree's root is not in sys.path"
    assert lines["core"] == str(REPO / "megatron" / "core" / "__init__.py")
    assert lines["training"] == str(TREE / "megatron" / "training" / "__init__.py")


def test_its_exit_status_and_its_traceback_are_kept():
    assert overlay("--do", "exit").returncode == 7
    result = overlay("--do", "fail")
    assert result.returncode == 1
    trace = result.stderr[result.stderr.index("Traceback") :]
    assert "RuntimeError: the script fails" in trace
    assert str(SCRIPT) in trace
    assert str(REPO / "megatron" / "overlay") not in trace


def test_a_spawned_process_has_the_same_set_up_and_trains(tmp_path):
    flags = ["--quant", "mxfp4", "--save-tensors", tmp_path / "dump"]
    result = overlay("--do", "spawn", flags=flags)
    core = REPO / "megatron" / "core" / "__init__.py"
    training = TREE / "megatron" / "training" / "__init__.py"
    assert output(result)[0] == f"child sent {core} {training} mxfp4 __mp_main__"
    assert [line.split()[1] for line in iterations(result)] == ["1", "2"]
    assert set(TensorStore(tmp_path / "dump").select()["quant_type"]) == {"mxfp4"}
    [card] = (tmp_path / "dump").glob("run*.json")
    assert json.loads(card.read_text())["status"] == "finished"


def test_a_model_of_a_spawned_process_counts_as_one_of_the_script():
    result = overlay("--do", "spawn", flags=["--quant", "mxfp4"])
    assert [line.split()[1] for line in iterations(result)] == ["1", "2"]


@pytest.mark.parametrize("way", ["pool", "child"])
def test_a_process_that_has_run_a_model_needs_no_end_of_its_own(way):
    result = overlay("--do", way, flags=["--quant", "mxfp4"])
    assert [line.split()[1] for line in iterations(result)] == ["1", "2"]


def test_a_process_that_is_killed_before_its_collection_is_complete_is_an_error(tmp_path):
    """The end of a pool kills its processes, unless they have just ended by themselves."""
    result = overlay("--do", "pool", flags=["--save-tensors", tmp_path])
    (card,) = tmp_path.glob("run_*.json")
    killed = json.loads(card.read_text())["status"] == "running"
    assert result.returncode == int(killed)
    message = "[ERROR] a process of the script ended before its collection was complete, see "
    message += f"{card}; let it end by itself (for a pool, call close and"
    assert (message in result.stderr) == killed


def test_a_process_of_a_fork_server_has_the_same_set_up():
    """The process imports megatron-core only if the script does."""
    result = overlay(flags=["--quant", "mxfp4"], script=TREE / "light.py")
    assert result.stdout.splitlines() == ["__mp_main__ mxfp4 False"]
    assert result.returncode == 1, "neither process has run a model"
    assert "[ERROR] format mxfp4 was requested, but the script ran no model of" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--qaunt", "mxfp8"], "unrecognized arguments: --qaunt, did you mean --quant"),
        (["--quant", "mxfp9"], "mxfp9"),
        (["--control-iter", "2"], "--control-iter has no effect without --save-tensors DIR"),
        (["--save-tensors", "a", "--tensor-save-dir", "b"], "remove --tensor-save-dir"),
        (["--save-tensors", "a", "--collect-layers", "x"], "'x' is not understood"),
        (["--save-tensors", "a", "--control-iter", "-1"], "--control-iter is -1"),
        (["--quant", ""], "--quant is empty; give a value"),
        (["--save-tensors="], "--save-tensors is empty; give a value"),
        (["--quant", "mxfp8", "--custom-quant-type", "mxfp4"], "is given twice; give it once"),
        (["--collect-micro-batches", "1"], "has no effect without --save-tensors DIR"),
    ],
)
def test_a_wrong_command_line_is_refused(flags, message):
    result = overlay(flags=flags)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_script_is_refused():
    result = overlay(script=TREE / "other.py")
    assert (result.returncode, "give the path of a Python file" in result.stderr) == (2, True)


def test_a_recipe_after_the_last_iteration_is_refused(tmp_path):
    path = tmp_path / "late.yaml"
    matcher = "{config: mxfp8, type: glob, pattern: '*', iterations: 100-, enabled: true}"
    path.write_text(f"matchers:\n  late: {matcher}\n")
    result = overlay(flags=["--quant-recipe", path])
    assert result.returncode == 1
    assert (
        "sets its first format in iteration 100, and the run ends at iteration 2" in result.stderr
    )


def test_tensors_that_no_iteration_wrote_are_an_error(tmp_path):
    result = overlay("--do", "show", flags=["--save-tensors", tmp_path / "dump"])
    assert result.returncode == 1
    assert "the script ran no training iteration" in result.stderr


def test_a_relative_folder_is_in_the_folder_where_the_run_was_started(tmp_path):
    """The script changes the current folder before it trains."""
    relative = os.path.relpath(tmp_path / "dump", TREE)
    assert len(iterations(overlay("--do", "move", flags=["--save-tensors", relative]))) == 2
    assert len(TensorStore(tmp_path / "dump").select()) > 0


def test_a_plan_is_printed_and_the_script_ends_before_the_first_update(tmp_path):
    dump = tmp_path / "dump"
    flags = ["--quant", "mxfp8", "--save-tensors", dump, "--collect-plan"]
    result = overlay(flags=[*flags, "--collect-iterations", "2"])
    assert iterations(result) == []
    assert "collection plan, from one iteration; nothing was written" in result.stderr
    assert "stopping before the weights are updated (--collect-plan)" in result.stderr
    assert not dump.exists()


def test_a_format_that_no_model_ran_with_is_an_error():
    result = overlay("--do", "show", "--quant", "its own flag", flags=["--quant", "mxfp8"])
    assert result.returncode == 1
    assert "format mxfp8 was requested, but the script ran no model" in result.stderr
    assert "format of linear: mxfp8 (flag --quant)" in result.stderr
    assert "flags after the script belong to the script: --quant" in result.stderr


def test_a_selection_that_the_model_lacks_ends_without_a_traceback(tmp_path):
    flags = ["--save-tensors", tmp_path / "dump", "--collect-modules", "linear_fc9"]
    result = overlay(flags=flags)
    assert result.returncode == 1
    assert "[ERROR] --collect-modules" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_script_may_configure_the_collection_itself(tmp_path):
    """The launcher's collection flags are then refused, and a run without them succeeds."""
    words = ["--do", "configure", "--save", tmp_path / "dump"]
    assert len(iterations(overlay(*words, flags=["--quant", "mxfp8"]))) == 2
    assert len(TensorStore(tmp_path / "dump").select()) > 0
    result = overlay(*words, flags=["--save-tensors", tmp_path / "other"])
    assert result.returncode == 1
    assert "the script calls megatron.core.tensor_saver.configure itself" in result.stderr


def test_missing_packages_are_named_at_once(tmp_path):
    (tmp_path / "script.py").write_text("import module_of_script\nimport first_missing.part\n")
    (tmp_path / "module_of_script.py").write_text(
        "import second_missing\ntry:\n    import optional\nexcept ImportError:\n    pass\n"
    )
    result = overlay(script=tmp_path / "script.py")
    assert result.returncode == 2
    assert "run `pip install first_missing second_missing`" in result.stderr
    assert "Traceback" not in result.stderr


def test_flags_that_a_cpu_needs_are_named_at_once():
    words = ["--transformer-impl", "transformer_engine", "--masked-softmax-fusion"]
    result = overlay(*words)
    assert result.returncode == 1
    assert "add --transformer-impl local --no-masked-softmax-fusion" in result.stderr


def test_a_checkout_with_its_own_core_is_the_base(tmp_path):
    """The checkout lacks compiled helpers, so those of the installed megatron-core are used."""
    import megatron.core

    base = tmp_path / "megatron" / "core"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(megatron.core.__path__[1], base, ignore=ignored)
    (base / "datasets" / "Makefile").write_text("default:\n\ttouch compiled\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "sys.dont_write_bytecode = True\n"
        "from megatron.core.datasets.utils import compile_helpers\n"
        "compile_helpers()\n"
        "from megatron.core.datasets import helpers_cpp\n"
        "from megatron.core import utils\n"
        "from megatron.core.tensor_parallel import layers\n"
        "print(utils.__file__, layers.__file__, helpers_cpp.__file__)\n"
    )
    result = overlay(script=script, libraries_only=True)
    utils, layers, helpers = output(result)[-1].split()
    assert utils == str(base / "utils.py")
    assert layers == str(REPO / "megatron" / "core" / "tensor_parallel" / "layers.py")
    assert Path(helpers).parents[2] == Path(megatron.core.__path__[1]).parent
    assert not (base / "datasets" / "compiled").exists()
    # Since 0.18, the version contains the commit of the Git repository that megatron-core is in.
    version = rf"{re.escape(installed_release())}(\+\w+)?"
    assert re.search(rf"megatron\.core: {version} of {re.escape(str(tmp_path))}", result.stderr)


def test_a_checkout_with_an_unsupported_core_is_refused(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text('__version__ = "0.9.0"\n')
    script = tmp_path / "script.py"
    script.touch()
    result = overlay(script=script, libraries_only=True)
    assert result.returncode == 2
    assert f"megatron-core 0.9.0 is installed in {core}" in result.stderr
    assert f"or check out a supported release in {core}" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("code", "flags", "message"),
    [
        ("os._exit(0)", ["--quant", "mxfp8"], "but the script ran no model of megatron-core"),
        ("os._exit(0)", ["--save-tensors", "dump"], "the script ran no training iteration"),
        (
            "os.execvp(sys.executable, [sys.executable, '-c', ''])",
            ["--quant", "mxfp8"],
            "format mxfp8 is requested, and the script replaces itself",
        ),
        ("os.fork() or os._exit(0)", ["--quant", "mxfp8"], "but the script ran no model"),
    ],
)
def test_a_script_that_leaves_python_reaches_nothing_and_fails(tmp_path, code, flags, message):
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys\n{code}\n")
    result = overlay(flags=flags, script=script, libraries_only=True)
    assert result.returncode == 1, result.stderr
    assert message in result.stderr


def test_a_collection_is_complete_if_the_script_leaves_python(tmp_path):
    output(overlay("--do", "leave", flags=["--save-tensors", tmp_path / "dump"]))
    [card] = (tmp_path / "dump").glob("run*.json")
    assert json.loads(card.read_text())["status"] == "finished"
    assert not verify(TensorStore(tmp_path / "dump")).errors


def test_a_variable_that_nothing_reads_is_refused():
    env = environment(PYTHONPATH=REPO, QUANT_TYPE="mxfp8")
    result = forks.run("-m", "megatron.overlay", SCRIPT, cwd=TREE, env=env)
    assert result.returncode == 2
    assert "variable QUANT_TYPE is unknown; did you mean CUSTOM_QUANT_TYPE?" in result.stderr
