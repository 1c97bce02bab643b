"""Build tokenizers from files on disk; the tokenizer types have the same names as in Megatron-LM.

The tokenizer classes come from megatron-core (`megatron.core.tokenizers`). This module guesses the
type of a tokenizer from its path, and reports a wrong path before a library fails on it. It never
interprets a missing folder as the name of a model on the Hugging Face hub, so nothing is
downloaded. It reads tiktoken's format with `tiktoken_tokenizer`. It can tokenize many strings in
one call, which is faster than one call per string. It also computes a fingerprint of a tokenizer,
which shows whether data was made with the tokenizer that training uses.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bounded_files import (
    UnusableFileError,
    check_regular,
    printable,
    read_json,
    refuse_special_files,
)
from megatron.optional_packages import check_installed
from megatron.training.data.deferred_import import transformers_when_needed
from megatron.training.errors import UserError

if TYPE_CHECKING:
    from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

TOKENIZER_TYPES = (
    "SentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "NullTokenizer",
)

_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".bpe", ".vocab")
#: Names of the small configuration files that transformers reads in addition to `tokenizer.json`.
_CONFIGURATION = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
)
#: Pattern of the class names that a configuration file may contain. transformers itself accepts the
#: name of any of its classes, but some of these classes load further classes.
_TOKENIZER_CLASS = re.compile(r"(?!Rag|Auto)\w*Tokenizer\w*|\w+Backend")
#: Names of tokenizer files; AutoTokenizer needs at least one of these files in a folder.
HUGGING_FACE_FILES = ("tokenizer.json", "tokenizer_config.json")


def guess_tokenizer_type(path: str | Path) -> str:
    """Return Megatron-LM's name for a tokenizer's type, such as `HuggingFaceTokenizer`.

    The path is that of a tokenizer file or a model folder.
    """
    path = Path(path)
    _refuse_special(path)
    if not path.exists():
        raise UserError(
            f"the tokenizer {path} does not exist; give a SentencePiece .model file, a .tiktoken "
            "file, or a folder with a Hugging Face tokenizer (tokenizer.json) or a tokenizer.model"
        )
    if path.is_file():
        return "HuggingFaceTokenizer" if path.suffix == ".json" else _type_of_file(path)
    # Hugging Face's files take precedence. In a Llama 2 folder, tokenizer.json and tokenizer.model
    # are equivalent; in a Llama 3 folder, tokenizer.model is not a SentencePiece model.
    if any((path / name).is_file() for name in HUGGING_FACE_FILES):
        return "HuggingFaceTokenizer"
    if (file := _file_in(path)) is not None:
        return _type_of_file(file)
    raise UserError(
        f"the folder {path} holds no tokenizer; it needs one of {', '.join(HUGGING_FACE_FILES)} "
        "(Hugging Face), tokenizer.model (SentencePiece or tiktoken) or a .tiktoken file"
    )


def _file_in(folder: Path) -> Path | None:
    """Return the path of the tokenizer.model or .tiktoken file in a folder, or None.

    Raises:
        UserError: if the folder has no tokenizer.model and several .tiktoken files.
    """
    if (folder / "tokenizer.model").is_file():
        return folder / "tokenizer.model"
    paths = sorted(folder.glob("*.tiktoken"))
    if len(paths) > 1:
        raise UserError(
            f"the folder {folder} holds {len(paths)} .tiktoken files "
            f"({', '.join(path.name for path in paths)}); name one of them"
        )
    return paths[0] if paths else None


def _type_of_file(path: Path) -> str:
    """Return `TikTokenizer` or `SentencePieceTokenizer`, depending on the file's first line."""
    with path.open("rb") as file:
        first = file.readline(1000)
    tiktoken = re.fullmatch(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", first)
    return "TikTokenizer" if tiktoken else "SentencePieceTokenizer"


def build_tokenizer(
    tokenizer_type: str | None,
    model_path: str | Path | None = None,
    vocab_size: int | None = None,
) -> MegatronTokenizerText:
    """Return a tokenizer of type `tokenizer_type`; if it is None, guess the type from `model_path`.

    The tokenizer provides tokenize(text) -> list[int], detokenize(ids) -> str, vocab_size, eod
    (None if there is no end-of-document token), and the rest of the interface that megatron-core's
    data sets use. The NullTokenizer reads text that consists of numbers: the token ids from 0 to
    `vocab_size` - 1. Its eod is `vocab_size`. The size of other tokenizers follows from their
    files.

    Raises:
        UserError: if the tokenizer cannot be built, or if its size is not `vocab_size`.
    """
    if tokenizer_type is None and model_path is not None:
        tokenizer_type = guess_tokenizer_type(model_path)
    if tokenizer_type is None:
        raise UserError(
            "no tokenizer is given; give --tokenizer-model (a file or folder), or --tokenizer-type "
            "NullTokenizer for text that is numbers"
        )
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
        return _null(vocab_size)
    if model_path is None:
        raise UserError(f"the {tokenizer_type} needs a file or folder; give --tokenizer-model")
    _refuse_special(Path(model_path))
    make = {
        "SentencePieceTokenizer": _sentencepiece,
        "HuggingFaceTokenizer": _hugging_face,
        "TikTokenizer": _tiktoken,
    }[tokenizer_type]
    tokenizer = make(Path(model_path))
    if vocab_size not in (None, tokenizer.vocab_size):
        raise UserError(
            f"--vocab-size is {vocab_size}, but the tokenizer {model_path} has "
            f"{tokenizer.vocab_size} tokens; remove --vocab-size: only the NullTokenizer needs it"
        )
    return tokenizer


#: beginning of a warning that megatron-core emits when it is imported
_NO_FUSED_KERNELS = "Transformer Engine and Apex are not installed"
#: Text that different tokenizers split differently. It contains repeated spaces, digits, code,
#: upper and lower case, several scripts and an emoji.
PROBE = "Hello  world's 12345.67\n\tdef f(x): return x**2  # naïve, 漢字かな 한국어 Привет 🙂\r\n"


def fingerprint(tokenizer: MegatronTokenizerText) -> str:
    """Return a hash that is equal for tokenizers that behave in the same way.

    It is computed from a tokenizer's behavior (the token of every id, and the ids of `PROBE`). The
    tokenizer's files are not used, because each release of a library writes them differently.
    """
    digest = hashlib.sha256()
    digest.update(f"{tokenizer.vocab_size} {tokenizer.eod}\n".encode())
    if tokenizer.library != "null":
        for number, token in sorted(tokenizer.inv_vocab.items()):
            digest.update(f"{number} {token!r}\n".encode())
        digest.update(repr(tokenizer.tokenize(PROBE)).encode())
    return digest.hexdigest()


def batch_encoder(tokenizer: MegatronTokenizerText) -> Callable[[list[str]], list[list[int]]]:
    """Return a function that tokenizes a list of strings, if possible faster than `tokenize`.

    The ids are the same. megatron-core's `tokenize` is slower with a Hugging Face tokenizer because
    it first obtains the tokens as strings and then looks up the id of each string.
    """
    inner = tokenizer._tokenizer
    if tokenizer.library == "huggingface" and getattr(inner.tokenizer, "is_fast", False):
        backend = inner.tokenizer.backend_tokenizer

        def encode(texts: list[str]) -> list[list[int]]:
            # Disable truncation and padding, which tokenizer.json may enable; megatron-core's
            # `tokenize` also disables them.
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = inner.tokenizer.split_special_tokens
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
            return [encoding.ids for encoding in encodings]

        return encode
    if tokenizer.library == "sentencepiece" and not inner.legacy and inner.ignore_extra_whitespaces:
        return lambda texts: inner.tokenizer.encode(texts, out_type=int, num_threads=1)
    return lambda texts: [tokenizer.tokenize(text) for text in texts]


def _refuse_special(path: Path) -> None:
    """Check that no tokenizer file is a FIFO, device or socket.

    Raises:
        UserError: if there is such a file; the message names the file.
    """
    try:
        if path.is_dir():
            refuse_special_files(path, concerns=lambda name: Path(name).suffix in _SUFFIXES)
        elif path.exists():
            check_regular(path)
            refuse_special_files(path.parent, concerns=lambda name: name in _CONFIGURATION)
    except (OSError, UnusableFileError) as error:
        raise UserError(f"{error}; give a tokenizer that consists of regular files") from error


def _null(vocab_size: int) -> MegatronTokenizerText:
    """Return a tokenizer for the ids below `vocab_size`; its end-of-document id is `vocab_size`."""
    with warnings.catch_warnings(), transformers_when_needed():
        warnings.filterwarnings("ignore", message=_NO_FUSED_KERNELS)
        from megatron.core.tokenizers.text.text_tokenizer import TOKENIZER_MAPPING_LIBRARIES

    library = "null" if "null" in TOKENIZER_MAPPING_LIBRARIES else "null-text"  # since 0.17
    tokenizer = _from_wheel(library, None, vocab_size=vocab_size)
    if tokenizer.vocab_size == vocab_size:  # since 0.18, the argument includes the eod
        tokenizer = _from_wheel(library, None, vocab_size=vocab_size + 1)
    tokenizer.library = "null"  # the name in manifests of prepared data
    return tokenizer


def _sentencepiece(path: Path) -> MegatronTokenizerText:
    file = path / "tokenizer.model" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file} does not exist; a SentencePieceTokenizer needs a .model file")
    try:
        return _from_wheel("sentencepiece", file)
    except (RuntimeError, OSError) as error:  # the exception depends on sentencepiece's version
        raise UserError(
            f"{file} is not a SentencePiece model; if it belongs to Llama 3, give the type "
            "TikTokenizer, or the folder with its tokenizer.json and HuggingFaceTokenizer"
        ) from error


