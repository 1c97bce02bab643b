"""Tokenize text into the `.bin`/`.idx` pair that training reads with --data-path.

    python script/data/preprocess.py --input wiki.txt --output-prefix dataset/wiki \
        --tokenizer-model model/llama3.2-1b --append-eod

writes dataset/wiki_text_document.bin and .idx, through megatron-core's own builder. The flags are
those of Megatron-LM's tools/preprocess_data.py. A text file is cut into documents at blank lines;
of a JSONL file every line is a document, and each of --json-keys gets a pair of files.

Documents are read in batches that a pool of processes tokenizes and the parent writes in the order
of the input, so the files are the same for any number of workers, and memory holds a few batches
only. The files appear under their names when they are complete, the index last.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from documents import FORMATS, Batch, Encoder, Settings, Tokens, read_batches

REPO = Path(__file__).resolve().parents[2]


@dataclass
class Count:
    """What went into one pair of files."""

    prefix: str
    dtype: str = ""
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0


def tokenize(settings: Settings, batches: Iterable[Batch]) -> Iterator[Tokens]:
    """The tokens of `batches` in their order, with at most two batches a worker in memory."""
    if settings.workers == 1:
        yield from map(Encoder.run, batches)
        return
    # A forked worker has the tokenizer and the imports already; elsewhere it makes its own.
    method = "fork" if sys.platform == "linux" else "spawn"
    pool = ProcessPoolExecutor(
        settings.workers, multiprocessing.get_context(method), Encoder.start_worker, (settings,)
    )
    waiting: deque[Future[Tokens]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(Encoder.run, batch))
            if len(waiting) >= 2 * settings.workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class Output:
    """One `.bin`/`.idx` pair, written under other names until `publish`."""

    def __init__(self, prefix: str, dtype: type) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.count = Count(prefix, dtype.__name__)
        self.final = [Path(f"{prefix}.bin"), Path(f"{prefix}.idx")]
        self.partial = [path.with_name(f"{path.name}.{os.getpid()}.partial") for path in self.final]
        self.builder = IndexedDatasetBuilder(str(self.partial[0]), dtype)

    def add(self, ids: Any, lengths: list[int], text_bytes: int) -> None:
        start = 0
        for length in lengths:
            self.builder.add_document(ids[start : start + length], [length])
            start += length
        self.count.documents += len(lengths)
        self.count.tokens += start
        self.count.text_bytes += text_bytes

    def publish(self) -> None:
        self.builder.finalize(str(self.partial[1]))
        self.final[1].unlink(missing_ok=True)  # never an old index beside new tokens
        for partial, final in zip(self.partial, self.final, strict=True):
            partial.replace(final)

    def discard(self) -> None:
        self.builder.data_file.close()
        for partial in self.partial:
            partial.unlink(missing_ok=True)


def check(settings: Settings) -> None:
    """Refuse what cannot work before megatron-core is imported, which takes seconds."""
    for path in settings.input:
        if not path.is_file():
            raise ValueError(f"the input {path} is not a file; name text or JSONL files in --input")
    if settings.workers < 1:
        raise ValueError(f"--workers {settings.workers} is below 1; give the number of processes")
    if len(settings.json_keys) > 1 and any(settings.format_of(p) == "text" for p in settings.input):
        raise ValueError(
            f"text has no keys, but --json-keys names {len(settings.json_keys)}; "
            "name one, or give --input-format jsonl if the files are JSONL"
        )
    if not settings.overwrite:
        for key in settings.json_keys:
            for suffix in (".idx", ".bin"):
                if Path(settings.prefix(key) + suffix).exists():
                    raise ValueError(
                        f"{settings.prefix(key)}{suffix} exists; give --overwrite to replace it, "
                        "or another --output-prefix"
                    )


def preprocess(settings: Settings) -> tuple[list[Count], int]:
    """Do it all; what was written, and how many bad lines were skipped."""
    from tqdm import tqdm

    check(settings)
    total = sum(path.stat().st_size for path in settings.input)
    settings.output_prefix.parent.mkdir(parents=True, exist_ok=True)
    Encoder.shared = Encoder(settings)
    dtype = Encoder.shared.dtype
    bad_lines = 0
    tqdm.monitor_interval = 0  # its thread would be copied into the workers
    outputs: dict[str, Output] = {}
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", disable=None)
    try:
        for key in settings.json_keys:
            outputs[key] = Output(settings.prefix(key), dtype)
        for tokens in tokenize(settings, read_batches(settings)):
            for key, output in outputs.items():
                output.add(tokens.ids[key], tokens.lengths[key], tokens.text_bytes[key])
            bad_lines += tokens.bad_lines
            bar.update(tokens.bytes_read)
        for key, output in outputs.items():
            if not output.count.documents:
                raise ValueError(
                    f"no text under the key {key!r} in {', '.join(map(str, settings.input))} "
                    f"({total} bytes, {bad_lines} bad lines); give files that have text"
                )
        for output in outputs.values():
            output.publish()
    finally:
        bar.close()
        for output in outputs.values():
            output.discard()
    return [output.count for output in outputs.values()], bad_lines


def parse(argv: list[str] | None) -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", type=Path, nargs="+", required=True, help="text or JSONL files")
    add("--output-prefix", type=Path, required=True, help="writes PREFIX_<key>_document.bin, .idx")
    add("--json-keys", nargs="+", default=["text"], help="keys of the text in JSONL (text)")
    add("--input-format", choices=FORMATS, help="default: jsonl for .jsonl, .json, .ndjson")
    add("--document-separator", default="", metavar="LINE", help="of text (default: a blank line)")
    add("--tokenizer-type", help="default: by what is at --tokenizer-model")
    add("--tokenizer-model", type=Path, help="a .model file or a Hugging Face folder")
    add("--vocab-size", type=int, help="of the NullTokenizer, whose text is numbers")
    add("--append-eod", action="store_true", help="end each document with the eod token")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--workers", type=int, default=cores or 1, help=f"processes (here {cores})")
    add("--skip-bad-lines", action="store_true", help="count bad JSONL lines instead of stopping")
    add("--overwrite", action="store_true", help="replace existing output")
    options = vars(parser.parse_args(argv))
    for name in ("input", "json_keys"):
        options[name] = tuple(options[name])
    return Settings(**options)


def main(argv: list[str] | None = None) -> int:
    settings = parse(argv)
    # One thread a process, set before numpy and the tokenizers start theirs.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.path.insert(0, str(REPO))
    started = time.perf_counter()
    try:
        counts, bad_lines = preprocess(settings)
    except ValueError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"[ERROR] {error}; check the path and the space on the disk", file=sys.stderr)
        return 1
    except BrokenProcessPool:
        print(
            "[ERROR] a worker was killed, probably for lack of memory; give fewer --workers",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("[ERROR] interrupted; nothing was written", file=sys.stderr)
        return 130
    seconds = time.perf_counter() - started
    for count in counts:
        print(
            f"{count.prefix}.bin, .idx: {count.documents:,} documents, {count.tokens:,} tokens "
            f"({count.dtype}), {count.text_bytes:,} bytes of text"
        )
    if bad_lines:
        print(f"skipped {bad_lines:,} bad lines")
    print(f"{seconds:.1f} s. Next: train on it and collect tensors with")
    print(
        f"  bash run_tensor_collection.sh single mxfp8 --data-path {counts[0].prefix} "
        f"--tokenizer-path {settings.tokenizer_model}"
    )
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
