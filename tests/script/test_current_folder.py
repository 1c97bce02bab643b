"""Test that the drivers import nothing from the current folder, which may contain foreign files."""

import pytest

from configs import launch
from tests.script.drivers import bash
from tests.subprocesses import REPO

TRAP = "import pathlib\npathlib.Path(__file__).with_name('executed').touch()\n"
NAMES = ("megatron", "torch", "numpy", "yaml", "runpy", "json", "sitecustomize")
PLACES = f"source {REPO}/script/driver.sh && py=$LAB_PYTHON && export PYTHONPATH={REPO} && "
RECIPE = REPO / "examples/recipes/nvfp4_pretraining.yaml"


@pytest.fixture
def trap(tmp_path):
    """Return a folder with modules that report that they are imported."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(TRAP)
    return tmp_path


@pytest.mark.parametrize(
    "asked",
    [
        f"check_recipe {RECIPE}",
        "choose type --type=mx:e3m4:b16:rceil && [[ $quant_type == mx:e3m4:b16:rceil ]]",
        "choose type && [[ $quant_type == mxfp8 ]]",
        "choose preset && [[ $preset == tiny ]]",
        "run_module megatron.fake_quant.policy --effective-type --quant-recipe " + str(RECIPE),
    ],
)
def test_a_driver_asks_the_code_of_training_and_not_the_current_folder(trap, asked):
    done = bash("-c", PLACES + asked, cwd=trap)
    assert done.returncode == 0, done.stderr
    assert not (trap / "executed").exists()


def test_the_launcher_is_told_not_to_import_from_the_current_folder(monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    assert launch.training_environment()["PYTHONSAFEPATH"] == "1"


def test_the_environment_is_looked_for_without_the_current_folder(trap):
    for name in ("importlib", "os", "sysconfig", "fcntl", "venv", "ensurepip"):
        (trap / f"{name}.py").write_text(TRAP)
    done = bash(f"{REPO}/script/setup_env.sh", cwd=trap)
    assert done.returncode == 0, done.stderr
    assert not (trap / "executed").exists()


def test_the_traps_work(trap):
    """The traps work: otherwise the tests above could not fail."""
    bash("-c", '"$LAB_PYTHON" -m megatron.fake_quant.policy', cwd=trap)
    assert (trap / "executed").exists()


def test_a_search_path_of_folders_leads_to_no_other_tree(tmp_path):
    """A relative path is not searched in CDPATH, where `cd` would find and print another one."""
    name = REPO.name
    (tmp_path / name / "script").mkdir(parents=True)
    asked = f'source {name}/script/driver.sh && printf %s "$repo"'
    done = bash("-c", f"export CDPATH={tmp_path}; {asked}", cwd=REPO.parent)
    assert done.stdout == str(REPO)
