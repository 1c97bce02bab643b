"""Read one tensor: its statistics, pixels, channels, scales and attention.

The tensors used last stay in memory, so that another view of the same tensor opens quickly.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.analysis.dump.reassembly import reassemble
from megatron.analysis.dump.tensor_files import UnreadableTensorError, read_tensor
from megatron.analysis.figures.attention_probabilities import hidden_of_card, recomputed
from megatron.analysis.figures.figure_data import NothingToDrawError
from megatron.analysis.figures.scale_maps import scale_map
from megatron.analysis.serve.catalog import Catalog
from megatron.analysis.serve.follower import LINKED, Follower
from megatron.analysis.serve.measuring import Answer, Measurer
from megatron.analysis.stats.errors import decibels
from megatron.analysis.stats.matrix_view import MatrixView, matrix_view_of
from megatron.analysis.verification.recorded_formats import (
    NotCheckedError,
    Softmax,
    softmax_of_card,
)
from megatron.fake_quant import fake_quantize, get_format
from megatron.fake_quant.code_points import code_values

KEPT_BYTES = 192 << 20  #: maximum memory for cached tensors, in bytes
KEPT_ANSWERS = 24  #: maximum number of tensors whose statistics are cached
MOST_VALUES = 1 << 28  #: maximum number of values of a tensor that can be quantized
MOST_SCORES = 1 << 26  #: maximum number of attention scores of a head
MOST_PLACES = 1 << 23  #: maximum number of tokens or channels of a profile
SEED = 20240916  #: seed of stochastic rounding

_Value = TypeVar("_Value")


class NotShownError(Exception):
    """Error raised if a view cannot be shown; its message states the reason on the page."""


class _Making:
    """The lock of a value that is being computed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class _Kept:
    """A least-recently-used cache with a limit on the total size of its values."""

    def __init__(self, limit: int):
        self._limit, self._used = limit, 0
        self._values: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._making: weakref.WeakValueDictionary[Any, _Making] = weakref.WeakValueDictionary()

    def get(self, key: Any, make: Callable[[], _Value], size: Callable[[_Value], int]) -> _Value:
        """Return the value of a key; only one thread at a time computes it."""
        with self._lock:
            making = self._making.setdefault(key, _Making())
        with making.lock:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    found: _Value = self._values[key][0]
                    return found
            value = make()
            with self._lock:
                weight = size(value)
                if weight <= self._limit:
                    self._values[key] = (value, weight)
                    self._used += weight
                    while self._used > self._limit:
                        self._used -= self._values.popitem(last=False)[1][1]
            return value


@dataclass(frozen=True)
class Profile:
    """Largest magnitude and root mean square of each row, or of each column, of a matrix."""

    amax: NDArray[np.float32]
    rms: NDArray[np.float32]


@dataclass(frozen=True)
class Attention:
    """Attention of one head, of shape [queries, keys], and how a format changes it."""

    probabilities: Tensor
    visible: Tensor  #: mask that is true for the keys that a query attends to
    change: Tensor | None
    how: str  #: how both were computed, as a sentence
    heads: int
    sequences: int


