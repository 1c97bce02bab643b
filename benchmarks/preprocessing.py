"""Tokenize a corpus with script/data/preprocess.py and with `datasets.map`, side by side.

    python benchmarks/preprocessing.py                        # 20 MB of Python's own source files
    python benchmarks/preprocessing.py --text enwiki.txt --tokenizer-model model/llama3.2-1b
    python benchmarks/preprocessing.py --rounds 3 --megabytes 5 --output-dir /tmp/try

Both read the same documents, use the same fast Hugging Face tokenizer in two processes, and write
the token ids to the disk. `map` reads Arrow, which `load_dataset` makes of the JSONL file first;
ours reads that file itself. So there are two ratios, with `load_dataset` and to `map` alone. `map`
is asked for the ids alone (no masks) in batches of its default size. Ours is counted from the name
of the tokenizer to the finished .bin, .idx and .json, flushed to the disk. Imports do not count.

The two take turns. A figure is the median of the rounds, a ratio the median of the rounds' ratios
with its quartiles. CPU seconds, of all processes, say more where others use the machine too. All
token ids are compared: exits 1 if one differs. Prints a Markdown table and writes it with the
command and the versions as preprocessing.md.
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

import quoting

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPO = Path(__file__).resolve().parents[1]
DOCUMENT = 3000  #: characters, at least; then the next empty line ends it
VOCABULARY = 32_000


@dataclasses.dataclass
class Turn:
    """What one run took."""

    seconds: float
    cpu: float


Round = dict[str, Turn]  #: a turn of each
OURS, LOAD, MAP = NAMES = ("script/data/preprocess.py", "datasets.load_dataset", "datasets.map")


def standard_library() -> Iterator[str]:
    """Python's own source files, which every machine has, in the order of their names."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="replace")


def documents(texts: Iterator[str], megabytes: float) -> Iterator[str]:
    """Parts of some DOCUMENT characters that end with an empty line, up to `megabytes` of UTF-8."""
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
    """A byte-level BPE as GPT-2's, of this very text."""
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
    """Of this process, and of its workers that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def timed(work: Callable[[], Any]) -> tuple[Turn, Any]:
    started, cpu = time.perf_counter(), cpu_seconds()
    done = work()
    return Turn(time.perf_counter() - started, cpu_seconds() - cpu), done


class Ours:
    """script/data/preprocess.py, in this process."""

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
    """`datasets.map` over the Arrow file that `load_dataset` makes."""

    def __init__(self, corpus: Path, tokenizer: Path, workers: int) -> None:
        import datasets
        from transformers import AutoTokenizer

        datasets.disable_progress_bars()
        self.workers, self.corpus, self.folder, self.turn = workers, corpus, corpus.parent, 0
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)

    def load(self) -> None:
        from datasets import load_dataset

        self.turn += 1
        cache = str(self.folder / f"hf{self.turn}")  # a new one: nothing is there yet
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
    """One row each, in what a second brings."""
    head = ("", "seconds", "CPU seconds", "documents/s", "MB of text/s", "million tokens/s")
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for name in NAMES:
        seconds, cpu = (
            statistics.median(getattr(turns[name], field) for turns in rounds)
            for field in ("seconds", "cpu")
        )
        figures = (text_bytes / seconds / 1e6, tokens / seconds / 1e6)
        cells = [name, f"{seconds:.2f}", f"{cpu:.2f}", f"{count / seconds:,.0f}"]
        lines.append(f"| {' | '.join([*cells, *(f'{figure:.3g}' for figure in figures)])} |")
    return "\n".join(
        [
            *lines,
            "",
            "Documents per second, ours over theirs, from the JSONL file to token ids on the "
            f"disk: {ratio(rounds, 'seconds', LOAD, MAP)}; over `map` alone, which finds "
            f"Arrow: {ratio(rounds, 'seconds', MAP)}. Documents per CPU second: "
            f"{ratio(rounds, 'cpu', LOAD, MAP)}; {ratio(rounds, 'cpu', MAP)}.",
        ]
    )


def ratio(rounds: list[Round], field: str, *theirs: str) -> str:
    """Theirs over ours, round by round: median and quartiles."""
    ratios = [
        sum(getattr(turns[name], field) for name in theirs) / getattr(turns[OURS], field)
        for turns in rounds
    ]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, help="text to cut into documents (Python's own source files)")
    add("--megabytes", type=float, default=20, help="of text (20)")
    add("--tokenizer-model", type=Path, help="Hugging Face folder (one is trained on the text)")
    add("--workers", type=int, default=2, help="processes (2)")
    add("--rounds", type=int, default=7, help="turns of each (7)")
    add("--output-dir", type=Path, default=REPO / "docs" / "results", help="(docs/results)")
    options = parser.parse_args(arguments)
    if options.rounds < 3:
        parser.error(f"--rounds is {options.rounds}; give 3 or more, or there are no quartiles")
    return options


def measure(options: argparse.Namespace, folder: Path) -> tuple[str, bool]:
    """The report, and whether all token ids are the same."""
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
        turns = {name: timed(one)[0] for name, one in zip(NAMES, work, strict=True)}
        print(f"round {number}: {turns}", file=sys.stderr)
        if number:  # the first warms caches up
            rounds.append(turns)
    same, tokens, count = True, 0, 0
    for mine, other in zip(ours.ids(), theirs.ids(), strict=True):
        same &= mine == other
        tokens, count = tokens + len(mine), count + 1
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
    sys.path[:0] = [str(REPO), str(REPO / "script" / "data")]
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not")
    with tempfile.TemporaryDirectory() as folder:
        report, same = measure(options, Path(folder))
    command = quoting.quoted("preprocessing.py")
    text = f"# Preprocessing\n\n`{command}`\n\n{report}\n"
    print(text)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    (options.output_dir / "preprocessing.md").write_text(text)
    if not same:
        print("[ERROR] the token ids differ; see the report", file=sys.stderr)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
