"""What is damaged, foreign or strange is said file by file, and never a traceback."""

from __future__ import annotations

import pytest

from megatron.analysis.__main__ import main


@pytest.mark.parametrize("ending", [".csv", ".json", ".txt"])
def test_a_folder_with_nothing_that_can_be_read_is_said_file_by_file(tmp_path, capsys, ending):
    (tmp_path / "a.pt").write_bytes(b"")
    options = ["stats", str(tmp_path), "--output", str(tmp_path / f"found{ending}")]
    assert main([*options, "--formats", "mxfp8"]) == 3
    printed = capsys.readouterr()
    assert "a.pt: the file is empty" in printed.err
    assert "0 tensors, 0 values" in printed.out
