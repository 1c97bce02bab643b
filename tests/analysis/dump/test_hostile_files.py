"""Test files that are broken, are something else, or would run code.

Each reader must report these files, execute nothing, and read all other files.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from megatron.analysis.__main__ import main
from megatron.analysis.dump.tensor_files import UnreadableTensorError, read_tensor
from megatron.analysis.store import TensorStore
from script.visualization import quick_visualize
from tests import forks
from tests.analysis.fake_dump import LAYER, write_dump
from tests.subprocesses import REPO, environment, run


class Evil:
    """An object that creates a file when it is unpickled."""

    def __init__(self, made: Path):
        self.made = made

    def __reduce__(self):
        return Path.touch, (self.made,)


def save(path, *, made, **how):
    torch.save({"tensor": torch.ones(64, 2, 2, 32), "metadata": Evil(made)}, path, **how)


def damage(path):
    """Damage the pickle inside the archive."""
    good = path.read_bytes()
    at = good.index(b"data.pkl") + 8
    path.write_bytes(good[:at] + b"\xff" * 60 + good[at + 60 :])


def instead(path, make):
    path.unlink()
    make(path)


#: Functions that make a good file hostile; `made` is the file that code in it would create.
SPOILT = {
    "evil archive": lambda path, made: save(path, made=made),
    "evil legacy file": lambda path, made: save(
        path, made=made, _use_new_zipfile_serialization=False
    ),
    "evil pickle": lambda path, made: path.write_bytes(pickle.dumps(Evil(made))),
    "empty": lambda path, made: path.write_bytes(b""),
    "text": lambda path, made: path.write_bytes(b"this is no tensor\n"),
    "no archive": lambda path, made: path.write_bytes(b"PK\x03\x04 but no archive"),
    "cut": lambda path, made: path.write_bytes(path.read_bytes()[:9000]),
    "damaged": lambda path, made: damage(path),
    "folder": lambda path, made: instead(path, Path.mkdir),
    "link to itself": lambda path, made: instead(path, lambda p: p.symlink_to(p.name)),
    "link to nothing": lambda path, made: instead(path, lambda p: p.symlink_to("nothing")),
    "pipe": lambda path, made: instead(path, os.mkfifo),
}


def by_store(folder, _):
    store = TensorStore(folder)
    told = [*map(str, store.problems), *map(str, store.missing["path"])]
    for record in store.records.itertuples():
        for load in (store.load, store.load_global):
            try:
                load(record)
            except UnreadableTensorError as error:
                told.append(str(error))
    assert all("\n" not in each for each in told), "one line per problem"
    return "\n".join(dict.fromkeys(told))


def by_verify(folder, capsys):
    assert main(["verify", str(folder)]) == 1
    told = capsys.readouterr()
    assert told.err == ""
    return "\n".join(line for line in told.out.splitlines() if line.startswith("ERROR  file"))


@pytest.mark.parametrize("reader", [by_store, by_verify])
@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.parametrize("index", [True, False], ids=["indexed", "bare"])
def test_a_spoilt_file_is_named_and_not_run_and_the_others_are_read(
    tmp_path, capsys, reader, kind, index
):
    made = tmp_path / "made"
    paths = write_dump(tmp_path / "dump", layers=1, index=index)
    SPOILT[kind](paths[3], made)
    told = reader(tmp_path / "dump", capsys)
    assert str(paths[3]) in told
    assert not any(str(path) in told for path in paths if path != paths[3])
    assert "Traceback" not in told
    if kind == "evil archive":
        assert "loading them could run code" in told
    assert not made.exists()


@pytest.mark.parametrize("index", [True, False], ids=["indexed", "bare"])
def test_all_of_them_at_once_are_named_by_the_drawing_and_the_others_are_drawn(
    tmp_path, capsys, index
):
    made, draw = tmp_path / "made", tmp_path / "draw"
    good = write_dump(tmp_path / "dump", layers=2, index=index)
    spoilt = {kind: good.pop() for kind in SPOILT}
    for kind, path in spoilt.items():
        SPOILT[kind](path, made)
    arguments = ["--tensor_dir", str(tmp_path / "dump"), "--output_dir", str(draw)]
    assert quick_visualize.main(arguments) == 3
    told = capsys.readouterr()
    *lines, last = told.err.splitlines()
    named = [line.removeprefix("[ERROR] ").split(".pt: ")[0] + ".pt" for line in lines]
    assert sorted(named) == sorted(map(str, spoilt.values()))
    assert f"{len(spoilt)} file(s) were left out" in last
    assert f"{len(good)} tensors" in told.out
    assert (draw / "quick_analysis.png").exists()
    assert not made.exists()


def test_the_payload_would_make_the_file(tmp_path):
    """Otherwise the tests above could not fail."""
    save(tmp_path / "a.pt", made=tmp_path / "made")
    assert not (tmp_path / "made").exists()
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "made").exists()


def test_the_drawing_script_refuses_code_as_a_user_runs_it(tmp_path):
    dump = tmp_path / "dump" / "mxfp8"
    paths = write_dump(dump, layers=1)
    [index] = dump.glob("*.jsonl")
    index.write_text("".join(index.read_text().splitlines(keepends=True)[:2]))
    for path in paths[2:]:  # two tensors are enough, and more would take longer to draw
        path.unlink()
    save(paths[0], made=tmp_path / "made")
    save(paths[0].with_name("new.pt"), made=tmp_path / "made")
    done = run(
        [
            *("bash", REPO / "run_tensor_draw.sh", "visualize"),
            *("--tensor-dir", tmp_path / "dump", "--output-dir", tmp_path / "draw"),
        ],
        env=environment(LAB_PYTHON=forks.interpreter("analysis")),
    )
    assert done.returncode == 3
    for path in (paths[0], paths[0].with_name("new.pt")):
        assert f"[ERROR] {path}: it holds objects other than tensors" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "draw" / "quick_analysis.png").exists()
    assert not (tmp_path / "made").exists()


def test_links_of_folders_in_a_circle_are_not_followed(tmp_path):
    write_dump(tmp_path / "dump", layers=1)
    (tmp_path / "dump" / "again").symlink_to(tmp_path / "dump", target_is_directory=True)
    assert len(TensorStore(tmp_path / "dump")) == len(LAYER)


def test_an_index_cannot_point_out_of_its_folder(tmp_path):
    """A file elsewhere is neither read nor shown as a tensor of this dump."""
    write_dump(tmp_path / "dump", layers=1)
    [outside, *_] = write_dump(tmp_path / "outside", layers=1, index=False)
    [index] = (tmp_path / "dump").glob("*.jsonl")
    index.write_text(index.read_text().replace(f'"{outside.name}"', f'"../outside/{outside.name}"'))
    store = TensorStore(tmp_path / "dump")
    assert set(store.records["path"]) == {str(path) for path in (tmp_path / "dump").glob("*.pt")}
    assert len(store.missing) == 0
    [problem] = store.problems
    assert problem.path == index
    assert f"file is '../outside/{outside.name}', not a plain file name" in problem.why


@pytest.mark.parametrize(
    "payload",
    [
        {"tensor": [1, 2]},
        {"weights": torch.ones(1)},
        [torch.ones(1)],
        {"tensor": torch.ones(2).to_sparse()},
    ],
)
def test_a_file_without_a_plain_tensor_is_explained(tmp_path, payload):
    torch.save(payload, tmp_path / "a.pt")
    with pytest.raises(UnreadableTensorError, match=r"a\.pt: (holds no|does not hold)"):
        read_tensor(tmp_path / "a.pt")


def test_a_strange_name_without_metadata_is_a_problem(tmp_path):
    write_dump(tmp_path, layers=1)
    torch.save({"tensor": torch.ones(1)}, tmp_path / "checkpoint.pt")
    store = TensorStore(tmp_path)
    assert len(store) == len(LAYER)
    assert [problem.path.name for problem in store.problems] == ["checkpoint.pt"]
    assert "{timestamp}_{counter}" in store.problems[0].why


def test_a_tensor_that_is_not_what_the_index_says_is_a_problem(tmp_path):
    paths = write_dump(tmp_path, layers=1)
    paths[0].write_bytes(paths[1].read_bytes())
    store = TensorStore(tmp_path)
    with pytest.raises(UnreadableTensorError, match=r"shape \[96, 64\].*is \[64, 2, 64\]"):
        store.load(0)
