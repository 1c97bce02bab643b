"""Nothing in an untrusted checkpoint is executed, and any damage results in one clear error."""

import io
import json
import pickle
import shutil
from pathlib import Path

import numpy as np

from tests import forks
from tests.subprocesses import REPO, environment
from tests.training.checkpointing import hostile_checkpoints, hostile_pickles, hostile_weights
from tests.training.checkpointing.hostile_checkpoints import Case, Checkpoint, special
from tests.training.checkpointing.hostile_pickles import Touch, archive
from tests.training.data import hostile_tokenizers
from tests.training.runs import MODEL, NO_DROPOUT, refused, succeeded, train

WORKER = Path(__file__).with_name("hostile_checkpoints_worker.py")
SIZE = ("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2")
MEMORY = 1 << 30  #: bytes by which the process may grow in all cases together


def opened(cases: list[Case], corpus: Path, root: Path, canary: Path) -> list[dict]:
    """Open every case in one process and return the results."""
    plan, results = root / "cases.json", root / "results.json"
    plan.write_text(json.dumps([vars(c) | {"folder": str(c.folder)} for c in cases]))
    options = (*MODEL, *NO_DROPOUT, *SIZE, "--train-iters", "4", "--data-path", corpus)
    done = forks.run(*(WORKER, plan, results, canary, *options), env=environment(PYTHONPATH=REPO))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    report = json.loads(results.read_text())
    assert report["memory"] < MEMORY
    return report["cases"]


def problems(cases: list[Case], results: list[dict]) -> list[str]:
    """Return a description of every refusal that is missing or wrong."""
    found = []
    for case, result in zip(cases, results, strict=True):
        said = f"{case.name}: {result['type']} {result['message'][:300]!r}"
        if result["canary"]:
            found.append(f"executed {said}")
        elif result["type"] != "UserError":
            found.append(f"not refused {said}")
        elif case.names not in result["message"]:
            found.append(f"lacks {case.names}: {said}")
        elif not result["message"].isprintable() or len(result["message"]) > 1000:
            found.append(f"more than a line: {said}")
        elif result["seconds"] > 20:
            found.append(f"{result['seconds']} s: {said}")
    return found


def linked(folder: Path) -> None:
    """Move every file elsewhere and link to it, as caches and clusters do."""
    blobs = folder.with_name(f"{folder.name} blobs")
    blobs.mkdir()
    for number, path in enumerate(p for p in folder.rglob("*") if p.is_file()):
        path.symlink_to(path.rename(blobs / str(number)))


def test_good_files_are_read_also_through_links(checkpoints, corpus, tmp_path):
    """The unchanged files load, so the refusals in other tests are due to the changes alone."""
    cases = []
    for links in (False, True):
        root = tmp_path / f"links {links}"
        root.mkdir()
        weights = hostile_weights.make(root / "weights")
        checkpoint = Path(shutil.copytree(checkpoints, root / "checkpoint"))
        tokenizer = root / "tokenizer"
        tokenizer.mkdir()
        (tokenizer / "tokenizer.json").write_text(json.dumps(hostile_tokenizers.TOKENIZER))
        settings = json.dumps(hostile_tokenizers.SETTINGS)
        (tokenizer / "tokenizer_config.json").write_text(settings)
        for kind, folder in (
            ("checkpoint", checkpoint),
            ("weights", weights),
            ("tokenizer", tokenizer),
        ):
            if links:
                linked(folder)
            cases.append(Case(f"{kind}, links {links}", kind, folder, ""))
    for result in opened(cases, corpus, tmp_path, tmp_path / "canary"):
        assert result["type"] is None, result


def test_nothing_runs_in_the_whole_program(run_quickly, checkpoints, tmp_path):
    """A command in each file of a checkpoint ends the program with one line."""
    canary, root = tmp_path / "canary", tmp_path / "cases"
    root.mkdir()
    wanted = ("indices: reduce", "commons: reduce", "parts: random states: reduce")
    cases = hostile_checkpoints.checkpoints(checkpoints, root, canary)
    for case in (case for case in cases if case.name in wanted):
        line = refused(run_quickly("--load", case.folder))
        assert case.names in line
        assert "names 'posix.system', which no checkpoint needs" in line
        assert not canary.exists()