def _tiktoken(path: Path) -> MegatronTokenizerText:
    file = _file_in(path) if path.is_dir() else path
    if file is None or not file.is_file():
        raise UserError(
            f"{path} has no file in tiktoken's format; a TikTokenizer needs a tokenizer.model or "
            ".tiktoken file with lines of base64 and rank"
        )
    _check_package("tiktoken", "TikTokenizer")
    from megatron.training.data.tiktoken_tokenizer import TiktokenTokenizer

    try:
        return TiktokenTokenizer(str(file), {"library": "tiktoken"})
    except ValueError as error:
        raise UserError(
            f"{file} is not in tiktoken's format ({error}); get it again, or give another "
            "--tokenizer-type"
        ) from error


def _hugging_face(path: Path) -> MegatronTokenizerText:
    if path.is_file() and path.name not in HUGGING_FACE_FILES:
        raise UserError(
            f"{path} would not be read: Hugging Face's library reads "
            f"{' and '.join(HUGGING_FACE_FILES)} of a folder; name the folder of the tokenizer, "
            "and rename this file to tokenizer.json if it holds the tokenizer"
        )
    folder = path.parent if path.is_file() else path
    if not any((folder / name).is_file() for name in HUGGING_FACE_FILES):
        raise UserError(
            f"{folder} holds no Hugging Face tokenizer; it needs "
            f"{' or '.join(HUGGING_FACE_FILES)}, as save_pretrained writes them"
        )
    _check_configuration(folder)
    _check_package("transformers", "HuggingFaceTokenizer")
    try:
        return _from_wheel("huggingface", folder, use_fast=True)
    except Exception as error:  # the library can raise almost any exception on a wrong file
        raise _unreadable(folder, error) from error


