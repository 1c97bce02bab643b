"""Compute every statistic by its definition, with numpy in float64 and loops over blocks.

Quantized values come from `fake_quantize`, codes and scales from `quantize`, which have tests and
oracles of their own.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from megatron.analysis.stats.matrix_view import MatrixView
from megatron.fake_quant import fake_quantize, get_format, quantize
from megatron.fake_quant.code_points import unpack_nibbles
from megatron.fake_quant.elements import Cast
from megatron.fake_quant.special_scalings import GroupScaling

HIFLOAT8_OVERFLOW = 40960.0
#: Overflow threshold of each element, and True if the threshold itself rounds up.
EDGES = {
    "e4m3": (464.0, False),
    "e5m2": (61440.0, True),
    "e2m3": (7.75, True),
    "e2m1": (7.0, True),
    "int8": (255 / 128, True),
    "e3m4": (31.5, True),
}


def view(x: torch.Tensor, matrix: MatrixView, axis: str) -> tuple[torch.Tensor, int]:
    """Return the tensor in the shape in which it is quantized, and the dimension of its blocks."""
    shape = (matrix.outer, matrix.rows, matrix.columns)
    if axis == "column":
        return x.reshape(shape), 1
    return x.reshape(*shape[:2], -1, matrix.run).transpose(1, 2), -1


def quantized(x: torch.Tensor, matrix: MatrixView, name: str, axis: str) -> torch.Tensor:
    """Return the quantized values, in the order in which `view` returns the values."""
    seen, dim = view(x, matrix, axis)
    return fake_quantize(seen.contiguous(), name, dim)


def errors(x: torch.Tensor, matrix: MatrixView, name: str, axis: str) -> dict[str, float]:
    """Return the statistics of a format that are computed from values and quantized values."""
    a = view(x, matrix, axis)[0].double().flatten().numpy()
    b = quantized(x, matrix, name, axis).double().flatten().numpy()
    both = np.isfinite(a) & np.isfinite(b)
    poisoned = int((np.isfinite(a) & np.isnan(b)).sum())
    x_, y = a[both], b[both]
    error, nonzero = y - x_, x_ != 0
    signal, noise = (x_**2).sum(), (error**2).sum()
    norms = math.sqrt(signal) * math.sqrt((y**2).sum())
    return {
        "compared": len(x_),
        "nonzero": int(nonzero.sum()),
        "poisoned": poisoned,
        "mse": _mean(error**2),
        "rmse": math.sqrt(_mean(error**2)) if len(x_) else math.nan,
        "sqnr_db": _decibels(signal, noise) if nonzero.any() else math.nan,
        "cosine": (x_ * y).sum() / norms if norms else math.nan,
        "bias": _mean(error),
        "relative_bias": error.sum() / np.abs(x_).sum() if nonzero.any() else math.nan,
        "gain": (x_ * error).sum() / signal if signal else math.nan,
        "relative_error": _mean(np.abs(error[nonzero]) / np.abs(x_[nonzero])),
        "max_error": float(np.abs(error).max()) if len(x_) else math.nan,
        "underflow": _mean((y == 0)[nonzero].astype(float)),
        **_clipping(x, matrix, name, axis),
    }


def _clipping(x: torch.Tensor, matrix: MatrixView, name: str, axis: str) -> dict[str, float]:
    """Return `saturated` and the error by cause, except for HiFloat4 with its three scales."""
    if isinstance(get_format(name).scaling, GroupScaling):
        return {}
    a = view(x, matrix, axis)[0].double().flatten().numpy()
    b = quantized(x, matrix, name, axis).double().flatten().numpy()
    clipped = beyond(x, matrix, name, axis) > 0
    both = np.isfinite(a) & np.isfinite(b)
    squared, zero = np.square(b[both] - a[both]), b[both] == 0
    total = squared.sum()
    causes = {
        "clipping_error": clipped[both] & ~zero,
        "underflow_error": zero,
        "grid_error": ~clipped[both] & ~zero,
    }
    shares = {name: squared[of].sum() / total if total else math.nan for name, of in causes.items()}
    return shares | {"saturated": _mean(clipped[np.isfinite(a) & ~np.isnan(b)].astype(float))}


def beyond(x: torch.Tensor, matrix: MatrixView, name: str, axis: str) -> np.ndarray:
    """Return 1 for values that would round to more than the largest number, else 0."""
    fmt = get_format(name)
    seen, dim = view(x, matrix, axis)
    magnitude = seen.abs().double()
    if isinstance(fmt.element, Cast):
        found = magnitude.isfinite() & ~quantized(x, matrix, name, axis).isfinite()
    elif fmt.block_size is not None:
        rows, packed, size = magnitude.movedim(dim, -1), quantize(seen, fmt, dim), fmt.block_size
        bytes_ = packed.scales.block()
        bytes_ = bytes_ if bytes_.dim() == rows.dim() else bytes_[..., 0]
        values = torch.tensor([scale_value(byte, name) for byte in range(256)]).double()
        decode = float(packed.scales.whole()) if fmt.has_tensor_scale else 1.0
        scales = values[bytes_.long()].repeat_interleave(size, -1)[..., : rows.shape[-1]]
        scaled = rows / scales
        if fmt.has_tensor_scale:  # in float32, as the format prescribes
            multiplier = ((scales * decode).float()).reciprocal()
            scaled = (rows.float() * multiplier).double()
        edge, goes_up = EDGES[fmt.element.name]
        found = (scaled >= edge if goes_up else scaled > edge) & (scales > 0)
        found = found.movedim(-1, dim)
    elif fmt.scaling is not None:  # one scale maps the tensor's amax to the largest number
        found = torch.zeros(seen.shape, dtype=torch.bool)
    else:
        found = magnitude >= HIFLOAT8_OVERFLOW
    return found.flatten().numpy().astype(float)


def disagreement(x: torch.Tensor, matrix: MatrixView, name: str, axis: str) -> tuple[float, float]:
    """Return `axis_disagreement` and `axis_sqnr_db`.

    The signal is the power of the values whose results along `axis` are finite.
    """
    row = quantized(x, matrix, name, "row").transpose(1, 2).reshape(-1).double().numpy()
    column = quantized(x, matrix, name, "column").reshape(-1).double().numpy()
    a = x.double().flatten().numpy()
    finite = np.isfinite(a)
    row, column, a = row[finite], column[finite], a[finite]
    same = (row == column) | (np.isnan(row) & np.isnan(column))
    both = np.isfinite(row) & np.isfinite(column)
    compared = np.isfinite(row if axis == "row" else column)
    noise = ((row - column)[both] ** 2).sum()
    return float((~same).mean()), _decibels((a[compared] ** 2).sum(), noise)


def codes(x: torch.Tensor, matrix: MatrixView, name: str, axis: str) -> np.ndarray:
    """Return how often each code occurs, for values that stay finite in the format."""
    fmt = get_format(name)
    assert not isinstance(fmt.element, Cast)
    seen, dim = view(x, matrix, axis)
    packed = quantize(seen.contiguous(), fmt, dim)
    found = packed.codes
    if fmt.element.bits <= 4:
        found = unpack_nibbles(found, seen.shape[dim])
    found = found.movedim(-1, dim).flatten().numpy()
    both = seen.isfinite() & quantized(x, matrix, name, axis).isfinite()
    return np.bincount(found[both.flatten().numpy()], minlength=1 << fmt.element.bits)


def blocks(x: torch.Tensor, matrix: MatrixView, name: str, axis: str) -> dict[str, object]:
    """Return the statistics of the blocks of a tensor, computed block by block."""
    fmt = get_format(name)
    seen, dim = view(x, matrix, axis)
    packed = quantize(seen.contiguous(), fmt, dim)
    stored = packed.scales.block()
    bytes_ = stored.flatten() if stored.dim() == seen.dim() else stored[..., 0].flatten()
    rows = seen.movedim(dim, -1).double()
    size = fmt.block_size
    assert size is not None
    ranges, zero, nan, rooms = [], 0, 0, []
    top = float(getattr(fmt.element, "max", math.nan))
    decode = float(packed.scales.whole()) if fmt.has_tensor_scale else 1.0
    flat = rows.reshape(-1, rows.shape[-1])
    per_row = -(-flat.shape[1] // size)
    for r, row in enumerate(flat.tolist()):
        for place in range(per_row):
            block = [abs(v) for v in row[place * size : (place + 1) * size]]
            if any(not math.isfinite(v) for v in block):
                nan += 1
            elif not any(block):
                zero += 1
            else:
                largest, smallest = max(block), min(v for v in block if v)
                ranges.append(math.frexp(largest)[1] - math.frexp(smallest)[1])
                scale = scale_value(int(bytes_[r * per_row + place]), name) * decode
                rooms.append(math.log2(top * scale / largest) if scale else -278.0)
    return {
        "blocks": len(flat) * per_row,
        "zero_blocks": zero,
        "nan_blocks": nan,
        "block_range": float(np.mean(ranges)) if ranges else math.nan,
        "block_range_max": max(ranges) if ranges else math.nan,
        "headroom": float(np.mean(rooms)) if rooms else math.nan,
        "scales": np.bincount(bytes_.numpy(), minlength=256),
    }


def scale_value(byte: int, name: str) -> float:
    """Return the scale of a byte by definition: E8M0, or E4M3 for nvfp4."""
    if name != "nvfp4":
        return math.ldexp(1, byte - 127)
    field, mantissa = divmod(byte, 8)
    return math.ldexp(mantissa + (8 if field else 0), max(field, 1) - 10)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _decibels(signal: float, noise: float) -> float:
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
