"""Compare the speeds at which script/data/preprocess.py and `datasets.map` tokenize a corpus.

    python benchmarks/preprocessing.py                        # 20 MB of Python's own source files
    python benchmarks/preprocessing.py --text enwiki.txt --tokenizer-model model/llama3.2-1b
    python benchmarks/preprocessing.py --rounds 3 --megabytes 5 --output-dir /tmp/try

Both programs read the same documents, use the same fast Hugging Face tokenizer in several processes
(two by default), and write the token ids to disk. `map` reads an Arrow file, which `load_dataset`
first creates from the JSONL file; our program reads the JSONL file directly. There are therefore
two ratios, with and without `load_dataset`. `map` computes only the ids (no masks), in batches of
its default size. Our time includes loading the tokenizer and flushing the finished .bin, .idx and
.json files. Imports are not counted.

The two programs take turns. A time is the median over the rounds; a ratio is the median of the
rounds' ratios, with quartiles. CPU seconds are summed over all processes and are more reliable on a
shared machine. All token ids are compared; the exit status is 1 if one differs. Prints a Markdown
table and writes it as preprocessing.md, with the command and the versions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import resource
import statistics
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import results_page

# The tokenizer uses one thread, because both programs run it in several processes.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from megatron.console import ArgumentParser  # noqa: E402

DOCUMENT = 3000  #: number of characters after which a document ends at the next empty line
VOCABULARY = 32_000


@dataclasses.dataclass
class Turn:
    """Wall-clock time and CPU time, in seconds, of one program in one round."""

    seconds: float
    cpu: float


Round = dict[str, Turn]  #: times of each program in one round, by the program's name
OURS, LOAD, MAP = NAMES = ("script/data/preprocess.py", "datasets.load_dataset", "datasets.map")


def standard_library() -> Iterator[str]:
    """Yield the text of Python's own source files, in the order of their paths.

    Every machine has these files.
    """
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="replace")


def documents(texts: Iterator[str], megabytes: float) -> Iterator[str]:
    """Yield documents, about `megabytes` MB in total; texts are split at empty lines.

    A document has at least DOCUMENT characters, unless its text ends earlier.
    """
    left = int(megabytes * 1e6)
    for text in texts:
        part = ""
        for paragraph in text.split("\n\n"):
            part += paragraph + "\n\n"
            if len(part) >= DOCUMENT:
                yield part
                left -= len(part.encode())
                part = ""
            if left <= 0:
                return
        if part.strip():
            yield part
            left -= len(part.encode())


def train_tokenizer(texts: list[str], folder: Path) -> None:
    """Train a byte-level BPE tokenizer like GPT-2's on `texts`, and save it in `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>").save_pretrained(folder)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all its workers that have already ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def timed(work: Callable[[], Any]) -> tuple[Turn, Any]:
    started, cpu = time.perf_counter(), cpu_seconds()
    done = work()
    return Turn(time.perf_counter() - started, cpu_seconds() - cpu), done


class Ours:
    """Our side of the comparison: script/data/preprocess.py, run in this process."""

    def __init__(self, corpus: Path, tokenizer: Path, workers: int) -> None:
        from documents import Settings

        self.settings = Settings(
            input=(corpus,),
            output_prefix=corpus.parent / "ours",
            tokenizer_model=tokenizer,
            workers=workers,
            overwrite=True,
        )

    def run(self) -> None:
        from preprocess import preprocess

        preprocess(self.settings)

    def ids(self) -> Iterator[list[int]]:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        dataset = IndexedDataset(self.settings.prefix("text"))
        yield from (dataset[i].tolist() for i in range(len(dataset)))


class Theirs:
    """The other side of the comparison: `datasets.map` on the Arrow file from `load_dataset`."""

    def __init__(self, corpus: Path, tokenizer: Path, workers: int) -> None:
        import datasets
        from transformers import AutoTokenizer

        datasets.disable_progress_bars()
        self.workers, self.corpus, self.folder, self.turn = workers, corpus, corpus.parent, 0
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)

    def load(self) -> None:
        from datasets import load_dataset

        self.turn += 1
        cache = str(self.folder / f"hf{self.turn}")  # a new, empty cache folder
        loaded = load_dataset("json", data_files=str(self.corpus), cache_dir=cache)
        self.dataset = loaded["train"]

    def run(self) -> None:
        tokenizer = self.tokenizer
        self.tokens = self.dataset.map(
            lambda batch: tokenizer(
                batch["text"],
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
            ),
            batched=True,
            num_proc=self.workers,
            remove_columns=["text"],
            load_from_cache_file=False,
            cache_file_name=str(self.folder / f"theirs{self.turn}.arrow"),
        )

    def ids(self) -> Iterator[list[int]]:
        yield from (row["input_ids"] for row in self.tokens)


