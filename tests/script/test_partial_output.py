"""Interrupted and failed runs of script/data/preprocess.py can be resumed with the same output."""

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests import forks
from tests.script.preprocess_runs import NULL, SCRIPTS, call, make_inputs, result, stop_after
from tests.subprocesses import environment, run

sys.path.insert(0, str(SCRIPTS))

import index_file
import partial_output
import readers


@pytest.fixture
def small_batches(monkeypatch):
    """Commit after every batch of about 700 bytes."""
    monkeypatch.setattr(readers, "BATCH_BYTES", 700)
    monkeypatch.setattr(partial_output, "COMMIT_SECONDS", 0.0)


def test_interrupted_runs_make_what_one_run_makes(tmp_path, monkeypatch, small_batches, capsys):
    """A run is interrupted repeatedly, within files and at their ends."""
    make_inputs(tmp_path)
    assert call(tmp_path, "whole") == 0
    whole = result(tmp_path, "whole")
    capsys.readouterr()

    stops = 0
    for batches in (1, 7, 3, 40, 2, 11, 1000):
        with monkeypatch.context() as patch:
            stop_after(patch, batches, KeyboardInterrupt())
            status = call(tmp_path, "cut")
        if status == 0:
            break
        stops += 1
        assert status == 130
        assert "cut.partial: the same command resumes" in capsys.readouterr().err
        assert not list(tmp_path.glob("cut_*")), "nothing has a final name before it is complete"
    assert stops >= 5
    assert status == 0
    printed = capsys.readouterr()
    assert "documents of an interrupted run" in printed.err
    assert "skipped 4 bad lines" in printed.out
    assert result(tmp_path, "cut") == whole


