"""Read and write `PREFIX.json`, which records the tokenizer and the contents of a `.bin/.idx` pair.

script/data/preprocess.py writes this manifest and training reads it. Training also accepts data
without a manifest, which other programs make. It then cannot compare the tokenizers; it only checks
that the token ids of every batch are in the vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bounded_files import UnusableFileError, parse_json, printable, read_text
from megatron.training.data.tokenizer import fingerprint
from megatron.training.errors import UserError

if TYPE_CHECKING:
    from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class TokenizerRecord:
    """Properties of the tokenizer that encoded a data set."""

    type: str
    vocab_size: int
    eod: int | None
    fingerprint: str

    @classmethod
    def of(cls, tokenizer: MegatronTokenizerText) -> TokenizerRecord:
        return cls(
            type=tokenizer.library,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            fingerprint=fingerprint(tokenizer),
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of `PREFIX.json`; the same input always results in the same manifest."""

    schema_version: int = SCHEMA_VERSION
    tokenizer: TokenizerRecord
    dtype: str
    documents: int
    tokens: int
    text_bytes: int  #: total size of the documents as UTF-8, in bytes
    bad_lines: int  #: number of input lines and rows that were skipped
    json_key: str
    append_eod: bool
    sources: tuple[tuple[str, int], ...]  #: name and size in bytes of each input file, in order

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Return the manifest parsed from a JSON string.

        Raises:
            ValueError: if the string is not a manifest; the message gives the reason.
        """
        content = parse_json(text)
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"schema version {printable(repr(version))}, but this reader understands "
                f"{SCHEMA_VERSION}"
            )
        fields = _checked(content, _FIELDS, "the manifest")
        tokenizer = _checked(fields.pop("tokenizer"), _TOKENIZER_FIELDS, "tokenizer")
        sources = fields.pop("sources")
        for pair in sources:
            if not (isinstance(pair, list) and [type(item) for item in pair] == [str, int]):
                raise ValueError(f"sources holds {printable(repr(pair))}, not a name and a size")
        return cls(
            tokenizer=TokenizerRecord(**tokenizer), sources=tuple(map(tuple, sources)), **fields
        )


_TOKENIZER_FIELDS: dict[str, tuple[type, ...]] = {
    "type": (str,),
    "vocab_size": (int,),
    "eod": (int, type(None)),
    "fingerprint": (str,),
}
_FIELDS: dict[str, tuple[type, ...]] = {
    "schema_version": (int,),
    "tokenizer": (dict,),
    "dtype": (str,),
    "documents": (int,),
    "tokens": (int,),
    "text_bytes": (int,),
    "bad_lines": (int,),
    "json_key": (str,),
    "append_eod": (bool,),
    "sources": (list,),
}


def _checked(value: dict[str, Any], kinds: dict[str, tuple[type, ...]], what: str) -> dict:
    """Return a copy of `value` after checking that it has exactly the fields and types of `kinds`.

    Raises:
        ValueError: if a field is missing, unknown or of a wrong type; the message names the field.
    """
    if odd := sorted(value.keys() ^ kinds.keys()):
        problem = "lacks" if odd[0] in kinds else "has the unknown field"
        raise ValueError(f"{what} {problem} {printable(odd[0])}")
    for name, accepted in kinds.items():
        if type(value[name]) not in accepted:  # isinstance would accept a bool as an int
            raise ValueError(
                f"{name} is {printable(repr(value[name]), limit=60)}, not "
                f"{' or '.join(kind.__name__ for kind in accepted)}"
            )
    return dict(value)


def manifest_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.json")


def read_manifest(prefix: str | Path) -> Manifest | None:
    """Return the manifest of the data at `prefix`, or None if the data has no manifest.

    Raises:
        UserError: if the file is not a manifest.
    """
    path = manifest_path(prefix)
    try:
        return Manifest.from_json(read_text(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        why = error.why if isinstance(error, UnusableFileError) else error
        raise UserError(
            f"{printable(path, limit=1000)} does not describe a data set ({why}); make the data "
            "again with script/data/preprocess.py, or move the file away if it is unrelated"
        ) from error


def check_fits(prefix: str, tokenizer: MegatronTokenizerText) -> None:
    """Check that the data set at `prefix` was encoded with `tokenizer`.

    A data set without a manifest is not checked. The NullTokenizer accepts any data whose
    vocabulary is not larger than its own.

    Raises:
        UserError: if the tokenizers differ; the message names both vocabularies.
    """
    manifest = read_manifest(prefix)
    if manifest is None:
        return
    recorded, size = manifest.tokenizer, tokenizer.vocab_size
    if tokenizer.library == "null":
        if size >= recorded.vocab_size:
            return
        raise UserError(
            f"the data {prefix} has a vocabulary of {recorded.vocab_size}, but --vocab-size "
            f"{size - 1} and the end-of-document token make {size}; give --vocab-size "
            f"{recorded.vocab_size - 1}"
        )
    given = f"the tokenizer {tokenizer.path} ({tokenizer.library}) has"
    if size != recorded.vocab_size:
        difference = f"a vocabulary of {recorded.vocab_size} ({recorded.type}), but {given} {size}"
    elif fingerprint(tokenizer) != recorded.fingerprint:
        difference = (
            f"another tokenizer's ids ({recorded.type}): {given} as many tokens, but different ones"
        )
    else:
        return
    raise UserError(
        f"the data {prefix} has {difference}; give the --tokenizer-model that it was made with, "
        f"make it again with this one, or delete {manifest_path(prefix)} if only the ids matter"
    )
