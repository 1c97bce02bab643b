"""The overlay loads the right file however Python was started, and refuses what it cannot overlay.

The names of megatron-core that this tree uses are all in `_overlay.UPSTREAM`, and the wheel has
them.
"""

import ast
import json
import os
import re
import shutil
import sys
from pathlib import Path

import megatron.core
from megatron.core._overlay import ADDED, SUPPORTED, UPSTREAM, installed_release
from tests import forks
from tests.subprocesses import REPO, environment, run, torchrun

OVERLAID = [
    path.relative_to(REPO).with_suffix("").as_posix().replace("/", ".")
    for path in sorted((REPO / "megatron" / "core").rglob("*.py"))
    if "shadowed(__name__)" in path.read_text() and path.stem != "_overlay"
]
PROBE = f"""
import importlib, json
files = {{name: importlib.import_module(name).__file__ for name in {OVERLAID!r}}}
import megatron.core.utils
files["wheel"] = megatron.core.utils.__file__
files["version"] = megatron.core.__version__
print(json.dumps(files))
"""


def loaded(result) -> dict[str, str]:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.strip().splitlines()[-1])


def assert_overlaid(files: dict[str, str]) -> None:
    for name in OVERLAID:
        assert files[name] == str(REPO / (name.replace(".", "/") + ".py"))
    assert not Path(files["wheel"]).is_relative_to(REPO / "megatron")
    assert files["version"].partition("+")[0] in SUPPORTED


def test_there_is_something_to_overlay():
    assert {"layers", "dot_product_attention", "schedules", "torch_norm", "gpt_model"} <= {
        name.rpartition(".")[2] for name in OVERLAID
    }


def test_from_the_root():
    assert_overlaid(loaded(run([sys.executable, "-c", PROBE])))


def test_from_another_folder_with_pythonpath(tmp_path):
    env = environment(PYTHONPATH=REPO)
    assert_overlaid(loaded(forks.run("-c", PROBE, cwd=tmp_path, env=env, libraries_only=True)))


def test_from_another_folder_without_it_the_wheel_is_untouched(tmp_path):
    files = loaded(forks.run("-c", PROBE, cwd=tmp_path, libraries_only=True))
    assert not any(Path(files[name]).is_relative_to(REPO / "megatron") for name in OVERLAID)


def test_found_twice(tmp_path):
    """Through a link, the tree is found twice; Python 3.10 also finds `/path/of/tree` and `.`."""
    (tmp_path / "link").symlink_to(REPO)
    for twice in ((REPO, tmp_path / "link"), (tmp_path / "wheel", REPO, tmp_path / "link")):
        env = environment(PYTHONPATH=os.pathsep.join(map(str, twice)))
        assert_overlaid(loaded(forks.run("-c", PROBE, cwd=tmp_path, env=env, libraries_only=True)))


def test_by_torchrun(tmp_path):
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    assert_overlaid(loaded(torchrun(script, env=environment(PYTHONPATH=REPO))))


def test_by_pytest(tmp_path):
    test = tmp_path / "test_probe.py"
    ours = str(REPO / "megatron/core/tensor_parallel/layers.py")
    test.write_text(
        "from megatron.core.tensor_parallel import layers\n"
        f"def test_it(): assert layers.__file__ == {ours!r}\n"
    )
    config = ["-c", REPO / "pyproject.toml", "--rootdir", REPO, "-p", "no:cacheprovider"]
    result = run([sys.executable, "-m", "pytest", "-q", *config, test])
    assert result.returncode == 0, result.stdout + result.stderr


def test_names_that_the_wheel_defines_are_all_there():
    code = (
        "from megatron.core.tensor_parallel import layers\n"
        "from megatron.core.tensor_parallel import _upstream_layers as upstream\n"
        "names = [name for name in vars(upstream) if not name.startswith('__')]\n"
        "missing = [name for name in names if not hasattr(layers, name)]\n"
        "assert not missing, missing\n"
        "assert issubclass(layers.RowParallelLinear, upstream.RowParallelLinear)\n"
    )
    result = forks.run("-c", code, env=environment(PYTHONPATH=REPO))
    assert result.returncode == 0, result.stderr


def test_another_megatron_core_is_refused(tmp_path):
    """The loaded code decides, not what pip lists as installed."""
    other = tmp_path / "megatron" / "core"
    other.parent.mkdir()
    shutil.copytree(megatron.core.__path__[1], other, ignore=shutil.ignore_patterns("__pycache__"))
    info = other / "package_info.py"
    info.write_text(info.read_text() + '\n__version__ = "0.15.3"\n')
    env = environment(PYTHONPATH=f"{REPO}{os.pathsep}{tmp_path}")
    code = "import megatron.core"
    result = forks.run("-c", code, cwd=tmp_path, env=env, libraries_only=True)
    assert result.returncode != 0
    assert f"megatron-core 0.15.3 is installed in {other}" in result.stderr
    assert f"overlay {', '.join(SUPPORTED[:-1])} and {SUPPORTED[-1]}; run" in result.stderr
    assert "pip install megatron-core==0.16.1" in result.stderr


def used_upstream_names() -> set[str]:
    """Return `module.name` for each name of the wheel that an overlaid file or training uses."""
    names = set()
    for path in sorted((REPO / "megatron").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "megatron.core" not in text or path.stem == "_overlay":
            continue
        module = path.relative_to(REPO).with_suffix("").as_posix().replace("/", ".")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core"):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "_upstream":
                names.add(f"{module}.{node.attr}")
    return {name for name in names if not is_ours(name)}


def is_ours(name: str) -> bool:
    """Return whether a name stands for a module of this tree, or for what such a module adds."""
    path = REPO / name.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    module, _, leaf = name.rpartition(".")
    file = (REPO / module.replace(".", "/")).with_suffix(".py")
    if not file.exists() or leaf in re.split(r"[\s.<>=]+", UPSTREAM.get(module, "")):
        return False
    return leaf in ADDED.get(module, "").split() or f" {leaf}" in file.read_text(encoding="utf-8")


def test_every_name_of_the_wheel_that_is_used_is_listed():
    listed = {
        f"{module}.{re.split('[.<>]', name)[0]}"
        for module, names in UPSTREAM.items()
        for name in names.split()
    }
    assert used_upstream_names() == listed


def release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def names_of(version: str) -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    """Return the listed names that a release of megatron-core has, and those that it lacks."""
    has: dict[str, list[str]] = {}
    lacks = []
    for module, marked in UPSTREAM.items():
        for text in marked.split():
            name, sign, bound = re.fullmatch(r"([\w.]+)(?:(>=|<)([\d.]+))?", text).groups()
            if sign is None or (sign == ">=") == (release(version) >= release(bound)):
                has.setdefault(module, []).append(name)
            elif "." not in name:  # our classes define the methods with every release
                lacks.append((module, name))
    return has, lacks


def test_the_wheel_has_every_listed_name():
    """Names that are marked for other releases only must be missing from the installed release."""
    has, lacks = names_of(installed_release())
    code = (
        "import importlib, operator\n"
        f"for path, name in {lacks}:\n"
        "    assert not hasattr(importlib.import_module(path), name), (path, name)\n"
        f"for path, names in {has}.items():\n"
        "    module = importlib.import_module(path)\n"
        "    for name in names:\n"
        "        if not hasattr(module, name.partition('.')[0]):\n"
        "            importlib.import_module(f'{path}.{name}')\n"
        "        operator.attrgetter(name)(module)\n"
    )
    result = forks.run("-c", code, env=environment(PYTHONPATH=REPO))
    assert result.returncode == 0, result.stderr
