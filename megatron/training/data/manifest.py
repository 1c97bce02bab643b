"""What `PREFIX.json` beside a `.bin/.idx` pair says: which tokenizer made it, and what is in it.

script/data/preprocess.py writes it and training reads it. Data without one, from elsewhere, train
as well: then nothing is known of them but that their token ids must be in the vocabulary, which
training checks in every batch.
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
    """A tokenizer, as far as data depend on it."""

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
    """The contents of `PREFIX.json`; the same input makes the same one, whoever made it when."""

    schema_version: int = SCHEMA_VERSION
    tokenizer: TokenizerRecord
    dtype: str
    documents: int
    tokens: int
    text_bytes: int  #: of the documents, in UTF-8
    bad_lines: int  #: lines and rows of the input that were left out
    json_key: str
    append_eod: bool
    sources: tuple[tuple[str, int], ...]  #: name and bytes of each input file, in order

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Return the manifest that a JSON text describes.

        Raises:
            ValueError: if the text is not a manifest; the message says why.
        """
        content = parse_json(text)
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"schema version {printable(repr(version))}, but this reader understands "
                f"{SCHEMA_VERSION}"
            )
        fields = _checked(content, _FIELDS, "the manifest")
        tokenizer = TokenizerRecord(**_checked(fields.pop("tokenizer"), _OF_TOKENIZER, "tokenizer"))
        sources = fields.pop("sources")
        for pair in sources:
            if not (isinstance(pair, list) and [type(each) for each in pair] == [str, int]):
                raise ValueError(f"sources holds {printable(repr(pair))}, not a name and a size")
        return cls(tokenizer=tokenizer, sources=tuple(map(tuple, sources)), **fields)


_OF_TOKENIZER: dict[str, tuple[type, ...]] = {
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
    """Return a copy of `value` after checking that it has exactly these fields and types.

    Raises:
        ValueError: if a field is wrong; the message names it.
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
    """None where the data have none.

    Raises:
        UserError: the file is there and is not a manifest.
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
    """Refuse data that another tokenizer made.

    The NullTokenizer stands for ids without a text: it fits wherever its vocabulary is large
    enough.

    Raises:
        UserError: naming both vocabularies.
    """
    manifest = read_manifest(prefix)
    if manifest is None:
        return
    made, size = manifest.tokenizer, tokenizer.vocab_size
    if tokenizer.library == "null":
        if size >= made.vocab_size:
            return
        raise UserError(
            f"the data {prefix} have a vocabulary of {made.vocab_size}, but --vocab-size "
            f"{size - 1} and the end-of-document token make {size}; give --vocab-size "
            f"{made.vocab_size - 1}"
        )
    here = f"the tokenizer {tokenizer.path} ({tokenizer.library}) has"
    if size != made.vocab_size:
        what = f"a vocabulary of {made.vocab_size} ({made.type}), but {here} {size}"
    elif fingerprint(tokenizer) != made.fingerprint:
        what = f"another tokenizer's ids ({made.type}): {here} as many tokens, but not the same"
    else:
        return
    raise UserError(
        f"the data {prefix} have {what}; give the --tokenizer-model that made them, make them "
        f"again with this one, or delete {manifest_path(prefix)} if only the ids matter"
    )