class Contents:
    """The tensors of a dump and what is computed from them; recent results are cached."""

    def __init__(self, follower: Follower, measurer: Measurer):
        self.follower, self._measurer = follower, measurer
        self._tensors, self._answers = _Kept(KEPT_BYTES), _Kept(KEPT_ANSWERS)

    def answer(self, catalog: Catalog, tensor: int, formats: Sequence[str]) -> Answer:
        """Return all statistics of a tensor.

        Raises:
            NotShownError: if the tensor cannot be read.
        """
        key = (int(catalog.ids[tensor]), int(catalog.stamps[tensor]), tuple(formats))
        answer = self._answers.get(
            key, lambda: self._measurer.answer(catalog, tensor, formats), lambda _: 1
        )
        if answer.arrays is None:
            raise NotShownError(answer.why)
        return answer

    def tensor(self, catalog: Catalog, tensor: int) -> Tensor:
        """Return a logical tensor, joined from its shards.

        Raises:
            NotShownError: if the tensor cannot be read.
        """
        key = ("tensor", int(catalog.ids[tensor]), int(catalog.stamps[tensor]))
        # A single file is memory-mapped and takes no additional memory; joined shards are copies.
        # A deleted file takes disk space while it is mapped, so only a few files stay mapped.
        weigh = (lambda _: KEPT_BYTES // 64) if catalog.files[tensor] == 1 else _nbytes
        return self._tensors.get(key, lambda: self._load(catalog, tensor), weigh)

    def _load(self, catalog: Catalog, tensor: int) -> Tensor:
        rows = catalog.records_of([tensor])
        frame = catalog.records.frame(rows)
        if not all(self.follower.allows(path) for path in frame["path"]):
            raise NotShownError(LINKED)

        def load(row: Any) -> Tensor:
            found, _ = read_tensor(Path(row.path))
            if row.shape is not None and list(found.shape) != list(row.shape):
                raise UnreadableTensorError(
                    Path(row.path),
                    f"holds a tensor of shape {list(found.shape)}, but the shape in its record is "
                    f"{list(row.shape)}",
                )
            return found

        try:
            if len(frame) == 1:
                return load(next(frame.itertuples()))
            return reassemble(frame.assign(data_rank=catalog.data_rank[tensor]), load)
        except UnreadableTensorError as error:
            raise NotShownError(f"{error.__class__.__name__}: {error.why}") from None
        except (ValueError, OSError, MemoryError) as error:
            raise NotShownError(str(error) or type(error).__name__) from None

    def view(self, catalog: Catalog, tensor: int) -> tuple[Tensor, MatrixView]:
        """Return a tensor as a matrix of tokens and channels, and the layout of this matrix."""
        whole = self.tensor(catalog, tensor)
        if not whole.numel():
            raise NotShownError("the tensor has no values")
        matrix = matrix_view_of(
            tuple(whole.shape),
            layer_type=catalog.field(tensor, "layer_type"),
            tensor_name=catalog.field(tensor, "tensor_name"),
            head_dim=self._head_dim(catalog, tensor),
        )
        return whole.reshape(matrix.outer * matrix.rows, matrix.columns), matrix

    def _head_dim(self, catalog: Catalog, tensor: int) -> int | None:
        rows = catalog.values_of_layers([tensor])
        shape = catalog.records.frame(rows)["shape"].iloc[0] if len(rows) else None
        return int(shape[-1]) if shape else None

    def quantized(self, catalog: Catalog, tensor: int, fmt: str, axis: str) -> Tensor:
        """Return a tensor as a matrix, as `view` does, quantized along an axis.

        Raises:
            NotShownError: if the tensor cannot be quantized.
        """
        key = ("quantized", int(catalog.ids[tensor]), int(catalog.stamps[tensor]), fmt, axis)

        def make() -> Tensor:
            table, matrix = self.view(catalog, tensor)
            return _quantized(table, matrix, fmt, axis)

        return self._tensors.get(key, make, _nbytes)

    def profiles(self, catalog: Catalog, tensor: int) -> tuple[Profile, Profile]:
        """Return the profiles of a tensor by channel and by token."""
        key = ("profiles", int(catalog.ids[tensor]), int(catalog.stamps[tensor]))
        return self._tensors.get(
            key, lambda: _profiles(self.view(catalog, tensor)[0]), lambda _: 1 << 16
        )

    def scales(self, catalog: Catalog, tensor: int, fmt: str) -> pd.DataFrame:
        """Return a table of a tensor's scales for blocks along rows; see `figures.scale_maps`."""
        table, matrix = self.view(catalog, tensor)
        if matrix.run % (get_format(fmt).block_size or 1):  # no block spans two heads
            table = table.reshape(-1, matrix.run)
        try:
            return scale_map(table, fmt, rows=240, blocks=240)
        except (ValueError, TypeError) as error:
            raise NotShownError(str(error)) from None

    def attention(
        self, catalog: Catalog, tensor: int, fmt: str, head: int, sequence: int
    ) -> Attention:
        """Return the attention of one head of the layer that a tensor belongs to.

        Raises:
            NotShownError: if the dump lacks the tensors needed to compute it.
        """
        found = _attention_tensors(catalog, tensor)
        if "query" in found and "key" in found:
            return self._recomputed(catalog, found, fmt, head, sequence)
        if "attention_probs" not in found:
            raise NotShownError(
                "neither query and key nor attention_probs of this pass were collected"
            )
        probs = self.tensor(catalog, found["attention_probs"])
        if probs.dim() < 3 or not probs.numel():
            raise NotShownError(f"attention_probs of shape {list(probs.shape)} have no heads")
        probs = probs.reshape(-1, *probs.shape[-3:])
        _check_scores(*probs.shape[-2:])
        sequence, head = min(sequence, len(probs) - 1), min(head, probs.shape[1] - 1)
        own = probs[sequence, head].float()
        change = None
        if fmt:
            change = fake_quantize(own, get_format(fmt).with_own_amax(), seed=SEED) - own
        how = f"P was collected; the change shows P in {fmt}, with blocks along the keys."
        card, module, iteration = _pass_of(catalog, found["attention_probs"])
        hidden = hidden_of_card(card, module, iteration, own[None])
        if hidden is None:
            how += " The mask is not known: probabilities of zero count as masked."
        visible = own > 0 if hidden is None else ~hidden
        return Attention(own, visible, change, how, probs.shape[1], len(probs))

    def _recomputed(
        self, catalog: Catalog, found: dict[str, int], fmt: str, head: int, sequence: int
    ) -> Attention:
        query, key = (self.tensor(catalog, found[name]) for name in ("query", "key"))
        if query.dim() != 4 or key.dim() != 4 or not query.numel() or not key.numel():
            shapes = f"{list(query.shape)} and {list(key.shape)}"
            raise NotShownError(f"query and key of shapes {shapes} are not operands of attention")
        length, sequences, heads, _ = query.shape
        _check_scores(length, len(key))
        sequence, head = min(sequence, sequences - 1), min(head, heads - 1)
        group = head * key.shape[2] // heads
        card, module, iteration = _pass_of(catalog, found["query"])
        try:
            softmax = softmax_of_card(card, module, iteration) or Softmax()

            def attend(q: Tensor, k: Tensor) -> Tensor:
                q, k = q[:, sequence, head], k[:, sequence, group]
                return recomputed(q[:, None, None], k[:, None, None], softmax)[0, 0].float()

            exact = attend(query, key)
            # The probability of a visible key may underflow to zero. If all scores are equal, only
            # masked keys have a probability of zero.
            visible = attend(torch.zeros_like(query), torch.zeros_like(key)) > 0
            change = None
            if fmt:
                rounded = [
                    self.quantized(catalog, found[name], fmt, "row").reshape(whole.shape)
                    for name, whole in (("query", query), ("key", key))
                ]
                change = attend(rounded[0], rounded[1]) - exact
        except (NotCheckedError, NothingToDrawError, RuntimeError, ValueError) as error:
            raise NotShownError(str(error)) from None
        how = f"P was recomputed; the change shows Q and K in {fmt}, with blocks along d."
        return Attention(exact, visible, change, how, heads, sequences)


def _pass_of(catalog: Catalog, tensor: int) -> tuple[Mapping[str, Any], str, int]:
    """Return the run card, the module and the iteration of a tensor."""
    run_id, module = (catalog.field(tensor, name) for name in ("run_id", "module"))
    card = catalog.cards.get(run_id or "", {})
    return card, str(module), int(catalog.iteration[tensor])


def _check_scores(queries: int, keys: int) -> None:
    if queries * keys > MOST_SCORES:
        raise NotShownError(
            f"{queries:,} x {keys:,} scores are too many; at most 8,192 x 8,192 are shown"
        )


def _attention_tensors(catalog: Catalog, tensor: int) -> dict[str, int]:
    """Return the tensors that determine the attention in the pass of a tensor, by name."""
    if catalog.field(tensor, "layer_type") != "attention":
        raise NotShownError("the tensor does not belong to an attention layer")
    column = catalog.records.texts["tensor_name"]
    modules = catalog.records.texts["module"].codes[catalog.rows]
    mask = modules == modules[tensor]
    for name in ("run", "iteration", "micro_batch", "data_rank"):
        values = getattr(catalog, name)
        mask &= values == values[tensor]
    found: dict[str, int] = {}
    for other in np.flatnonzero(mask):
        name = column.distinct[column.codes[catalog.rows[other]]]
        if name in ("query", "key", "attention_probs"):
            found.setdefault(str(name), int(other))
    return found


def _quantized(table: Tensor, matrix: MatrixView, fmt: str, axis: str) -> Tensor:
    """Quantize a matrix along an axis, as for a GEMM that sums along this axis."""
    if table.numel() > MOST_VALUES:
        raise NotShownError(f"{table.numel():,} values are too many to be quantized here")
    if table.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotShownError(f"{table.dtype} values are not quantized")
    known = get_format(fmt).with_own_amax()
    try:
        if axis == "column":
            stacked = table.reshape(matrix.outer, matrix.rows, matrix.columns)
            result = fake_quantize(stacked, known, axis=1, seed=SEED)
        else:
            runs = table.reshape(matrix.outer, matrix.rows, -1, matrix.run)
            runs = runs.transpose(1, 2) if known.height > 1 else runs
            result = fake_quantize(runs, known, axis=-1, seed=SEED)
            result = result.transpose(1, 2) if known.height > 1 else result
    except (ValueError, TypeError, RuntimeError) as error:
        raise NotShownError(f"{fmt} cannot be applied ({error})") from None
    return result.reshape(table.shape)


def _profiles(table: Tensor) -> tuple[Profile, Profile]:
    rows, columns = table.shape
    if max(rows, columns) > MOST_PLACES:
        raise NotShownError(f"{max(rows, columns):,} tokens or channels are too many")
    by_row = np.zeros((2, rows), np.float32)
    amax, squares = torch.zeros(columns), torch.zeros(columns, dtype=torch.float64)
    step = max((1 << 22) // max(columns, 1), 1)
    for first in range(0, rows, step):
        part = torch.nan_to_num(table[first : first + step].float(), nan=0.0)
        magnitude = part.abs()
        torch.maximum(amax, magnitude.amax(0), out=amax)
        squared = part.square_()
        squares += squared.sum(0, dtype=torch.float64)
        by_row[0, first : first + step] = magnitude.amax(1).numpy()
        by_row[1, first : first + step] = squared.mean(1).sqrt().numpy()
    channels = Profile(amax.numpy(), (squares / rows).sqrt().float().numpy())
    return channels, Profile(by_row[0], by_row[1])


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@functools.lru_cache(maxsize=32)
def codes_in_order(fmt: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return a format's element codes, sorted by the numbers they stand for, and these numbers.

    Codes of NaN and infinity are left out.
    """
    element = get_format(fmt).element
    if getattr(element, "is_cast", False):
        return np.zeros(0, np.int64), np.zeros(0)
    values = code_values(element).double().numpy()
    codes = np.flatnonzero(np.isfinite(values))
    order = np.lexsort((~np.signbit(values[codes]), values[codes]))
    return codes[order], values[codes][order]


def head_numbers(attention: Attention) -> dict[str, float]:
    """Return the mean entropy of a head's queries in bits, and the errors if a format is given.

    The errors are the SQNR of the probabilities in dB and their largest change.
    """
    p = attention.probabilities.double()
    entropy = -torch.where(p > 0, p * torch.log2(p.clamp(min=1e-300)), 0.0).sum(-1).mean()
    numbers = {"entropy": float(entropy)}
    if attention.change is not None:
        error = attention.change.double()
        numbers["sqnr"] = decibels(float(p.square().sum()), float(error.square().sum()))
        numbers["largest"] = float(error.abs().max())
    return numbers
