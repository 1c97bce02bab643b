"""Test writes past the page cache: the bytes are the same on every file system."""

import errno
import fcntl
import itertools
import mmap
import os
import shutil
import subprocess
import threading
import time

import numpy as np
import pytest
import torch

from megatron.collection import direct_io
from megatron.collection.background_writer import BackgroundWriter
from megatron.collection.direct_io import DirectFile
from megatron.collection.host_buffers import HostBuffers
from megatron.collection.record_writer import RecordWriter
from tests.collection.samples import record
from tests.collection.small_direct_writes import use_small_pieces
from tests.file_systems import mount_or_skip

PAGE = mmap.PAGESIZE
PAGES = 8
PIECE = PAGES * PAGE
SIZES = [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 3 * PAGE, 3 * PIECE + 5 * PAGE + 7]


class Disk:
    """A file that records how it was written, and accepts as much as the test sets."""

    def __init__(self, file, refuses=0, takes=None):
        self._file, self._refuses, self._takes = file, refuses, takes
        self.writes: list[tuple[int, bool]] = []  #: bytes, and True if past the cache

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def write(self, data) -> int:
        direct = bool(fcntl.fcntl(self._file, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))
        if direct and self._refuses:
            raise OSError(self._refuses, "refused")
        taken = self._file.write(data[: self._takes])
        self.writes.append((taken, direct))
        return taken


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    for name in ("PIECE", "_buffers"):  # so that both are restored
        monkeypatch.setattr(direct_io, name, getattr(direct_io, name))
    use_small_pieces(PAGES)


def content(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def write(path, data: bytes, disk=Disk, **disk_s) -> list[tuple[int, bool]]:
    """Write small and large parts as torch does; return how the disk was written."""
    with DirectFile(path) as file:
        file._file = disk(file._file, **disk_s)
        ends = [0, 3, 67, max(67, len(data) - 11), len(data)]
        for begin, end in itertools.pairwise(ends):
            part = data[begin:end]
            assert file.write(part) == len(part)
    return file._file.writes


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "disk_s",
    [
        {},
        {"refuses": errno.EINVAL},
        {"refuses": errno.EOPNOTSUPP},
        {"takes": PAGE},
        {"takes": 1000},
    ],
    ids=str,
)
def test_a_file_has_the_bytes_that_were_written(tmp_path, size, disk_s):
    data = content(size)
    write(tmp_path / "file", data, **disk_s)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("size", SIZES)
def test_whole_pages_of_a_large_file_go_past_the_cache(tmp_path, size):
    if not takes_direct(tmp_path):
        pytest.skip("the file system of the tests has no O_DIRECT")
    writes = write(tmp_path / "file", content(size))
    past, through = ([n for n, direct in writes if direct is way] for way in (True, False))
    if size < PIECE:
        assert (past, sum(through)) == ([], size)
    else:
        assert (sum(past), sum(through)) == (size - size % PAGE, size % PAGE)


def takes_direct(folder) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except (AttributeError, OSError):
        return False
    return True


def test_a_file_system_that_refuses_when_it_is_asked(tmp_path, monkeypatch):
    """FUSE and old tmpfs refuse O_DIRECT with EINVAL; it is tried once per file."""
    asked = []
    ask = fcntl.fcntl

    def refuse(file, command, *flags):
        if command != fcntl.F_SETFL:
            return ask(file, command, *flags)
        asked.append(flags)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    data = content(3 * PIECE + 5)
    writes = write(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == data
    assert len(asked) == hasattr(os, "O_DIRECT")
    assert not any(direct for _, direct in writes)


def test_a_system_without_direct_writes(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    data = content(2 * PIECE + 5)
    write(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == data


def test_an_error_of_the_disk_is_not_taken_for_a_refusal(tmp_path):
    class Broken(Disk):
        def write(self, data):
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "file", content(PIECE), disk=Broken)


def test_after_an_error_nothing_more_is_written(tmp_path):
    file = DirectFile(tmp_path / "file")

    def break_off():
        with file:
            file.write(content(PAGE))
            raise KeyError

    with pytest.raises(KeyError):
        break_off()
    assert file._file.closed
    assert (tmp_path / "file").read_bytes() == b""


def test_each_thread_has_its_own_piece(tmp_path):
    data = [content(20 * PIECE + 7, seed) for seed in range(4)]
    writers = [
        threading.Thread(target=write, args=(tmp_path / str(n), part))
        for n, part in enumerate(data)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [(tmp_path / str(n)).read_bytes() for n in range(4)] == data


def test_a_fork_does_not_write_into_its_parent_s_piece(tmp_path):
    data = content(PAGE)
    with DirectFile(tmp_path / "file") as file:
        file.write(data)
        child = os.fork()
        if not child:
            try:
                with DirectFile(tmp_path / "other") as other:
                    other.write(content(PAGE, 1))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    assert (tmp_path / "file").read_bytes() == data
    assert (tmp_path / "other").read_bytes() == content(PAGE, 1)


def test_a_disk_that_is_busy_with_one_large_file_is_not_dead(tmp_path, monkeypatch):
    def slowly(file: DirectFile, data: np.ndarray) -> None:
        time.sleep(0.2)
        put(file, data)

    put = DirectFile._put
    monkeypatch.setattr(DirectFile, "_put", slowly)
    large = torch.zeros(20, PIECE, dtype=torch.uint8)
    writer = BackgroundWriter(
        RecordWriter(tmp_path, "run", 0), HostBuffers(large.nbytes), patience=3
    )
    started = time.monotonic()
    for counter in (1, 2):
        copy = writer.hold(large, {}, lambda: False)
        assert copy is not None, writer.error
        writer.submit(copy, record(counter))
    assert time.monotonic() - started > 3, "the writes take longer than the patience"
    writer.close()
    assert (writer.error, writer.written[0]) == (None, 2)


@pytest.fixture
def real_disk(tmp_path):
    """Return an ext4 file system for about a hundred files; mounting it requires permission."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(768 * PIECE)
    folder.mkdir()
    make = shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if make is None:
        pytest.skip("mkfs.ext4 is not installed")
    subprocess.run([make, "-q", "-F", str(image)], check=True, capture_output=True)
    mount_or_skip(folder, "loop", str(image), "ext4")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_keeps_whole_files_only(real_disk):
    writer = RecordWriter(real_disk, "run", 0)
    tensor = torch.arange(3 * PIECE // 4 + 1000, dtype=torch.int32)

    def fill():
        for number in range(1000):
            writer.write(tensor, record(number), threading.Lock(), {})

    with pytest.raises(OSError, match="No space left"):
        fill()
    writer.close()
    assert not list(real_disk.glob("*.partial"))
    files = sorted(real_disk.glob("*.pt"))
    assert len(files) == writer.records > 100
    for file in files:
        assert torch.equal(torch.load(file, weights_only=True)["tensor"], tensor)