def test_a_run_interrupted_while_it_publishes(tmp_path, monkeypatch, capsys):
    make_inputs(tmp_path)
    assert call(tmp_path, "whole") == 0
    whole = result(tmp_path, "whole")
    replace = Path.replace
    for moved in range(4):
        prefix = f"cut{moved}"
        count = iter(range(100))

        def failing(self, target, count=count, moved=moved):
            final = self.parent.suffix == ".partial" and self.name != "progress.new"
            if final and next(count) == moved:
                raise KeyboardInterrupt
            return replace(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", failing)
            assert call(tmp_path, prefix) == 130
        assert (tmp_path / f"{prefix}_text_document.bin").exists() == (moved >= 2)
        assert call(tmp_path, prefix) == 0
        assert result(tmp_path, prefix) == whole


def test_a_killed_run_is_continued_and_leaves_no_worker(tmp_path):
    inputs = make_inputs(tmp_path, files=3, documents=3000)
    assert call(tmp_path, "whole") == 0
    code = (
        "import sys, partial_output, readers, preprocess\n"
        "partial_output.COMMIT_SECONDS = 0.0; readers.BATCH_BYTES = 9000\n"
        "sys.exit(preprocess.main(sys.argv[1:]))"
    )
    arguments = ["--input", *map(str, inputs), "--output-prefix", str(tmp_path / "cut"), *NULL]
    command = [sys.executable, "-c", code, *arguments, "--workers", "2"]
    state = tmp_path / "cut.partial/progress.json"
    with subprocess.Popen(command, cwd=SCRIPTS, env=environment(), stderr=subprocess.DEVNULL) as p:
        deadline = time.monotonic() + 120
        while not state.exists():
            assert p.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        workers = psutil.Process(p.pid).children()
        p.kill()
    assert len(workers) == 2
    assert not psutil.wait_procs(workers, timeout=30)[1], "workers outlive their parent"
    mark = json.loads(state.read_text())["mark"]
    assert 0 < mark["counts"]["text"]["documents"] < 9000
    assert not list(tmp_path.glob("cut_*"))
    assert call(tmp_path, "cut") == 0
    assert result(tmp_path, "cut") == result(tmp_path, "whole")


def test_a_damaged_file_that_is_mended_is_read_again(tmp_path, small_batches, capsys):
    damaged = make_inputs(tmp_path)[1]
    assert call(tmp_path, "whole") == 0
    good = damaged.read_bytes()
    damaged.write_bytes(good[: len(good) // 2])
    assert call(tmp_path, "cut") == 1
    error = capsys.readouterr().err
    assert f"[ERROR] {damaged} is damaged or was cut short" in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("cut_*"))
    damaged.write_bytes(good)
    assert call(tmp_path, "cut") == 0
    made, whole = result(tmp_path, "cut"), result(tmp_path, "whole")
    assert made == whole


def test_a_file_that_disappears_and_comes_back(tmp_path, monkeypatch, small_batches, capsys):
    paths = make_inputs(tmp_path)
    assert call(tmp_path, "whole") == 0
    begin = partial_output.PartialOutput.begin_file

    def losing(self, number):
        if number == 1:
            paths[2].rename(tmp_path / "elsewhere")
        begin(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(partial_output.PartialOutput, "begin_file", losing)
        assert call(tmp_path, "cut") == 1
    assert f"[ERROR] {paths[2]} has disappeared; put it back" in capsys.readouterr().err
    (tmp_path / "elsewhere").rename(paths[2])
    assert call(tmp_path, "cut") == 0
    assert result(tmp_path, "cut") == result(tmp_path, "whole")


def test_what_was_read_already_must_not_change(tmp_path, monkeypatch, small_batches, capsys):
    paths = make_inputs(tmp_path)
    with monkeypatch.context() as patch:
        stop_after(patch, 60, KeyboardInterrupt())
        assert call(tmp_path, "cut") == 130
    assert json.loads((tmp_path / "cut.partial/progress.json").read_text())["mark"]["file"] >= 1
    capsys.readouterr()
    assert call(tmp_path, "cut", "--json-keys", "body") == 1
    assert "holds an interrupted run, but with another json keys" in capsys.readouterr().err
    assert call(tmp_path, "cut", "--strict") == 1
    paths[0].write_text(json.dumps({"text": "1 2 3"}))
    assert call(tmp_path, "cut") == 1
    assert "part0.jsonl has changed since" in capsys.readouterr().err
    assert call(tmp_path, "cut", "--overwrite") == 0
    assert call(tmp_path, "whole") == 0
    assert result(tmp_path, "cut") == result(tmp_path, "whole")


def test_two_runs_do_not_write_the_same_files(tmp_path, capsys):
    make_inputs(tmp_path)
    (tmp_path / "o.partial").mkdir()
    with (tmp_path / "o.partial/lock").open("w") as lock:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)
        assert call(tmp_path, "o") == 1
    assert "another process is writing" in capsys.readouterr().err
    assert call(tmp_path, "o") == 0


def test_a_full_disk(tmp_path):
    """A limit on the size of files acts like a full disk: writing the tokens fails."""
    make_inputs(tmp_path)
    assert call(tmp_path, "whole") == 0
    code = (
        "import sys, resource, partial_output, readers, preprocess\n"
        "partial_output.COMMIT_SECONDS = 0.0; readers.BATCH_BYTES = 3000\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "sys.exit(preprocess.main(sys.argv[1:]))"
    )
    inputs = sorted(map(str, tmp_path.glob("part*")))
    arguments = ["--input", *inputs, "--output-prefix", str(tmp_path / "cut"), *NULL]
    words = ("-c", code, *arguments, "--workers", "2")
    done = forks.run(*words, cwd=SCRIPTS, libraries_only=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "check the path and the space on the disk" in done.stderr
    assert "cut.partial: the same command resumes" in done.stderr
    assert not list(tmp_path.glob("cut_*"))
    assert call(tmp_path, "cut") == 0
    assert result(tmp_path, "cut") == result(tmp_path, "whole")


def test_the_index_is_that_of_megatron_cores_builder(tmp_path, monkeypatch):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    monkeypatch.setattr(index_file, "INDEX_BLOCK", 100)
    for dtype in (np.uint16, np.int32):
        lengths = np.random.default_rng(0).integers(1, 9, 250).astype(np.int32)
        lengths.tofile(tmp_path / "lengths")
        builder = IndexedDatasetBuilder(str(tmp_path / "b.bin"), dtype)
        for length in lengths.tolist():
            builder.add_document(np.zeros(length), [length])
        builder.finalize(str(tmp_path / "b.idx"))
        index_file.write_index(tmp_path / "o.idx", tmp_path / "lengths", documents=250, dtype=dtype)
        assert (tmp_path / "o.idx").read_bytes() == (tmp_path / "b.idx").read_bytes()


LONG = ("0" * 59 + "7 ") * 2000 + "7"  # much text but few tokens, which take time
PEAKS = """
import parquet, resource, sys, preprocess, readers
readers.BATCH_BYTES, parquet.ROWS = 1 << 16, 4  # so that the smaller input has many batches, too
def peak(name):
    arguments = ["--input", name, "--output-prefix", name + "_out", "--workers", "1"]
    assert preprocess.main([*arguments, *sys.argv[1:]]) == 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print([peak(f"{size}.{kind}") for kind in ("jsonl.gz", "parquet") for size in ("small", "large")])
"""


def test_memory_does_not_grow_with_the_input(tmp_path):
    """The large input is 16 times the small one; the Parquet file is a single row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, times in (("small", 1), ("large", 16)):
        texts = ["7"] * 5000 * times + [f"{i} {LONG}" for i in range(40 * times)]
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", compresslevel=1) as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        path = tmp_path / f"{name}.parquet"
        pq.write_table(  # a page, decoded as a whole, has at least write_batch_size rows
            pa.table({"text": texts}), path, len(texts), use_dictionary=False, write_batch_size=8
        )
        assert pq.ParquetFile(path).num_row_groups == 1
    env = environment(PYTHONPATH=SCRIPTS)
    done = run([sys.executable, "-c", PEAKS, *NULL], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    gz_small, gz_large, parquet_small, parquet_large = json.loads(done.stdout.splitlines()[-1])
    # The text grows by 73 MB, or by 146 MB if it is held both as str and as bytes.
    assert gz_large - gz_small < 8_000, "KiB"
    assert parquet_large - parquet_small < 24_000, "KiB"