def table(rounds: list[Round], count: int, text_bytes: int, tokens: int) -> str:
    """Return a Markdown table of each program's times and rates, followed by speed ratios."""
    head = ("", "seconds", "CPU seconds", "documents/s", "MB of text/s", "million tokens/s")
    rows = []
    for name in NAMES:
        seconds, cpu = (
            statistics.median(getattr(turns[name], field) for turns in rounds)
            for field in ("seconds", "cpu")
        )
        figures = (text_bytes / seconds / 1e6, tokens / seconds / 1e6)
        cells = [name, f"{seconds:.2f}", f"{cpu:.2f}", f"{count / seconds:,.0f}"]
        rows.append([*cells, *(f"{figure:.3g}" for figure in figures)])
    return "\n".join(
        [
            results_page.table(head, rows),
            "",
            "Our documents per second divided by those of `datasets`, from the JSONL file to token "
            f"ids on the disk: {ratio(rounds, 'seconds', LOAD, MAP)}; divided by those of `map` "
            f"alone, which starts from Arrow: {ratio(rounds, 'seconds', MAP)}. The same two ratios "
            f"for documents per CPU second: {ratio(rounds, 'cpu', LOAD, MAP)} and "
            f"{ratio(rounds, 'cpu', MAP)}.",
        ]
    )


def ratio(rounds: list[Round], field: str, *theirs: str) -> str:
    """Format the total time of `theirs` divided by our time: median and quartiles over rounds."""
    ratios = [
        sum(getattr(turns[name], field) for name in theirs) / getattr(turns[OURS], field)
        for turns in rounds
    ]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, help="text to split into documents (Python's own source files)")
    add("--megabytes", type=float, default=20, help="megabytes of text (20)")
    add("--tokenizer-model", type=Path, help="Hugging Face folder (one is trained on the text)")
    add("--workers", type=int, default=2, help="processes (2)")
    add("--rounds", type=int, default=7, help="rounds (7)")
    add(
        "--output-dir",
        type=Path,
        default=REPO / "docs" / "results",
        help="folder for the report (docs/results)",
    )
    options = parser.parse_args(arguments)
    if options.rounds < 3:
        parser.error(f"--rounds is {options.rounds}, but quartiles need at least 3 rounds")
    return options


def measure(options: argparse.Namespace, folder: Path) -> tuple[str, bool]:
    """Run all rounds; return the report, and whether all programs wrote the same token ids."""
    texts = iter([options.text.read_text()]) if options.text else standard_library()
    parts = list(documents(texts, options.megabytes))
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    tokenizer = options.tokenizer_model
    if tokenizer is None:
        tokenizer = folder / "tokenizer"
        print("Training a tokenizer ...", file=sys.stderr)
        train_tokenizer(parts, tokenizer)
    ours = Ours(corpus, tokenizer, options.workers)
    theirs = Theirs(corpus, tokenizer, options.workers)
    rounds: list[Round] = []
    for number in range(options.rounds + 1):
        work = (ours.run, theirs.load, theirs.run)
        turns = {name: timed(call)[0] for name, call in zip(NAMES, work, strict=True)}
        print(f"round {number}: {turns}", file=sys.stderr)
        if number:  # The first round only warms up the caches.
            rounds.append(turns)
    same, tokens, count = True, 0, 0
    for our_ids, their_ids in zip(ours.ids(), theirs.ids(), strict=True):
        same &= our_ids == their_ids
        tokens, count = tokens + len(our_ids), count + 1
    text_bytes = sum(len(part.encode()) for part in parts)
    verdict = "are the same" if same else "DIFFER"
    names = ("datasets", "tokenizers", "transformers", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    head = (
        f"{count:,} documents, {text_bytes / 1e6:.1f} MB of text, {tokens:,} tokens; "
        f"{options.workers} processes, {len(rounds)} rounds after one that is not counted; "
        f"{platform.machine()}, Python {platform.python_version()}, {versions}."
    )
    tail = f"The token ids of all documents {verdict}."
    return "\n\n".join([head, table(rounds, count, text_bytes, tokens), tail]), same


def main() -> int:
    options = parse()
    sys.path.insert(0, str(REPO / "script" / "data"))
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not")
    with tempfile.TemporaryDirectory() as folder:
        report, same = measure(options, Path(folder))
    command = results_page.quoted("preprocessing.py")
    text = f"# Preprocessing\n\n`{command}`\n\n{report}\n"
    results_page.publish(text, options.output_dir / "preprocessing.md")
    if not same:
        print("[ERROR] the token ids differ; see the report", file=sys.stderr)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
