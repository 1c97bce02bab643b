"""Tests of the outputs of an earlier `draw`: kept, replaced, removed or left unchanged."""

from __future__ import annotations

import os

import pytest

from megatron.analysis.__main__ import main
from megatron.analysis.outputs import provenance
from tests.analysis.fake_dump import write_dump, write_two_types

PNG = b"\x89PNG\r\n\x1a\n"

pytestmark = pytest.mark.usefixtures("small_pictures")


def test_what_would_be_the_same_again_is_left(tmp_path, capsys):
    """Check that outputs are redrawn only if a file, the dump or an option has changed."""
    logs, output = tmp_path / "logs", tmp_path / "draw"
    path = write_dump(logs, layers=1)[0]
    picture, text = output / "gradients" / "by_layer.png", output / "global_statistics"

    def drawn(*options: str) -> set[str]:
        """Return the outputs that were drawn, and check that no other file changed."""
        some = ["--figures", "gradients", "global_statistics", "overflow_analysis"]
        stamps = {path: path.stat().st_mtime_ns for path in output.rglob("[!.]*")}
        assert main(["draw", str(logs), "--output-dir", str(output), *some, *options]) == 0
        printed = capsys.readouterr().out
        made = {line.removeprefix("Wrote ") for line in printed.splitlines() if "Wrote " in line}
        assert all(
            path.stat().st_mtime_ns == old
            for path, old in stamps.items()
            if path.is_file() and str(path) not in made
        )
        assert "no overflow_analysis/special_values: every value is finite" in printed
        left = sum(each.is_file() for each in output.rglob("[!.]*")) - len(made)
        assert (f"{left} files are up to date" in printed) == (left > 0)
        return {each.removeprefix(f"{output}/").partition("/")[0] for each in made}

    everything = {"gradients", "global_statistics", "overflow_analysis"}
    assert drawn() == everything
    assert drawn() == set()
    picture.write_bytes(b"retouched")
    assert drawn() == {"gradients"}
    assert picture.read_bytes()[:8] == PNG
    next(text.iterdir()).unlink()
    assert drawn() == {"global_statistics"}
    assert drawn("--formats", "mxfp8") == everything
    assert drawn("--formats", "mxfp8") == set()
    assert drawn() == everything
    os.utime(path, (1, 1))
    assert drawn() == everything


def test_figures_of_another_dump_are_kept_and_stale_ones_of_the_same_go(tmp_path, capsys):
    dump = tmp_path / "logs"
    write_two_types(dump)
    options = ["--output-dir", str(tmp_path / "draw"), "--figures", "heatmaps", "--formats"]
    assert main(["draw", str(dump / "bf16"), *options, "mxfp8", "mxfp4"]) == 0
    names = {path.name for path in (tmp_path / "draw" / "heatmaps").iterdir()}
    assert {"sqnr_mxfp8.png", "sqnr_mxfp4.png", "amax.png"} < names
    (tmp_path / "draw" / "heatmaps" / "mine.txt").write_text("a note")
    assert main(["draw", str(dump / "bf16"), *options, "mxfp8"]) == 0
    assert "kept" not in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "draw" / "heatmaps").iterdir()}
    assert {"sqnr_mxfp8.png", "amax.png", "mine.txt"} < names
    assert "sqnr_mxfp4.png" not in names
    assert main(["draw", str(dump / "mxfp8"), *options, "mxfp8"]) == 0
    assert "kept the earlier output as" in capsys.readouterr().out
    [aside] = (tmp_path / "draw").glob("heatmaps_*")
    assert {path.name for path in aside.iterdir()} == names


def test_a_library_that_is_not_installed_hinders_no_figure_without_need_of_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(provenance, "_LIBRARIES", ("matplotlib", "no-such-package"))
    with_it = provenance.fingerprint(tmp_path, [])
    monkeypatch.setattr(provenance, "_LIBRARIES", ("matplotlib", "numpy"))
    assert provenance.fingerprint(tmp_path, []) != with_it
