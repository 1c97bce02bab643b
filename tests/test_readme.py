"""The READMEs: their commands run, their tables are the generated ones, their links are valid."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest
import torch
from numba.core import caching

from megatron.fake_quant.formats import FORMATS
from megatron.fake_quant.inspect.format_table import markdown
from megatron.fake_quant.names import get_format
from megatron.tensor_record import CODES, ON_REQUEST, TENSOR_NAMES, TensorRecord
from tests import forks
from tests.links import broken_links
from tests.subprocesses import REPO, environment

READMES = [REPO / "README.md", REPO / "README.zh-CN.md"]
COMMANDS = re.findall(r"^```bash\n(.*?)^```", READMES[0].read_text(), re.M | re.S)
START = 20  #: iterations of the model from which the commands continue; 300 would take 30 s
both = pytest.mark.parametrize("readme", READMES, ids=lambda p: p.name)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Return a copy of the tree as git would check it out, which the commands may write into."""
    folder = tmp_path_factory.mktemp("readme") / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.splitlines()):
        if (source := REPO / name).is_file():
            copy_with_bytecode(source, folder / name)
    share_compiled_kernels(folder)
    return folder


def copy_with_bytecode(source: Path, target: Path) -> None:
    """Copy a file, and its compiled form if Python has written one that is up to date."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    if source.suffix == ".py":
        compiled, copied = (Path(cache_from_source(str(path))) for path in (source, target))
        if compiled.is_file():
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(compiled, copied)


def share_compiled_kernels(folder: Path) -> None:
    """Copy the kernels that this tree has compiled, so that its copy need not compile them again.

    numba names a folder of compiled kernels after the path of their sources.
    """
    locator = getattr(caching, "UserProvidedCacheLocator", None)
    named = (locator or caching._UserProvidedCacheLocator).get_suitable_cache_subpath
    for cache in REPO.glob("megatron/**/__pycache__/*-*/"):
        module = cache.parents[1].relative_to(REPO) / "module.py"  # only its folder matters
        compiled = cache / named(str(REPO / module))
        if compiled.is_dir():
            shutil.copytree(
                compiled, folder / cache.relative_to(REPO) / named(str(folder / module))
            )


def run(command: str, copy: Path, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the README in the copy of the tree, and check that it succeeds."""
    env = environment(**variables)
    env["START_ITERATIONS"] = str(START)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", command], cwd=copy, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done


@pytest.fixture(scope="module")
def first(copy) -> subprocess.CompletedProcess[str]:
    """Run the first command of the README, which trains on the default corpus and draws."""
    assert COMMANDS[0].strip() == "bash run_tensor_draw.sh both mxfp8"
    return run(COMMANDS[0], copy, OMP_NUM_THREADS=str(len(os.sched_getaffinity(0))))


def test_both_collects_every_tensor_name_and_draws(first, copy):
    files = list((copy / "enhanced_tensor_logs" / "mxfp8").glob("*.pt"))
    found = set()
    for path in files:
        payload = torch.load(path, weights_only=True)
        record = TensorRecord.from_metadata(payload["metadata"])
        assert record.filename == path.name
        assert list(payload["tensor"].shape) == record.shape
        found.add((record.layer_type, record.tensor_name))
    expected = {(kind, name) for kind, names in TENSOR_NAMES.items() for name in names}
    assert found == {(kind, name) for kind, name in expected if name not in ON_REQUEST}
    assert (copy / "draw" / "quick_analysis.png").stat().st_size > 10_000
    assert (copy / "draw" / "report.html").stat().st_size > 1_000_000
    text = (copy / "draw" / "tensor_stats.txt").read_text()
    assert f"{len(files)} tensors, " in text
    assert "could not be read" not in text


def test_both_reports_where_to_look(first, copy):
    for word in ("phase", "component", "operation", "layer", "folder", "log ", "next"):
        assert f"\n  {word}" in first.stdout
    [log] = [line.split()[-1] for line in first.stdout.splitlines() if line.startswith("  log ")]
    assert "lm loss" in (copy / log).read_text()


