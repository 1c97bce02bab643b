"""Which file is loaded, however Python was started; and where the overlay cannot work."""

import json
import os
import shutil
import sys
from pathlib import Path

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
    assert files["version"] == "0.16.1"


def test_there_is_something_to_overlay():
    assert {"layers", "dot_product_attention", "schedules", "torch_norm", "gpt_model"} <= {
        name.rpartition(".")[2] for name in OVERLAID
    }


def test_from_the_root():
    assert_overlaid(loaded(run([sys.executable, "-c", PROBE])))


def test_from_another_folder_with_pythonpath(tmp_path):
    env = environment(PYTHONPATH=REPO)
    assert_overlaid(loaded(run([sys.executable, "-c", PROBE], cwd=tmp_path, env=env)))


def test_from_another_folder_without_it_the_wheel_is_untouched(tmp_path):
    files = loaded(run([sys.executable, "-c", PROBE], cwd=tmp_path))
    assert not any(Path(files[name]).is_relative_to(REPO / "megatron") for name in OVERLAID)


def test_found_twice(tmp_path):
    """By a link; by Python 3.10, from the root, as `/path/of/tree` and as `.`."""
    (tmp_path / "link").symlink_to(REPO)
    for twice in ((REPO, tmp_path / "link"), (tmp_path / "wheel", REPO, tmp_path / "link")):
        env = environment(PYTHONPATH=os.pathsep.join(map(str, twice)))
        assert_overlaid(loaded(run([sys.executable, "-c", PROBE], cwd=tmp_path, env=env)))


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
    """Told by the code that is loaded, not by what pip believes to be installed."""
    import megatron.core

    other = tmp_path / "megatron" / "core"
    other.parent.mkdir()
    shutil.copytree(megatron.core.__path__[1], other, ignore=shutil.ignore_patterns("__pycache__"))
    info = other / "package_info.py"
    info.write_text(info.read_text() + '\n__version__ = "0.17.0"\n')
    env = environment(PYTHONPATH=f"{REPO}{os.pathsep}{tmp_path}")
    result = run([sys.executable, "-c", "import megatron.core"], cwd=tmp_path, env=env)
    assert result.returncode != 0
    assert f"megatron-core 0.17.0 is behind this tree, in {other}" in result.stderr
    assert "pip install megatron-core==0.16.1" in result.stderr
