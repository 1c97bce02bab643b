"""Read tokenizers in tiktoken's format: a text file with one base64 token and its rank per line.

Llama 3's `tokenizer.model` and OpenAI's `*.tiktoken` files have this format. Such a file holds only
the tokens that byte-pair merging produces. It states neither how text is split before merging nor
which special tokens exist. The number of ranks in the file selects one of OpenAI's known encodings;
any other number selects Llama 3's conventions. (megatron-core's own tiktoken class reads a
different format: JSON with the special tokens first.)

Text never produces special tokens: `<|end_of_text|>` in a document is split like any other word.
Llama 3's own code treats user input in the same way.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from megatron.bounded_files import MEBIBYTE, read_bytes
from megatron.core.tokenizers.text.libraries.abstract_tokenizer import MegatronTokenizerTextAbstract
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

FILE_LIMIT = 256 * MEBIBYTE  #: maximum file size, in bytes; the largest vocabularies take 4 MB
LARGEST_RANK = 1 << 24  #: exclusive limit of a token's rank; about 20 times the largest vocabulary
LONGEST_PIECE = 400_000  #: maximum length of the text in one call of tiktoken, in characters
#: Maximum length of a run of whitespace, or of a run of other characters, in a piece of text.
LONGEST_RUN = 25_000
_LONG = rf"{{{LONGEST_RUN + 1},}}"
# The lookbehinds make a match begin at the first character of a run.
_LONG_RUN = re.compile(rf"(?<!\S)\S{_LONG}|(?<!\s)\s{_LONG}")

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Family:
    """Properties of a tokenizer that are not stored in its tiktoken file."""

    name: str
    pattern: str  #: regular expression that splits text into words; no token spans two words
    special_tokens: dict[str, int]  #: ids of the special tokens by name
    eod: str
    bos: str | None = None
    pad: str | None = None


def _llama3(ranks: int) -> Family:
    """Return the properties of Llama 3's tokenizer.

    The ids from `ranks` on belong to the 256 special tokens of Llama 3.2.
    """
    names = [f"<|reserved_special_token_{number}|>" for number in range(256)]
    known = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id"}
    known |= {6: "start_header_id", 7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"}
    reserved = iter(names)
    tokens = [f"<|{known[i]}|>" if i in known else next(reserved) for i in range(256)]
    return Family(
        "llama3",
        _LLAMA3,
        {token: ranks + i for i, token in enumerate(tokens)},
        eod="<|end_of_text|>",
        bos="<|begin_of_text|>",
        pad="<|finetune_right_pad_id|>",
    )


def _openai(name: str, pattern: str, **special_tokens: int) -> Family:
    tokens = {f"<|{token}|>": number for token, number in special_tokens.items()}
    return Family(name, pattern, tokens, eod="<|endoftext|>")


_FILL_IN = ("fim_prefix", "fim_middle", "fim_suffix")
FAMILIES = {
    50256: _openai("r50k_base", _GPT2, endoftext=50256),
    50280: _openai("p50k_base", _GPT2, endoftext=50256),
    100256: _openai(
        "cl100k_base",
        _CL100K,
        endoftext=100257,
        **{name: 100258 + i for i, name in enumerate(_FILL_IN)},
        endofprompt=100276,
    ),
    199998: _openai("o200k_base", _O200K, endoftext=199999, endofprompt=200018),
}


def _rank(digits: bytes) -> int:
    """Return the rank of a token, parsed from its decimal digits.

    Raises:
        ValueError: if `digits` is not a number, or the number is not below `LARGEST_RANK`.
    """
    if not re.fullmatch(rb"[0-9]{1,9}", digits) or int(digits) >= LARGEST_RANK:
        raise ValueError(f"the token's rank must be a number below {LARGEST_RANK}")
    return int(digits)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of each token in a tiktoken file; a token is a byte string.

    Raises:
        ValueError: if a line is not `base64 rank`, a single byte has no rank, or two tokens have
            the same rank.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, limit=FILE_LIMIT).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = _rank(rank)
        except (ValueError, binascii.Error) as error:
            text = f"line {number} is not 'base64 rank' with a rank below {LARGEST_RANK}"
            raise ValueError(text) from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"the byte {missing[0]} has no rank, so some texts have no tokens")
    if len(set(ranks.values())) != len(ranks):
        raise ValueError("two tokens have the same rank")
    return ranks


def pieces(text: str) -> Iterator[str]:
    """Yield consecutive pieces of `text` that are short enough for tiktoken.

    tiktoken's regular expressions overflow the stack on a million spaces in a row, and the library
    panics. `LONGEST_PIECE` and `LONGEST_RUN` have the same values as in Llama 3's own tokenizer, so
    the ids are the same. Text within these limits is yielded as one piece.
    """
    for start in range(0, len(text), LONGEST_PIECE):
        piece, done = text[start : start + LONGEST_PIECE], 0
        for run in _LONG_RUN.finditer(piece):
            for cut in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
                yield piece[done:cut]
                done = cut
        yield piece[done:]


class TiktokenFile(MegatronTokenizerTextAbstract):
    """Tokenizer from a tiktoken file, with megatron-core's interface for tokenizer libraries."""

    chat_template = None
    mask_id = cls_id = sep_id = unk_id = None

    def __init__(self, path: str) -> None:
        ranks = read_ranks(Path(path))
        self.family = FAMILIES.get(len(ranks)) or _llama3(max(ranks.values()) + 1)
        self.tokenizer = tiktoken.Encoding(
            self.family.name,
            pat_str=self.family.pattern,
            mergeable_ranks=ranks,
            special_tokens=self.family.special_tokens,
        )
        self.inv_vocab = {rank: token.decode("latin-1") for token, rank in ranks.items()}
        self.inv_vocab |= {number: name for name, number in self.family.special_tokens.items()}
        self.vocab_size = self.tokenizer.n_vocab

    @property
    def vocab(self) -> dict[str, int]:
        """Mapping from token to id; each byte of a token is decoded as a Latin-1 character."""
        return {token: number for number, token in self.inv_vocab.items()}

    def text_to_ids(self, text: str) -> list[int]:
        encode = self.tokenizer.encode_ordinary
        return list(itertools.chain.from_iterable(map(encode, pieces(text))))

    def ids_to_text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def text_to_tokens(self, text: str) -> list[str]:
        return self.ids_to_tokens(self.text_to_ids(text))

    def tokens_to_text(self, tokens: list[str]) -> str:
        return self.ids_to_text(self.tokens_to_ids(tokens))

    def tokens_to_ids(self, tokens: list[str]) -> list[int]:
        vocab = self.vocab
        return [vocab[token] for token in tokens]

    def ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.inv_vocab[number] for number in ids]

    def add_special_tokens(self, special_tokens: list | dict) -> None:
        raise NotImplementedError("a tiktoken file has only the special tokens of its family")

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        return []

    def _id(self, name: str | None) -> int | None:
        return None if name is None else self.family.special_tokens[name]

    @property
    def eod(self) -> int | None:
        return self._id(self.family.eod)

    @property
    def eos_id(self) -> int | None:
        return self.eod

    @property
    def bos_id(self) -> int | None:
        return self._id(self.family.bos)

    @property
    def pad_id(self) -> int | None:
        return self._id(self.family.pad)


class TiktokenTokenizer(MegatronTokenizerText):
    """Tokenizer with the interface that training and data sets use, backed by a `TiktokenFile`."""

    def _restore_model(self, **kwargs: object) -> TiktokenFile:
        return TiktokenFile(self.path)
