"""preprocess.py --check accepts sound data and names every kind of damage."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "script/data"))

import preprocess

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "99", "--append-eod")


@pytest.fixture
def data(tmp_path) -> Path:
    """Return the prefix of a data set with three documents and 9 tokens."""
    (tmp_path / "in.txt").write_text("1 2 3\n\n4\n\n5 98")
    arguments = ["--input", str(tmp_path / "in.txt"), "--output-prefix", str(tmp_path / "o")]
    assert preprocess.main([*arguments, *NULL, "--workers", "1"]) == 0
    return tmp_path / "o_text_document"


def check(capsys, prefix: Path | str, *options: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = preprocess.main(["--check", str(prefix), *options])
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return status, printed.out, printed.err


def test_sound_data(data, capsys):
    for name in (data, f"{data}.bin", f"{data}.idx"):
        status, out, err = check(capsys, name)
        assert (status, err) == (0, "")
        assert out == f"{data}: 3 documents, 9 tokens (uint16), ids 1 to 99 of 100\n"
    assert check(capsys, data, "--tokenizer-type", "NullTokenizer", "--vocab-size", "99")[0] == 0
    Path(f"{data}.json").unlink()
    status, out, _ = check(capsys, data)
    assert status == 0
    assert out.endswith("of an unknown vocabulary (no manifest)\n")


def change_bin(data: Path) -> None:
    ids = np.fromfile(f"{data}.bin", dtype=np.uint16)
    ids[4] = 60000
    ids.tofile(f"{data}.bin")


def cut_bin(data: Path) -> None:
    path = Path(f"{data}.bin")
    path.write_bytes(path.read_bytes()[:-2])


def change_idx(offset: int, form: str, value: int):
    def change(data: Path) -> None:
        content = bytearray(Path(f"{data}.idx").read_bytes())
        struct.pack_into(form, content, offset, value)
        Path(f"{data}.idx").write_bytes(content)

    return change


def cut_idx(data: Path) -> None:
    path = Path(f"{data}.idx")
    path.write_bytes(path.read_bytes()[:-1])


def change_manifest(name: str, value: object):
    def change(data: Path) -> None:
        path = Path(f"{data}.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return change


#: Size of the header in bytes; 3 lengths of 4, 3 positions of 8 and 4 bounds of 8 bytes follow.
HEADER = 34


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (change_bin, "token ids from 1 to 60000, but the vocabulary has 100"),
        (cut_bin, "the .bin has 16 bytes, but the index requires 18"),
        (change_idx(HEADER, "<i", 3), "sequence 1 has a wrong length or position"),
        (change_idx(HEADER + 12 + 8, "<q", 2), "sequence 1 has a wrong length or position"),
        (change_idx(HEADER + 36 + 8, "<q", 0), "the bounds of the documents do not ascend from 0"),
        (change_idx(HEADER + 36, "<q", 1), "the bounds of the documents do not ascend from 0"),
        (change_idx(HEADER + 36 + 24, "<q", 9), "the documents end with sequence 9 of 3"),
        (cut_idx, "the index has 101 bytes, but needs 102"),
        (change_idx(0, "<c", b"X"), "is not a megatron-core index"),
        (change_idx(17, "<B", 77), "is not an index of token ids (dtype code 77)"),
        (
            lambda data: Path(f"{data}.idx").write_bytes(b""),
            "is not an index: it has 0 bytes, but a header has 34",
        ),
        (lambda data: Path(f"{data}.bin").unlink(), "No such file or directory"),
        (lambda data: Path(f"{data}.json").write_text("{"), "does not describe a data set"),
        (change_manifest("documents", 4), "documents: 3, but"),
        (change_manifest("tokens", 8), "tokens: 9, but"),
        (change_manifest("dtype", "int32"), "dtype: uint16, but"),
        (change_manifest("schema_version", 9), "schema version 9, but this reader understands 1"),
        (change_manifest("other", 9), "does not describe a data set"),
    ],
)
def test_damage_is_named(data, capsys, damage, said):
    damage(data)
    status, out, err = check(capsys, data)
    assert (status, out) == (1, "")
    assert err.startswith("[ERROR] ")
    assert said in err


def test_another_vocabulary(data, capsys):
    status, _, err = check(capsys, data, "--tokenizer-type", "NullTokenizer", "--vocab-size", "50")
    assert status == 1
    said = "has a vocabulary of 100, but --vocab-size 50 and the end-of-document token make 51"
    assert f"{said}; give --vocab-size 99" in err
    assert "token ids from 1 to 99, but the vocabulary has 51" in err
    assert check(capsys, data, "--tokenizer-type", "NullTokenizer", "--vocab-size", "99")[0] == 0
