"""Test quick_visualize.py as a command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from script.visualization import quick_visualize
from tests import forks
from tests.analysis.fake_dump import LAYER, write_dump
from tests.subprocesses import REPO

SCRIPT = REPO / "script" / "visualization" / "quick_visualize.py"
CANNOT_WRITE = "[ERROR] cannot write to the output folder"
PNG = b"\x89PNG\r\n\x1a\n"


def visualize(*arguments, cwd=REPO):
    done = forks.run(SCRIPT, *arguments, cwd=cwd)
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("dash", ["_", "-"])
def test_it_draws_and_writes_from_any_folder(tmp_path, dash):
    write_dump(tmp_path / "logs" / "mxfp8", layers=2)
    done = visualize(f"--tensor{dash}dir", "logs", f"--output{dash}dir", "a/b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a" / "b" / "quick_analysis.png").read_bytes().startswith(PNG)
    assert "28 tensors" in (tmp_path / "a" / "b" / "tensor_stats.txt").read_text()
    assert "28 tensors\n  204,800 values\n" in done.stdout
    assert "run 20250908_095200_abc123: 28 tensors" in done.stdout
    assert f"Wrote {Path('a/b/quick_analysis.png')}" in done.stdout
    assert not (tmp_path / "logs" / "mxfp8" / ".statistics").exists()  # no format is applied
    assert done.stderr == ""


def test_a_corrupt_file_is_named_and_the_others_are_drawn(tmp_path):
    paths = write_dump(tmp_path / "logs", layers=1)
    paths[0].write_bytes(b"")
    paths[1].write_bytes(paths[1].read_bytes()[:1000])
    done = visualize("--tensor_dir", tmp_path / "logs", "--output_dir", tmp_path / "draw")
    assert done.returncode == 3
    assert f"[ERROR] {paths[0]}: the file is empty\n" in done.stderr
    assert f"[ERROR] {paths[1]}: not an archive of torch.save: corrupt, truncated" in done.stderr
    assert "[ERROR] 2 file(s) were left out; replace or remove them" in done.stderr
    assert (tmp_path / "draw" / "quick_analysis.png").exists()
    text = (tmp_path / "draw" / "tensor_stats.txt").read_text()
    assert f"{len(LAYER) - 2} tensors" in text
    assert text.count(str(paths[0])) == 1


def test_an_earlier_picture_of_another_dump_is_kept_and_named(tmp_path):
    write_dump(tmp_path / "a", layers=1)
    write_dump(tmp_path / "b", layers=2)
    draw = tmp_path / "draw"
    assert visualize("--tensor_dir", tmp_path / "a", "--output_dir", draw).returncode == 0
    done = visualize("--tensor_dir", tmp_path / "b", "--output_dir", draw)
    kept = [path for path in draw.iterdir() if path.stem[-1].isdigit()]
    assert len(kept) == 2
    for path in kept:
        assert f"kept the earlier output as {path}" in done.stdout


def test_nan_and_inf_are_reported(tmp_path):
    [path] = write_dump(tmp_path / "logs", layers=1)[:1]
    payload = torch.load(path, weights_only=True)
    payload["tensor"][0, 0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    torch.save(payload, path)
    done = visualize("--tensor_dir", tmp_path / "logs", "--output_dir", tmp_path / "draw")
    assert done.returncode == 0
    assert "1 NaN and 2 Inf values in 1 tensors" in done.stdout
    assert f"{path.name}: 1 NaN, 2 Inf" in done.stdout


def test_files_that_were_removed_are_mentioned(tmp_path):
    for path in write_dump(tmp_path / "logs", layers=1)[:2]:
        path.unlink()
    done = visualize("--tensor_dir", tmp_path / "logs", "--output_dir", tmp_path / "draw")
    assert done.returncode == 0
    assert "2 files listed in an index are missing" in done.stdout
    text = (tmp_path / "draw" / "tensor_stats.txt").read_text()
    assert "2 files listed in an index are missing" in text


def test_one_run_can_be_chosen(tmp_path):
    write_dump(tmp_path, layers=1, run_id="20250908_000000_a")
    write_dump(tmp_path / "b", layers=2, run_id="20250908_000001_b")
    done = visualize("--tensor_dir", tmp_path, "--output_dir", tmp_path / "draw", "--run", "latest")
    assert done.returncode == 0
    assert "run 20250908_000001_b: 28 tensors" in done.stdout
    assert "20250908_000000_a" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--tensor_dir", "nowhere"], 2, "[ERROR] no folder nowhere; "),
        (["--tensor_dir", "empty"], 2, "[ERROR] no .pt file in empty or below; "),
        (["--tensor_dir", "file"], 2, "[ERROR] file is not a folder; "),
        (["--tensor_dir", "logs", "--output_dir", "file/x"], 2, CANNOT_WRITE),
        (["--tensor_dir", "logs", "--output_dir", "/proc/x"], 2, CANNOT_WRITE),
        (["--tensor_dir", "logs", "--run", "x"], 2, "[ERROR] no run 'x' in logs; "),
        (["--workers", "0"], 2, "--workers is 0; give 1 or more"),
        (["--frobnicate"], 2, "unrecognized arguments"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, capsys, arguments, status, message):
    write_dump(tmp_path / "logs", layers=1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    try:
        found = quick_visualize.main(arguments)
    except SystemExit as ended:
        found = ended.code
    assert found == status
    assert message in capsys.readouterr().err
