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

from megatron.training.errors import UserError
from megatron.training.tokenizer import fingerprint

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
        """Raises ValueError, KeyError or TypeError where `text` is no manifest."""
        fields: dict[str, Any] = json.loads(text)
        if fields["schema_version"] != SCHEMA_VERSION:
            raise ValueError(
                f"schema version {fields['schema_version']!r}, but this reader understands "
                f"{SCHEMA_VERSION}"
            )
        tokenizer = TokenizerRecord(**fields.pop("tokenizer"))
        sources = tuple((name, size) for name, size in fields.pop("sources"))
        return cls(tokenizer=tokenizer, sources=sources, **fields)


def manifest_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.json")


def read_manifest(prefix: str | Path) -> Manifest | None:
    """None where the data have none.

    Raises:
        UserError: the file is there and is not a manifest.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(
            f"{path} does not describe a data set ({error}); make the data again with "
            "script/data/preprocess.py, or move the file away if it is not of ours"
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
