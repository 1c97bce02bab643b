"""Download and tokenize Wikipedia or Dolma, and write the token files that training reads.

    python script/data/prepare.py wikipedia --input dumps/ --tokenizer-model model/llama3.2-1b
    python script/data/prepare.py dolma --limit-files 4

prepare_wikipedia.sh and prepare_dolma.sh call this script. preprocess.py does the work: an
interrupted call is resumed by the same command, and the same input results in the same files.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from command_line import ArgumentParser, add_running, add_tokenizer
from documents import Settings
from download import HUB, download
from megatron.console import run_main
from preprocess import REPO, attempt


def command_line() -> argparse.ArgumentParser:
    """Return the parser for the command-line options of prepare.py."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("corpus", choices=tuple(HUB))
    add("--input", type=Path, nargs="+", help="files and folders, instead of a download")
    add("--output-prefix", type=Path, help="default: dataset/NAME_processed/NAME_processed")
    add_tokenizer(parser)
    add("--hub-dataset", metavar="NAME", help="data set on the Hugging Face hub")
    add("--hub-part", metavar="NAME", help="its configuration (Wikipedia) or version (Dolma)")
    add("--limit-files", type=int, metavar="N", help="download the first N files only")
    add("--download-dir", type=Path, metavar="DIR", help="default: dataset/downloads/NAME")
    add_running(parser)
    return parser


def complete(options: argparse.Namespace, home: Path) -> Settings:
    """Return the settings of a preprocessing run; download its input unless --input names files.

    Raises:
        ValueError: if the download fails, or there is no tokenizer.
    """
    corpus = options.corpus
    model, kind = _tokenizer(options, home), options.tokenizer_type
    inputs = options.input
    if inputs is None:
        name, part = HUB[corpus]
        folder = options.download_dir or home / "dataset" / "downloads" / corpus
        if options.limit_files is not None and options.limit_files < 1:
            raise ValueError(f"--limit-files {options.limit_files} is below 1")
        inputs = download(
            corpus,
            folder,
            name=options.hub_dataset or name,
            part=options.hub_part or part,
            limit=options.limit_files,
        )
    return Settings(
        input=tuple(inputs),
        output_prefix=options.output_prefix
        or home / "dataset" / f"{corpus}_processed" / f"{corpus}_processed",
        wikipedia=corpus == "wikipedia",
        tokenizer_type=kind,
        tokenizer_model=model,
        vocab_size=options.vocab_size,
        append_eod=True,
        workers=options.workers,
        strict=options.strict,
        overwrite=options.overwrite,
    )


def _tokenizer(options: argparse.Namespace, home: Path) -> Path | None:
    """Return the path of the tokenizer; before a download, also check that it can be loaded.

    The download can take hours, so a wrong tokenizer is reported before it.

    Raises:
        ValueError: if there is no tokenizer, or it cannot be loaded.
    """
    model, kind = options.tokenizer_model, options.tokenizer_type
    if kind == "NullTokenizer":
        return model
    advice = "put the one of Llama 3.2 there, or give" if model is None else "give"
    model = model or home / "model" / "llama3.2-1b"
    if not model.exists():
        raise ValueError(
            f"no tokenizer at {model}; {advice} a Hugging Face folder, a SentencePiece .model file "
            "or a .tiktoken file in --tokenizer-model"
        )
    if options.input is None:
        sys.path.insert(0, str(REPO))
        from megatron.training.data.tokenizer import build_tokenizer

        build_tokenizer(kind, model, options.vocab_size)
    return model


def main(argv: list[str] | None = None) -> int:
    options = command_line().parse_args(argv)
    home = Path() if Path.cwd() == REPO else REPO
    try:
        settings = complete(options, home)
    except ValueError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[ERROR] interrupted; complete files are kept", file=sys.stderr)
        return 130
    return attempt(settings)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_main(main)