def _check_package(package: str, tokenizer_type: str) -> None:
    try:
        check_installed(package, f"--tokenizer-type {tokenizer_type}")
    except ValueError as error:
        raise UserError(str(error)) from error


def _check_configuration(folder: Path) -> None:
    """Check that the configuration files in a folder are intact and name only tokenizer classes.

    Raises:
        UserError: if a file fails the check; the message names the file.
    """
    for name in _CONFIGURATION:
        path = folder / name
        try:
            settings = read_json(path)
        except FileNotFoundError:
            continue
        except UnusableFileError as error:
            raise UserError(f"{error}; save the tokenizer again with save_pretrained") from error
        if not isinstance(settings, dict):
            raise UserError(
                f"{path} holds a value of type {type(settings).__name__}, not an object of "
                "settings; save the tokenizer again with save_pretrained"
            )
        kind = settings.get("tokenizer_class") if name != "config.json" else None
        if kind is not None and not (isinstance(kind, str) and _TOKENIZER_CLASS.fullmatch(kind)):
            raise UserError(
                f"{path} names the class {printable(repr(kind), limit=60)}, which is not a "
                "tokenizer; save the tokenizer again with save_pretrained"
            )


def _unreadable(path: Path, error: Exception) -> UserError:
    why = str(error).strip().rpartition("Exception: ")[2] or type(error).__name__
    if "trust_remote_code" in why:
        return UserError(
            f"the tokenizer in {path} needs custom code, which is never run; save it again as one "
            "of the tokenizer classes of transformers"
        )
    return UserError(
        f"cannot read the tokenizer in {path} ({printable(why.splitlines()[-1], limit=300)}); save "
        "it again with save_pretrained"
    )


def _from_wheel(library: str, path: Path | None, **options: object) -> MegatronTokenizerText:
    """Return the tokenizer that megatron-core builds with `library` from the file or folder `path`.

    Importing megatron-core's tokenizers takes seconds. The import is in this function so that a
    wrong path is reported without this delay.
    """
    with warnings.catch_warnings(), transformers_when_needed():
        warnings.filterwarnings("ignore", message=_NO_FUSED_KERNELS)
        import megatron.core.tokenizers.text.libraries  # noqa: F401
        from megatron.core.tokenizers import MegatronTokenizer

    name = None if path is None else str(path)
    return MegatronTokenizer.from_pretrained(name, {"library": library}, **options)
