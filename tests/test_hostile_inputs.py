"""Every damaged or hostile data set, recipe, settings file and text ends in one clear error."""

import json

import pytest

from tests import forks, hostile_inputs
from tests.subprocesses import REPO, environment

WORKER = REPO / "tests/hostile_worker.py"
CASES = {case.name: case for case in hostile_inputs.cases()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict]:
    """Open every case in one process with bounded time and memory; return its errors by name."""
    folder = tmp_path_factory.mktemp("hostile")
    done = forks.run(WORKER, folder, env=environment(PYTHONPATH=REPO))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


def test_there_are_enough_of_them():
    assert len(CASES) >= 50
    assert len(CASES) == len(hostile_inputs.cases()), "a name is used twice"


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_with_one_error_that_names_the_file(outcomes, name):
    found = outcomes[name]
    assert found["kind"] == "ValueError", found
    first, *more = found["error"].splitlines()
    assert CASES[name].says in first, first
    assert all("[ERROR]" not in line for line in more), found["error"]
    assert len(first) < 1500, "an error must not copy the file"
    assert first.isprintable()
    assert not found["executed"], "the file ran code"


def test_sound_files_of_the_same_kind_are_taken(tmp_path):
    """Undamaged inputs are accepted, so no case passes because everything is refused."""
    from megatron.fake_quant.recipe import load_recipe
    from megatron.training.data.index_cache import check_cached_files
    from megatron.training.data.indexed_data import check_index
    from megatron.training.data.manifest import read_manifest
    from megatron.training.data.paths import check_prefix

    prefix = hostile_inputs.sound_pair(tmp_path)
    check_prefix(str(prefix))
    check_index(str(prefix))
    (tmp_path / "d.json").write_text(json.dumps(hostile_inputs.MANIFEST))
    assert read_manifest(prefix).tokenizer.vocab_size == 100
    (tmp_path / "r.yaml").write_text("description: &a x\n" + hostile_inputs.RULE)
    assert load_recipe(tmp_path / "r.yaml").name == "r"
    (tmp_path / "cache").mkdir()
    hostile_inputs._saved(hostile_inputs.np.arange(3))(tmp_path / "cache" / "a.npy")
    check_cached_files(str(tmp_path / "cache"))
    check_cached_files(str(tmp_path / "none"))
