"""Make a small corpus and a tokenizer from the documentation that ships with Python.

    python script/data/default_corpus.py

writes these files, unless they exist already:

    dataset/default/corpus.jsonl                    Python's documentation topics, one per document
    dataset/default/corpus_text_document.bin, .idx  the same as token ids
    model/default/tokenizer.model                   a SentencePiece model trained on them

With them, training can be tried without data and without a network. The topics are the pages that
`help("FOR")` prints (`pydoc_data.topics`): 79 pages, half a million characters, about 140,000
tokens. They differ slightly between releases of Python. The drivers call this script if no data was
given. It prints nothing to standard output, and returns at once if all files exist.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from megatron.console import ArgumentParser, run_main

REPO = Path(__file__).resolve().parents[2]

VOCABULARY = 2048
# The first three ids are the same as in Llama's tokenizer. Padding has its own id.
SPECIAL_IDS = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": 3}


def topics() -> dict[str, str]:
    """Return the text of Python's documentation topics by name, sorted by name."""
    try:
        from pydoc_data.topics import topics as pages
    except ImportError as error:
        raise ValueError(
            f"{sys.executable} lacks its documentation topics (pydoc_data.topics), which some "
            "distributions leave out; use another Python, or tokenize your own text with "
            "script/data/preprocess.py and name it in --data-path and --tokenizer-path"
        ) from error
    return {name: pages[name] for name in sorted(pages)}


def train_tokenizer(documents: list[str]) -> bytes:
    """Train a SentencePiece tokenizer that restores every text exactly; return its model file.

    Every call returns the same model. Text outside the vocabulary, such as a line break, is encoded
    as bytes. Neither spaces nor Unicode forms are normalized: half of the corpus is code, in which
    indentation matters.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in documents for line in text.split("\n") if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=False,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
        **SPECIAL_IDS,
    )
    return model.getvalue()


def write(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, then rename it, so that no reader sees half a file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def build(text: Path, tokens: list[Path], tokenizer: Path) -> None:
    """Train the tokenizer if it is missing, and write the corpus and its token ids.

    Old token ids are removed before a new tokenizer is written, because they depend on it.
    """
    pages = topics()
    if not tokenizer.exists():
        print(f"Training a tokenizer on Python's documentation: {tokenizer}", file=sys.stderr)
        for path in tokens:
            path.unlink(missing_ok=True)
        write(tokenizer, train_tokenizer(list(pages.values())))
    print(f"Tokenizing Python's documentation: {text}", file=sys.stderr)
    lines = [json.dumps({"topic": name, "text": page}) for name, page in pages.items()]
    write(text, ("\n".join(lines) + "\n").encode())

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(REPO))
    from documents import Settings
    from preprocess import preprocess

    preprocess(
        Settings(
            input=(text,),
            output_prefix=text.with_suffix(""),
            tokenizer_type="SentencePieceTokenizer",
            tokenizer_model=tokenizer,
            append_eod=True,
            overwrite=True,
        )
    )


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=REPO / "dataset" / "default")
    parser.add_argument("--model-dir", type=Path, default=REPO / "model" / "default")
    options = parser.parse_args(argv)
    text = options.output_dir / "corpus.jsonl"
    tokens = [options.output_dir / f"corpus_text_document.{suffix}" for suffix in ("idx", "bin")]
    tokenizer = options.model_dir / "tokenizer.model"
    wanted = [tokenizer, *tokens]
    if all(path.exists() for path in wanted):
        return 0
    try:
        for folder in (options.output_dir, options.model_dir):
            folder.mkdir(parents=True, exist_ok=True)
        with (options.model_dir / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, even in a crash
            if not all(path.exists() for path in wanted):
                build(text, tokens, tokenizer)
    except ValueError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"[ERROR] cannot make the default corpus: {error}; make the folder writable, "
            "or choose other folders with --output-dir and --model-dir",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    run_main(main)
