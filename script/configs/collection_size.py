"""Compute the size of a tensor collection, in files and bytes, before training starts.

`--collect-plan` runs the selected micro-batches of an iteration and measures the same size, and the
time and memory that the collection takes. This module computes the size from the flags of the
training command in a tenth of a second, without torch. It parses the collection flags with the code
that training uses. Tests compare the result with `--collect-plan`. How many tokens an expert gets
depends on the data, so the size of each expert's tensors is a mean; their sum does not depend on
the data.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from configs.lookup import ConfigError, last_value
from configs.model_tensors import Model, Saved
from megatron.collection.flags import Reader, read_by
from megatron.collection.limits import Limits
from megatron.collection.selection import Selection, matches

FILE_OVERHEAD = 2460  #: number of bytes in a tensor file besides the values of the tensor


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of one tensor collection."""

    files: int
    bytes: int
    #: number of collected iterations; None if the flags set no maximum
    iterations: int | None
    limited: bool  #: True if the user has set a maximum number of files or bytes
    #: True if tensors are written only after an event (with a ring buffer) or while a flag file
    #: exists
    optional: bool
    ranks: int  #: number of ranks that collect
    codes: bool  #: True if quantized codes are also collected; `files` and `bytes` exclude them


def collection_size(words: Sequence[str]) -> Size | None:
    """Return the size of a training command's collection, or None if the model is not supported.

    Args:
        words: arguments of the training command, with the flags of `pretrain_gpt.py`.

    Raises:
        ConfigError: if a collection flag has an invalid value.
    """
    model = Model(words)
    try:
        selection = Selection.parse(
            num_layers=model.layers, world_size=model.world, **_given(Reader.SELECTION, words)
        )
        limits = Limits.parse(**_given(Reader.LIMITS, words))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not model.is_known:
        return None
    files, size = _iteration_size(model, selection)
    ring = _whole("--collect-ring", words)
    count = _iterations(words, selection, ring)
    times = math.inf if count is None else count
    files, size = files * times, size * times
    limited = limits.max_files is not None or limits.max_bytes is not None
    if limits.max_files is not None and files > limits.max_files:
        files, size = limits.max_files, size * limits.max_files / files
    if limits.max_bytes is not None and size > limits.max_bytes:
        files, size = files * limits.max_bytes / size, limits.max_bytes
    return Size(
        files=round(min(files, sys.maxsize)),
        bytes=int(min(size, sys.maxsize)),
        iterations=count,
        limited=limited,
        optional=ring is not None or last_value("--collect-flag-file", words) is not None,
        ranks=selection.ranks.count(model.world),
        codes=any(name.endswith("_codes") for name in selection.names),
    )


def _iteration_size(model: Model, selection: Selection) -> tuple[float, float]:
    """Return the number of files and the number of bytes that all ranks write per iteration."""
    files = size = 0.0
    micro_batches = min(selection.micro_batches or model.micro_batches, model.micro_batches)
    names = selection.names
    for layer in range(model.layers):
        if layer not in selection.layers:
            continue
        for saved in model.tensors(layer):
            module = f"decoder.layers.{layer}.{saved.module}"
            if saved.name not in names or not _included(module, selection.modules):
                continue
            values = math.prod(_sliced_sizes(selection.slices.by_letter, saved))
            times = saved.share * model.runs(saved)
            times *= 1 if saved.name == "weight" else micro_batches
            if values:
                files += times
                size += times * (values * model.value_bytes + FILE_OVERHEAD)
    ranks = model.world / model.pp  # each pipeline stage has only its own layers
    share = selection.ranks.count(model.world) / model.world
    return files * ranks * share, size * ranks * share


def _included(module: str, globs: Sequence[str]) -> bool:
    return not globs or any(matches(module, glob) for glob in globs)


def _sliced_sizes(slices: dict[str, range], saved: Saved) -> list[float]:
    """Return the size of each dimension of the tensor `saved` after slicing."""
    sizes: list[float] = []
    for letter, size in saved.dims:
        part = slices.get(letter)
        if part is not None:
            size = len(range(round(size))[part.start : part.stop : part.step])
        sizes.append(size)
    return sizes


def _iterations(words: Sequence[str], selection: Selection, ring: int | None) -> int | None:
    """Return how many iterations a command collects at most, or None if there is no maximum."""
    if ring is not None:
        return ring * (_whole("--collect-ring-events", words) or 3)
    train_iters = _whole("--train-iters", words)
    named = selection.iterations
    if train_iters is not None:
        named = named.until(train_iters)
    count = named.count()
    limit = _whole("--control-iter", words)
    if limit is None and last_value("--collect-flag-file", words) is None:
        limit = 0 if last_value("--collect-iterations", words) is not None else 1
    return count if not limit else limit if count is None else min(limit, count)


def _given(reader: Reader, words: Sequence[str]) -> dict[str, Any]:
    """Return the values that a command gives for the flags that `reader` reads, by flag name."""
    values: dict[str, Any] = {}
    for flag in read_by(reader):
        take = _list if flag.many else _TAKE[flag.type]
        if (value := take(flag.option, words)) is not None:
            values[flag.name] = value
    return values


def _list(flag: str, words: Sequence[str]) -> list[str] | None:
    """Return the values after the last occurrence of a flag, or None if the flag is absent."""
    values: list[str] | None = None
    taking = False
    for word in words:
        name, equals, text = word.partition("=")
        if name == flag:
            values, taking = [text] if equals else [], not equals
        elif word.startswith("--"):
            taking = False
        elif taking and values is not None:
            values.append(word)
    return values


def _whole(flag: str, words: Sequence[str]) -> int | None:
    text = last_value(flag, words)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ConfigError(f"{flag} is {text!r}; give an integer of at least 0")
    return int(text)


def _real(flag: str, words: Sequence[str]) -> float | None:
    text = last_value(flag, words)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; give a number above 0") from None


_TAKE = {int: _whole, float: _real, str: last_value}  #: functions that read a flag's value, by type
