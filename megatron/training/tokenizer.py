"""Tokenizers by Megatron-LM's names, from the files on disk.

The classes are the wheel's (`megatron.core.tokenizers`). What is added here: the type can be read
off the path, a path that is wrong is explained before a library trips over it, and a missing
folder is never taken for the name of a model on the Hugging Face hub, so nothing is downloaded.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.training.errors import UserError

if TYPE_CHECKING:
    from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

TOKENIZER_TYPES = ("SentencePieceTokenizer", "HuggingFaceTokenizer", "NullTokenizer")

#: What AutoTokenizer needs to find in a folder.
HUGGING_FACE_FILES = ("tokenizer.json", "tokenizer_config.json")


def guess_tokenizer_type(path: str | Path) -> str:
    """The type of the tokenizer at `path`: a `.model` file or a folder as models are shipped."""
    path = Path(path)
    if not path.exists():
        raise UserError(
            f"the tokenizer {path} does not exist; give a SentencePiece .model file, "
            "or a folder with a Hugging Face tokenizer (tokenizer.json) or a tokenizer.model"
        )
    if path.is_file():
        return "HuggingFaceTokenizer" if path.suffix == ".json" else "SentencePieceTokenizer"
    # A Llama 2 folder has both, and its tokenizer.json says the same as its tokenizer.model; in a
    # Llama 3 folder tokenizer.model is not a SentencePiece model. So Hugging Face's goes first.
    if any((path / name).is_file() for name in HUGGING_FACE_FILES):
        return "HuggingFaceTokenizer"
    if (path / "tokenizer.model").is_file():
        return "SentencePieceTokenizer"
    raise UserError(
        f"the folder {path} holds no tokenizer; it needs one of "
        f"{', '.join(HUGGING_FACE_FILES)} (Hugging Face) or tokenizer.model (SentencePiece)"
    )


def build_tokenizer(
    tokenizer_type: str | None,
    model_path: str | Path | None = None,
    vocab_size: int | None = None,
) -> MegatronTokenizerText:
    """The tokenizer of `tokenizer_type` (None: whatever is at `model_path`).

    It has tokenize(text) -> list[int], detokenize(ids) -> str, vocab_size, eod (None if the
    tokenizer has no such token) and what megatron-core's datasets ask for. `vocab_size` is for the
    NullTokenizer, whose text is numbers: the ids 0 to vocab_size - 1, with eod = vocab_size.
    """
    if tokenizer_type is None and model_path is not None:
        tokenizer_type = guess_tokenizer_type(model_path)
    if tokenizer_type not in TOKENIZER_TYPES:
        raise UserError(
            f"unknown tokenizer type {tokenizer_type!r}; choose one of {', '.join(TOKENIZER_TYPES)}"
        )
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None or vocab_size < 1:
            raise UserError(
                f"the NullTokenizer needs a vocabulary size of at least 1, but got {vocab_size}; "
                "give --vocab-size"
            )
        return _from_wheel("null", None, vocab_size=vocab_size)
    if model_path is None:
        raise UserError(f"the {tokenizer_type} needs a file or folder; give --tokenizer-model")
    if tokenizer_type == "SentencePieceTokenizer":
        return _sentencepiece(Path(model_path))
    return _hugging_face(Path(model_path))


def _sentencepiece(path: Path) -> MegatronTokenizerText:
    file = path / "tokenizer.model" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file} does not exist; a SentencePieceTokenizer needs a .model file")
    try:
        return _from_wheel("sentencepiece", file)
    except (RuntimeError, OSError) as error:  # sentencepiece raises either, by release
        raise UserError(
            f"{file} is not a SentencePiece model; if it belongs to Llama 3, give the folder with "
            "its tokenizer.json and the type HuggingFaceTokenizer"
        ) from error


def _hugging_face(path: Path) -> MegatronTokenizerText:
    folder = path.parent if path.is_file() else path
    if not any((folder / name).is_file() for name in HUGGING_FACE_FILES):
        raise UserError(
            f"{folder} holds no Hugging Face tokenizer; it needs "
            f"{' or '.join(HUGGING_FACE_FILES)}, as save_pretrained writes them"
        )
    try:
        return _from_wheel("huggingface", folder, use_fast=True)
    except (ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError(
            f"cannot read the tokenizer in {folder} ({reason}); save it again with save_pretrained"
        ) from error


def _from_wheel(library: str, path: Path | None, **options: object) -> MegatronTokenizerText:
    """Ask megatron-core, imported here: it takes seconds, and wrong paths should not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        from megatron.core.tokenizers import MegatronTokenizer

    name = None if path is None else str(path)
    return MegatronTokenizer.from_pretrained(name, {"library": library}, **options)
