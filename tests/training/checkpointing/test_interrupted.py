"""A checkpoint whose writing was interrupted never becomes the latest."""

import signal
from argparse import Namespace
from pathlib import Path

import pytest

from megatron.training.checkpointing import files
from tests import forks
from tests.subprocesses import REPO, environment
from tests.training.runs import MODEL, NO_DROPOUT, Training, train

WORKER = REPO / "tests/training/killed_worker.py"
SERIALIZATION = "megatron.core.dist_checkpointing.serialization"
CHECKPOINTING = "megatron.training.checkpointing.save_load"
TENSOR = ("--tensor-model-parallel-size", "2")


def killed(at: str, *options, ranks: int = 1) -> None:
    """Start a run that kills itself at `module:function:n`."""
    env = environment(PYTHONPATH=REPO, KILL_AT=at)
    done = forks.run(WORKER, *MODEL, *options, ranks=ranks if ranks > 1 else None, env=env)
    if ranks == 1:
        assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    else:
        assert "SIGKILL" in done.stderr


def latest(folder: Path) -> str:
    return (folder / "latest_checkpointed_iteration.txt").read_text()


@pytest.mark.parametrize(
    ("layout", "ranks"), [((), 1), pytest.param(TENSOR, 2, marks=pytest.mark.slow)]
)
def test_a_run_killed_while_it_saves_resumes_from_the_checkpoint_before(
    corpus, tmp_path, layout, ranks
):
    """The run is killed three times, at later and later points of writing the second checkpoint."""
    folder = tmp_path / "ck"
    common = ("--data-path", corpus, *layout, "--save-interval", "2")
    steps = tmp_path / "steps.json"
    whole = train(*common, "--save", tmp_path / "whole", ranks=ranks, steps=steps)
    assert whole.status == 0, whole.errors

    restart = (*common, "--save", folder, "--load", folder)
    stages = [
        (f"{SERIALIZATION}:save_config:2", "iter_0000004.partial"),  # tensors without metadata
        (f"{CHECKPOINTING}:put_in_place:1", "iter_0000004.partial"),  # complete but not renamed
        (f"{CHECKPOINTING}:write_tracker:1", "iter_0000004"),  # renamed but not the latest
    ]
    for at, left in stages:
        killed(at, *restart, ranks=ranks)
        assert latest(folder) == "2"
        assert (folder / left).is_dir()

    resumed = train(*restart, ranks=ranks, steps=steps)
    assert resumed.status == 0, resumed.errors
    assert list(resumed.lines) == [3, 4, 5, 6]
    assert resumed.steps == whole.steps[2:]
    for iteration, line in resumed.lines.items():
        assert line == whole.lines[iteration]
    assert latest(folder) == "6"
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        p.name for p in (tmp_path / "whole").iterdir()
    )


def test_half_a_replacement_is_undone(tmp_path, monkeypatch):
    monkeypatch.setattr(files.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(files.dist, "barrier", lambda: None)
    outdated, partial = tmp_path / "iter_0000004", tmp_path / "iter_0000004.partial"
    for path, text in ((outdated, "old"), (partial, "new")):
        path.mkdir()
        (path / "content").write_text(text)

    class Killed(BaseException):
        pass

    def rename(path, target, *, really=Path.rename):
        if path == partial:
            raise Killed
        return really(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Killed):
        files.put_in_place(partial, outdated)
    assert not outdated.exists()
    files.undo_replacement(Namespace(load=str(tmp_path)))
    assert (outdated / "content").read_text() == "old"


@pytest.fixture(scope="module")
def halves(corpus, tmp_path_factory):
    """Train six iterations on two tensor-parallel ranks, with a checkpoint every two iterations."""
    folder = tmp_path_factory.mktemp("halves")
    options = ("--data-path", corpus, *NO_DROPOUT, "--save", folder, "--save-interval", "2")
    whole = train(*options, *TENSOR, "--sequence-parallel", ranks=2)
    assert whole.status == 0, whole.errors[-3000:]
    return whole, folder


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        pytest.param((), 1, id="one-rank"),
        pytest.param(("--pipeline-model-parallel-size", "2"), 2, id="pipeline"),
    ],
)
def test_a_checkpoint_of_two_tensor_parallel_ranks_goes_on_elsewhere(halves, corpus, layout, ranks):
    whole, folder = halves
    options = ("--data-path", corpus, *NO_DROPOUT, "--load", folder, "--ckpt-step", "2")
    moved: Training = train(*options, *layout, ranks=ranks)
    assert moved.status == 0, moved.errors[-3000:]
    assert list(moved.losses) == [3, 4, 5, 6]
    for iteration, loss in moved.losses.items():
        assert loss == pytest.approx(whole.losses[iteration], rel=1e-5)
