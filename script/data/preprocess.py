"""Tokenize text, and write the `.bin` and `.idx` files that training reads with --data-path.

    python script/data/preprocess.py --input wiki.txt --output-prefix dataset/wiki \\
        --tokenizer-model model/llama3.2-1b --append-eod
    python script/data/preprocess.py --input wikipedia/ --output-prefix dataset/wiki ...
    python script/data/preprocess.py --check dataset/wiki_text_document

The first command writes dataset/wiki_text_document.bin, .idx and .json; the last file records the
tokenizer. The flags are those of Megatron-LM's tools/preprocess_data.py. Input consists of files,
or folders of files:

    JSONL, Parquet   one document per line or row; each of --json-keys has its own output files
    text             documents are separated by blank lines
    wikitext         articles begin with ` = Title = `

Files other than Parquet may be compressed with gzip, bzip2 or zstandard.

Documents are read in batches, which a pool of processes tokenizes. The parent process writes them
in the order of the input, so the files are the same for any number of workers. Memory holds only a
few batches. The files get their names when they are complete. A run that was interrupted or failed
keeps its progress in PREFIX.partial, and the same command continues from there.

Lines that are not documents are skipped, counted and listed in PREFIX_bad_lines.txt; with --strict
the first one ends the run.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING

from batch import Batch, Position
from command_line import parse
from documents import Encoder, Settings, Tokens
from inputs import expand
from megatron.console import run_main
from partial_output import DamagedStateError, PartialOutput
from readers import read_file

if TYPE_CHECKING:
    from megatron.training.data.manifest import Manifest

REPO = Path(__file__).resolve().parents[2]


def tokenize(settings: Settings, batches: Iterable[Batch]) -> Iterator[Tokens]:
    """Tokenize `batches` and yield the results in order; hold at most two batches per worker."""
    if settings.workers == 1:
        yield from map(Encoder.run, batches)
        return
    # A forked worker inherits the tokenizer and the imports; a spawned worker creates its own.
    method = "fork" if sys.platform == "linux" else "spawn"
    pool = ProcessPoolExecutor(
        settings.workers, multiprocessing.get_context(method), Encoder.start_worker, (settings,)
    )
    waiting: deque[Future[Tokens]] = deque()
    try:
        pool.submit(os.getpid).result()  # fork all workers before a reader starts threads
        for batch in batches:
            waiting.append(pool.submit(Encoder.run, batch))
            if len(waiting) >= 2 * settings.workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def read_batches(settings: Settings, output: PartialOutput) -> Iterator[Batch]:
    """Yield those batches of the input that are not yet in `output`."""
    first, start = output.point.file, output.point.position
    for number in range(first, len(settings.input)):
        path = settings.input[number]
        if not path.exists():
            raise ValueError(f"{path} has disappeared; put it back")
        output.begin_file(number)
        yield from read_file(path, settings, number=number, start=start)
        start = Position()


def check(settings: Settings) -> None:
    """Raise ValueError for invalid settings, before the slow import of megatron-core."""
    if settings.workers < 1:
        raise ValueError(f"--workers {settings.workers} is below 1; give the number of processes")
    for path in settings.input if len(settings.json_keys) > 1 else ():
        if (kind := settings.format_of(path)) in ("text", "wikitext"):
            raise ValueError(
                f"{path} is {kind}, which has no keys, but --json-keys names "
                f"{len(settings.json_keys)}; name one, or give --input-format"
            )
    if not Path(f"{settings.output_prefix}.partial", "progress.json").exists():
        settings.check_free()


def preprocess(settings: Settings) -> dict[str, Manifest]:
    """Start or resume a run; return the manifest of each pair of output files, by path prefix."""
    from tqdm import tqdm

    settings = dataclasses.replace(settings, input=expand(settings))
    check(settings)
    Encoder.shared = encoder = Encoder(settings)
    from megatron.training.data.manifest import TokenizerRecord

    record = TokenizerRecord.of(encoder.tokenizer)
    settings.output_prefix.parent.mkdir(parents=True, exist_ok=True)
    tqdm.monitor_interval = 0  # no monitor thread, which would make forking unsafe
    with PartialOutput(settings, dataclasses.asdict(record), encoder.dtype) as output:
        if not output.complete:
            _write(settings, output)
        manifests = {key: _manifest(settings, output, key, record) for key in settings.json_keys}
        output.publish({key: manifest.to_json() for key, manifest in manifests.items()})
        for key, count in output.point.counts.items():
            if count.empty:
                texts = "empty text" if count.empty == 1 else "empty texts"
                print(f"left out {count.empty:,} {texts} under the key {key!r}")
    return {settings.prefix(key): manifest for key, manifest in manifests.items()}


def _write(settings: Settings, output: PartialOutput) -> None:
    from tqdm import tqdm

    point = output.point
    if output.resumed:
        done = max(count.documents for count in point.counts.values())
        print(f"Resuming after {done:,} documents of an interrupted run.", file=sys.stderr)
    sizes = [path.stat().st_size for path in settings.input]
    with tqdm(
        total=sum(sizes), initial=sum(sizes[: point.file]), unit="B", unit_scale=True, disable=None
    ) as bar:
        for tokens in tokenize(settings, read_batches(settings, output)):
            output.add(tokens)
            bar.update(tokens.bytes_read)
            documents = max(count.documents for count in output.point.counts.values())
            bar.set_postfix_str(f"{documents:,} documents", refresh=False)
    for key, count in output.point.counts.items():
        if not count.documents:
            raise ValueError(
                f"no text under the key {key!r} in the {len(settings.input)} input files "
                f"(the first is {settings.input[0]}); give files that have text"
            )


def _manifest(settings: Settings, output: PartialOutput, key: str, record: object) -> Manifest:
    from megatron.training.data.manifest import Manifest

    count = output.point.counts[key]
    return Manifest(
        tokenizer=record,
        dtype=output.dtype.name,
        documents=count.documents,
        tokens=count.tokens,
        text_bytes=count.text_bytes,
        bad_lines=output.point.bad_lines,
        json_key=key,
        append_eod=settings.append_eod,
        sources=tuple((name, size) for name, size, _ in output.inputs),
    )


def report(settings: Settings, manifests: dict[str, Manifest], seconds: float) -> None:
    """Print a summary of the output, and a command that trains on the output."""
    for prefix, manifest in manifests.items():
        print(
            f"{prefix}.bin, .idx: {manifest.documents:,} documents, {manifest.tokens:,} tokens "
            f"({manifest.dtype}), {manifest.text_bytes:,} bytes of text"
        )
        if manifest.bad_lines:
            bad_lines = f"{settings.output_prefix}_bad_lines.txt"
            print(f"skipped {manifest.bad_lines:,} bad lines; they are listed in {bad_lines}")
    print(f"{seconds:.1f} s.")
    if settings.tokenizer_model is not None:
        driver = REPO / "run_tensor_collection.sh"
        command = ["bash", driver.name if Path.cwd() == REPO else str(driver), "single", "mxfp8"]
        command += ["--data-path", next(iter(manifests))]
        command += ["--tokenizer-path", str(settings.tokenizer_model)]
        print(f"Next: train on it and collect tensors with\n  {shlex.join(command)}")


def attempt(settings: Settings) -> int:
    """Run the preprocessing, print its result or its error, and return the exit status."""
    # Each process uses one thread; numpy and the tokenizers read these variables when they start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.path.insert(0, str(REPO))
    started = time.perf_counter()
    status = 1
    try:
        manifests = preprocess(settings)
    except DamagedStateError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return status  # This run cannot be resumed, so skip the advice below.
    except ValueError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
    except OSError as error:
        print(f"[ERROR] {error}; check the path and the space on the disk", file=sys.stderr)
    except BrokenProcessPool:
        print(
            "[ERROR] a worker was killed, probably for lack of memory; give fewer --workers",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        print("[ERROR] interrupted", file=sys.stderr)
        status = 130
    else:
        report(settings, manifests, time.perf_counter() - started)
        return 0
    partial = Path(f"{settings.output_prefix}.partial")
    if (partial / "progress.json").exists():
        print(f"Progress is kept in {partial}: the same command resumes.", file=sys.stderr)
    return status


def main(argv: list[str] | None = None) -> int:
    settings = parse(argv, __doc__)
    if isinstance(settings, Settings):
        return attempt(settings)
    sys.path.insert(0, str(REPO))
    from check_dataset import check_and_report

    return check_and_report(settings)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_main(main)
