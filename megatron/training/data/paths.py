"""Parse and check the prefixes of data sets, and choose the folder that caches sample indices."""

import hashlib
import math
import os
import re
from pathlib import Path

from megatron.bounded_files import UnusableFileError, check_regular, printable
from megatron.training.data.indexed_data import check_header
from megatron.training.errors import UserError


def check_split(text: str) -> None:
    """Check the value of `--split`.

    megatron-core reads only the digits and decimal points. Without this check, it would ignore the
    sign of a negative number, and split `1e-1` into two numbers.

    Raises:
        UserError: unless the value consists of one to three shares, and at least one is above 0.
    """
    parts = re.split("[,/]", text)
    shares = [float(part) for part in parts if re.fullmatch(r" *(\d+\.?\d*|\.\d+) *", part)]
    if len(shares) != len(parts) or len(parts) > 3 or not sum(shares) > 0:
        raise UserError(
            f"--split {text!r} does not state the shares of training, validation and test data; "
            "write it as in 969,30,1"
        )


def parse_blend(values: list[str]) -> tuple[list[str], list[float] | None]:
    """Return (prefixes, weights) of a data blend; the weights are None if the blend has none.

    `0.3 a 0.7 b` has weights and `a b` has none. A blend with weights may also be one argument.

    Raises:
        UserError: if weights and prefixes do not alternate, a weight is not above 0, or a prefix
            occurs twice.
    """
    if len(values) == 1 and _exists(f"{values[0]}.idx"):
        return list(values), None  # the value names a data set, even if it looks like a blend
    words = values[0].split()
    if len(values) == 1 and words and _is_number(words[0]):
        values = words  # scripts often pass a blend as one quoted argument
    if not _is_number(values[0]):
        _check_distinct(values)
        return list(values), None
    weights, prefixes = values[0::2], values[1::2]
    if len(weights) != len(prefixes) or not all(map(_is_number, weights)):
        raise UserError(
            f"the data blend {' '.join(values)!r} does not alternate weights and prefixes; write "
            "it as in 0.3 first_prefix 0.7 second_prefix"
        )
    numbers = [float(w) for w in weights]
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise UserError(
            f"the weights {numbers} of the data blend are not all above 0 and finite; make them "
            "positive, and leave out data that the run does not take"
        )
    _check_distinct(prefixes)
    return prefixes, numbers


def _check_distinct(prefixes: list[str]) -> None:
    """Raise `UserError` if a blend names a prefix twice, which would repeat its samples."""
    for index, prefix in enumerate(prefixes):
        if prefix in prefixes[:index]:
            raise UserError(
                f"the data blend names {printable(prefix)} twice; name it once, with the sum of "
                "the weights"
            )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def blend_prefixes(values: list[str]) -> list[str]:
    """Return the prefixes of a data blend, without its weights."""
    return parse_blend(values)[0]


def _exists(path: str) -> bool:
    """Return whether `path` exists, even if it is not a regular file.

    Raises:
        UserError: if `path` is not a valid name for a file.
    """
    try:
        check_regular(path)
    except FileNotFoundError:
        return False
    except UnusableFileError as error:
        if not os.path.lexists(path):
            raise UserError(f"data file {error}; name another prefix") from error
    return True


def check_prefix(prefix: str) -> None:
    """Check that both files of a prefix exist, and that the header and size of the index are valid.

    Raises:
        UserError: if the check fails; the message names the file and the most likely mistake.
    """
    missing = [suffix for suffix in (".bin", ".idx") if not _exists(prefix + suffix)]
    if not missing:
        check_header(prefix)
        return
    stem = prefix.removesuffix(".bin").removesuffix(".idx")
    if stem != prefix and _exists(stem + ".bin"):
        advice = f"leave the suffix off: {stem}"
    else:
        advice = "make it with `python script/data/preprocess.py`, or name another prefix"
    raise UserError(f"data file {printable(prefix + missing[0])} does not exist; {advice}")


def default_cache(prefixes: list[str]) -> str | None:
    """Return the default cache folder, or None if the first prefix's folder is not writable."""
    folder = Path(prefixes[0]).resolve().parent
    return str(folder / ".index_cache") if os.access(folder, os.W_OK) else None


def index_state(prefixes: list[str]) -> str:
    """Return a hash of the paths, sizes and modification times of the `.idx` files.

    megatron-core names its sample indices after the prefix alone, and would reuse the indices of
    earlier data with the same prefix. The hash changes when an `.idx` file is rewritten, so it
    serves as the name of a separate cache folder.
    """
    digest = hashlib.sha256()
    for prefix in prefixes:
        path = Path(f"{prefix}.idx").resolve()
        status = path.stat()
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