def test_hostile_caches_of_a_data_set_are_refused(run_quickly, corpus, tmp_path):
    """The wheel unpickles a cached index that is not an array."""
    canary, good = tmp_path / "canary", tmp_path / "good"
    succeeded(run_quickly("--data-cache-path", good))
    array = io.BytesIO()
    np.save(array, np.array([Touch(canary)], dtype=object), allow_pickle=True)
    floats = io.BytesIO()
    np.save(floats, np.ones(3))
    files = hostile_pickles.programs(canary) | {
        "objects": array.getvalue(),
        "floats": floats.getvalue(),
        "archive": archive(pickle.dumps(Touch(canary))),
        "cut off": array.getvalue()[:20],
    }
    cases = [Case("good", "cache", good, "")]
    for number, (name, content) in enumerate(files.items()):
        folder = Path(shutil.copytree(good, tmp_path / str(number)))
        for path in folder.rglob("*.npy"):
            path.write_bytes(content)
        cases.append(Case(name, "cache", folder, "_index.npy"))
    folder = Path(shutil.copytree(good, tmp_path / "fifo"))
    special(next(folder.rglob("*-shuffle_index.npy")), "fifo")
    cases.append(Case("fifo", "cache", folder, "-shuffle_index.npy"))
    control, *results = opened(cases, corpus, tmp_path, canary)
    assert control["type"] is None
    found = problems(cases[1:], results)
    assert not found, "\n".join(found)


def test_hostile_checkpoints_are_refused(checkpoints, corpus, tmp_path):
    canary = tmp_path / "canary"
    root = tmp_path / "cases"
    root.mkdir()
    cases = list(hostile_checkpoints.checkpoints(checkpoints, root, canary))
    assert len(cases) > 100
    results = opened(cases, corpus, tmp_path, canary)
    found = problems(cases, results)
    assert not found, "\n".join(found)


def test_hostile_folders_of_weights_are_refused(corpus, tmp_path):
    canary, root = tmp_path / "canary", tmp_path / "cases"
    root.mkdir()
    cases = list(hostile_weights.folders(root, canary))
    assert len(cases) > 60
    found = problems(cases, opened(cases, corpus, tmp_path, canary))
    assert not found, "\n".join(found)


def test_hostile_tokenizers_are_refused(corpus, tmp_path):
    canary, root = tmp_path / "canary", tmp_path / "cases"
    root.mkdir()
    cases = list(hostile_tokenizers.tokenizers(root, canary))
    assert len(cases) > 40
    found = problems(cases, opened(cases, corpus, tmp_path, canary))
    assert not found, "\n".join(found)


def test_one_rank_speaks_for_all(corpus, tmp_path):
    """A command in the random states of the second rank ends both ranks with one line."""
    canary, good = tmp_path / "canary", tmp_path / "good"
    words = (*NO_DROPOUT, *SIZE, "--data-path", corpus)
    save = ("--save", good, "--save-interval", "2", "--train-iters", "2")
    succeeded(train(*words, *save, ranks=2))
    checkpoint = Checkpoint(good, iteration=2)
    # The run may use a schedule other than the checkpoint's, so only the damage can end it.
    load = ("--load", good, "--train-iters", "4", "--override-opt_param-scheduler")
    for payload in (archive(pickle.dumps(Touch(canary))), archive(b"N.")):
        checkpoint.replace("rng_state/shard_1", payload)
        done = train(*words, *load, ranks=2)
        assert done.status != 0
        assert "Traceback" not in done.errors
        (line,) = [line for line in done.errors.splitlines() if "[ERROR]" in line]
        assert f"[ERROR] the checkpoint {checkpoint.path} cannot be read: " in line
        assert not canary.exists()
