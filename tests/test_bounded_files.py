"""Test that small untrusted files are read in bounded time and memory, or refused with an error."""

import errno
import io
import json
import os
import socket

import pytest

from megatron.bounded_files import (
    NeverWaiting,
    UnusableFileError,
    check_regular,
    open_regular,
    parse_json,
    printable,
    read_bytes,
    read_json,
    read_text,
    walk,
)
from tests.deep_folders import deep_folders


def test_a_good_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "good.json"
    path.write_text(json.dumps({"a": [1, 2.5, None, "é"]}), encoding="utf-8")
    assert read_json(path) == {"a": [1, 2.5, None, "é"]}
    assert read_bytes(path) == path.read_bytes()


def test_a_link_to_a_regular_file_is_followed(tmp_path):
    (tmp_path / "blob").write_text("[1]")
    (tmp_path / "link.json").symlink_to("blob")
    assert read_json(tmp_path / "link.json") == [1]


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "marked.json"
    path.write_bytes(b"\xef\xbb\xbf[1]")
    assert read_text(path) == "[1]"
    assert read_json(path) == [1]


def test_a_missing_file_is_told_from_an_unusable_one(tmp_path):
    for read in (check_regular, open_regular, read_bytes, read_text, read_json):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "missing")


def special(folder, kind):
    path = folder / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    return path


@pytest.mark.parametrize("kind", ["folder", "FIFO", "device", "socket"])
@pytest.mark.parametrize("read", [check_regular, open_regular, read_bytes, read_text, read_json])
def test_special_files_are_refused_by_name(tmp_path, kind, read):
    path = special(tmp_path, kind)
    with pytest.raises(UnusableFileError, match=rf"{kind}: .*{kind}.*not a regular file"):
        read(path)


def test_a_file_replaced_by_a_pipe_between_check_and_opening_is_refused(tmp_path, monkeypatch):
    path = special(tmp_path, "FIFO")
    monkeypatch.setattr("megatron.bounded_files.check_regular", lambda path: None)
    with pytest.raises(UnusableFileError, match="not a regular file"):
        open_regular(path)


def test_a_large_file_is_not_read(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole: no byte of it is on the disk
    with pytest.raises(UnusableFileError, match="larger than 16 MiB"):
        read_text(path)
    with pytest.raises(UnusableFileError, match="larger than 100 bytes"):
        read_bytes(path, limit=100)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\x80abc", "not UTF-8 text .byte 0 is 0x80"),
        ("{}".encode("utf-16"), "not UTF-8 text"),
        (b"", "not usable JSON"),
        (b"{", "not usable JSON"),
        (b"[" * 500 + b"]" * 500, "nested deeper than 64 levels"),
        (b"[" * 10**6, "nested deeper than 64 levels"),
        (b'{"a":' * 10**5, "nested deeper than 64 levels"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' occurs twice"),
        (rb'{"a": ["\ud800"]}', r"a lone surrogate in the string '\\ud800'"),
        (rb'{"\udfff": 1}', r"a lone surrogate in the string '\\udfff'"),
        (b"1" * 5000, "not usable JSON: Exceeds the limit"),
    ],
)
def test_what_is_no_usable_json_is_refused(tmp_path, content, why):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(UnusableFileError, match=f"bad.json: .*{why}") as caught:
        read_json(path)
    assert "\n" not in str(caught.value)


def test_depth_is_counted_in_levels():
    assert parse_json("[[1]]", depth=2) == [[1]]
    with pytest.raises(ValueError, match="nested deeper than 1 levels"):
        parse_json("[[1]]", depth=1)


def test_printable_text_is_one_line_without_escape_sequences():
    assert printable("plain é 中") == "plain é 中"
    assert printable("a\nb\x1b[31m\ud800\u202e") == "a\\nb\\x1b[31m\\ud800\\u202e"
    assert printable("x" * 300, limit=10) == "x" * 10 + "..."
    assert printable(7) == "7"


def test_a_name_from_outside_is_escaped_too(tmp_path):
    path = tmp_path / "a\n[ERROR] forged"
    path.mkdir()
    with pytest.raises(UnusableFileError) as caught:
        read_text(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UnusableFileError, match="null"):
        read_text("a\0b")


def test_a_read_that_would_wait_is_an_error():
    """Some files of /proc look regular and never end; Python returns None for such a read."""
    reading, writing = os.pipe()
    try:
        os.set_blocking(reading, False)
        with (
            NeverWaiting(io.FileIO(reading, "rb")) as file,
            pytest.raises(BlockingIOError, match="would wait for another process"),
        ):
            file.read(10)
    finally:
        os.close(writing)


def test_folders_are_walked_as_os_walk_does(tmp_path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "a").mkdir()
    for name in ("x", "a/y", "b/c/z"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("b")
    (tmp_path / "a" / "circle").symlink_to("circle")
    errors: list[OSError] = []
    found = {place: (set(f), set(n)) for place, f, n in walk(tmp_path, errors.append)}
    assert found == {place: (set(f), set(n)) for place, f, n in os.walk(tmp_path)}
    assert not errors


def test_folders_are_walked_however_deep_they_are(tmp_path):
    """Recursion ends at 1,000 folders inside one another, and a path at 4,096 bytes."""
    errors: list[OSError] = []
    with deep_folders(tmp_path, 2100):
        assert len(list(walk(tmp_path, errors.append))) > 1500
    [error] = errors
    assert error.errno == errno.ENAMETOOLONG