def test_the_first_command_collects_from_a_model_that_was_trained_once(first, copy):
    [folder] = (copy / "model" / "default").glob("llama32_tiny_bf16_*")
    [card] = (copy / "enhanced_tensor_logs" / "mxfp8").glob("run_*.json")
    loaded = json.loads(card.read_text())["loaded"]
    log = (folder / "training.log").read_text()
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", log)]
    assert len(losses) == START == loaded["iteration"]
    assert loaded["weights_only"]
    assert copy / loaded["checkpoint"] == folder / f"iter_{START:07d}"
    assert loaded["lm_loss"] == pytest.approx(sum(losses) / START)
    assert losses[-1] < losses[0] - 0.5
    assert f"Starting from the weights in {folder.relative_to(copy)}: {START} iterations" in (
        first.stderr
    )


def test_readme_commands_run_in_their_order(first, copy):
    """All commands after the first train and draw in forks, which import the tree but not torch."""
    for command in COMMANDS[1:]:
        run(command, copy, LAB_PYTHON=forks.interpreter("libraries"))
    for result in ("draw/quick_analysis.png", "draw/tensor_stats.txt"):
        assert (copy / result).stat().st_size > 0
    [folder] = (copy / "model" / "default").glob("llama32_tiny_bf16_*")  # still the same model
    for folder in ("mxfp8", "mxfp4", "hifp8"):
        assert list((copy / "enhanced_tensor_logs" / folder).glob("*.pt"))


@both
def test_the_table_of_formats_is_the_generated_one(readme):
    text = readme.read_text()
    command = re.search(r"<!-- python -m megatron.fake_quant list (.*) -->", text)
    assert command is not None
    assert markdown(map(get_format, command[1].split())) in text


def test_the_table_of_all_formats_is_the_generated_one():
    text = (REPO / "docs" / "formats.md").read_text()
    assert f"\n{markdown(FORMATS.values())}\n\n" in text


@both
def test_the_speeds_are_those_of_the_published_run(readme):
    measured = {}
    for line in (REPO / "docs" / "results" / "formats.md").read_text().splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if len(cells) == 13 and cells[0] in FORMATS:
            measured[tuple(cells[:3])] = f"{cells[5]} ({cells[9]}, {cells[7]})"
    table = re.findall(r"^\| (mxfp8|mxfp4|hifp8) \| (\d\..*) \|$", readme.read_text(), re.M)
    assert [name for name, _ in table] == ["mxfp8", "mxfp4", "hifp8"]
    for name, cells in table:
        axes = ("-", None) if name == "hifp8" else ("last", "first")
        expected = [
            measured.get((name, dtype, axis), "") for dtype in ("fp32", "bf16") for axis in axes
        ]
        assert [cell.strip() for cell in cells.split("|")] == expected


@pytest.mark.parametrize("heading", ["Fields", "字段"])
def test_the_record_s_table_names_every_field(heading):
    page = (REPO / "docs" / "record.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", page.split(f"\n## {heading}\n")[1].split("\n## ")[0]))
    assert {field.name for field in dataclasses.fields(TensorRecord)} <= words
    of_codes = {name for names in CODES.values() for name in names}
    assert {name for names in TENSOR_NAMES.values() for name in names} - of_codes <= words


@both
def test_it_is_an_introduction(readme):
    """Details belong in docs/."""
    assert len(readme.read_text().splitlines()) < 200


@both
def test_links_and_files_exist(readme):
    text = readme.read_text()
    assert broken_links(readme) == []
    for name in re.findall(
        r"\b(?:megatron|script|examples|tests|benchmarks)/[\w./-]+\.(?:py|sh)", text
    ):
        assert (REPO / name).exists(), name


def test_the_chinese_readme_has_the_same_commands():
    blocks = [re.findall(r"^```\w+\n.*?^```", path.read_text(), re.M | re.S) for path in READMES]
    assert blocks[0] == blocks[1]
