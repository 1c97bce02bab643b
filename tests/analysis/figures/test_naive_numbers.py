"""Test that figures show the numbers that a naive computation obtains from the files.

The computation reads the `.pt` files with torch and works in float64. It uses nothing of the
analysis or of `fake_quant`: formats, blocks and axes are implemented here a second time.
"""

from __future__ import annotations

from typing import NamedTuple

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.collections import PathCollection, QuadMesh
from matplotlib.patches import StepPatch

from megatron.analysis import figures
from tests.analysis.fake_dump import write_two_types

#: Magnitudes of the elements by code, and the exponent of the largest one.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)[:-1]
ELEMENTS = {"mxfp4": (E2M1, 2), "mxfp8": (E4M3, 8)}
BLOCK = 32
#: Axis along which blocks run in the first matmul of each operand.
AXIS = {
    **{("linear", name): -1 for name in ("input", "weight", "grad_output")},
    **{("attention", name): -1 for name in ("query", "key", "grad_output", "attention_probs")},
    ("attention", "value"): 0,
}
PARTS = {"self_attention.linear_qkv": "qkv", "self_attention.core_attention": "core"}


class File(NamedTuple):
    """Values and metadata of one file."""

    run: str
    type: str
    iteration: int
    layer: int
    place: str
    name: str
    kind: str
    axis: int | None  #: None for a tensor that no matmul takes
    values: np.ndarray

    @property
    def nonzero(self) -> np.ndarray:
        magnitudes = np.abs(self.values)
        return magnitudes[magnitudes > 0]


def read(path) -> File:
    content = torch.load(path, weights_only=True)
    about = content["metadata"]
    name, operation = about["tensor_name"], about["operation"]
    kind = "weight" if name == "weight" else "gradient" if operation == "backward" else "forward"
    place = f"{PARTS[about['module'].split('.', 3)[3]]} {name}"
    axis = AXIS.get((about["layer_type"], name))
    values = content["tensor"].double().numpy()
    head = (about["run_id"], about["quant_type"], about["iteration"], about["layer_idx"])
    if place == "core grad_output":  # its last dimension holds two heads of 32 values
        values = values.reshape(*values.shape[:-1], -1, 32)
    return File(*head, place, name, kind, axis, values)


class Quantized(NamedTuple):
    """Results of quantization: one entry per value, in blocks."""

    values: np.ndarray
    results: np.ndarray
    codes: np.ndarray
    clipped: np.ndarray


def quantize(x: np.ndarray, axis: int, name: str) -> Quantized:
    """Round each value to the nearest element times the scale of its block of 32 values."""
    grid, top = ELEMENTS[name]
    blocks = np.moveaxis(x, axis, -1).reshape(-1, BLOCK)
    amax = np.abs(blocks).max(1, keepdims=True)
    exponents = np.floor(np.log2(np.where(amax > 0, amax, 1.0))) - top
    scale = 2.0 ** np.where(amax > 0, exponents, -127.0)
    scaled = np.abs(blocks) / scale
    distances = np.abs(scaled[..., None] - grid)
    nearest = distances.min(-1, keepdims=True)
    codes = np.where(distances == nearest, np.arange(len(grid)), 999)
    # a tie goes to the even code
    code = np.where(codes % 2 == 0, codes, codes + 500).min(-1)
    code = np.where(code >= 500, code - 500, code)
    edge = grid[-1] + (grid[-1] - grid[-2]) / 2
    odd = len(grid) % 2 == 0  # the largest code is odd, so that a tie overflows
    clipped = scaled >= edge if odd else scaled > edge
    sign = np.where(np.signbit(blocks), -1.0, 1.0)
    return Quantized(blocks, sign * grid[code] * scale, code, clipped)


def decibels(x: Quantized) -> float:
    return 10 * np.log10((x.values**2).sum() / ((x.results - x.values) ** 2).sum())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    write_two_types(folder)
    return folder


@pytest.fixture(scope="module")
def files(folder) -> list[File]:
    return [read(path) for path in sorted(folder.rglob("*.pt"))]


@pytest.fixture(scope="module")
def rounded(files) -> dict[tuple[str, int], Quantized]:
    """Return the quantized operands by format and file number."""
    return {
        (name, i): quantize(file.values, file.axis, name)
        for name in ELEMENTS
        for i, file in enumerate(files)
        if file.axis is not None
    }


@pytest.fixture(scope="module")
def data(folder):
    return figures.load(folder, formats=[*ELEMENTS])


@pytest.fixture
def axes(data):
    """Return a function that draws a figure and returns its axes."""
    drawn = []

    def draw(name):
        drawn.append(figures.figure(data, name))
        return drawn[-1].axes

    yield draw
    for figure in drawn:
        plt.close(figure)


def by(files, key, numbers, reduce=np.median) -> dict:
    """Return the reduced numbers of all files with the same key; None leaves a file out."""
    groups: dict = {}
    for file, number in zip(files, numbers, strict=True):
        if number is not None:
            groups.setdefault(key(file), []).append(number)
    return {name: reduce(values) for name, values in groups.items()}


def of_operands(files, rounded, name, number) -> list:
    """Return one number per operand in a format; None for other tensors."""
    return [None if file.axis is None else number(rounded[name, i]) for i, file in enumerate(files)]


def cells_of(ax) -> dict:
    """Return the colored values of a heat map by layer and column."""
    [mesh] = [each for each in ax.collections if isinstance(each, QuadMesh)]
    shown = mesh.get_array()
    rows, columns = (
        [t.get_text() for t in labels] for labels in (ax.get_yticklabels(), ax.get_xticklabels())
    )
    return {
        (int(rows[i][1:]), columns[j].removesuffix(" (result)")): float(shown[i, j])
        for i in range(len(rows))
        for j in range(len(columns))
        if shown[i, j] is not np.ma.masked
    }


def dots_of(ax) -> dict:
    """Return the x position of each dot, by the labels of its legend entry and its row."""
    rows, ticks = (
        {tick: text.get_text() for tick, text in zip(at, labels, strict=True)}
        for at, labels in (
            (ax.get_yticks(), ax.get_yticklabels()),
            (ax.get_xticks(), ax.get_xticklabels()),
        )
    )
    # on a logarithmic axis, the tick "0" stands for zero
    zeros = {tick for tick, text in ticks.items() if text == "0"}
    return {
        (dots.get_label(), rows[round(y)]): 0.0 if x in zeros else float(x)
        for dots in ax.collections
        if isinstance(dots, PathCollection)
        for x, y in dots.get_offsets()
    }


def assert_equal(found: dict, expected: dict, rel: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=rel), key


def test_sqnr_heat_map(axes, files, rounded):
    for name in ELEMENTS:
        found = cells_of(axes(f"heatmaps/sqnr_{name}")[0])
        numbers = of_operands(files, rounded, name, decibels)
        assert_equal(found, by(files, lambda f: (f.layer, f.place), numbers))


def test_kurtosis_heat_map(axes, files):
    def kurtosis(x):
        return ((x - x.mean()) ** 4).mean() / ((x - x.mean()) ** 2).mean() ** 2

    found = cells_of(axes("heatmaps/kurtosis")[0])
    numbers = [kurtosis(file.values) for file in files]
    assert_equal(found, by(files, lambda f: (f.layer, f.place), numbers))


@pytest.mark.parametrize(
    ("figure", "number"),
    [
        ("quantization_analysis/sqnr_by_tensor", decibels),
        (
            "quantization_analysis/bias",
            lambda q: (q.results - q.values).sum() / np.abs(q.values).sum(),
        ),
        (
            "overflow_analysis/underflow",
            lambda q: ((q.values != 0) & (q.results == 0)).sum() / (q.values != 0).sum(),
        ),
        ("overflow_analysis/saturation", lambda q: q.clipped.mean()),
    ],
)
def test_formats_compared_by_tensor(axes, files, rounded, figure, number):
    expected = {}
    for name in ELEMENTS:
        medians = by(files, lambda f: f.place, of_operands(files, rounded, name, number))
        expected |= {(name, place): value for place, value in medians.items()}
    assert_equal(dots_of(axes(figure)[0]), expected)


def test_causes_of_the_error(axes, files, rounded):
    def shares(q: Quantized) -> np.ndarray:
        squares = (q.results - q.values) ** 2
        lost = (q.values != 0) & (q.results == 0)
        parts = [squares[~lost & ~q.clipped], squares[lost], squares[~lost & q.clipped]]
        return np.array([part.sum() for part in parts]) / squares.sum()

    def mean(values):
        return np.mean(values, axis=0)

    panels = axes("overflow_analysis/error_causes")
    names = [text.get_text() for text in panels[0].get_yticklabels()]
    for name, ax in zip(ELEMENTS, panels, strict=False):
        assert ax.get_title(loc="left").startswith(name)
        expected = by(files, lambda f: f.place, of_operands(files, rounded, name, shares), mean)
        widths = np.array([[bar.get_width() for bar in bars] for bars in ax.containers]).T
        assert_equal(dict(zip(names, widths.tolist(), strict=True)), expected)


def test_code_usage(axes, files, rounded):
    for name, ax in zip(ELEMENTS, axes("block_analysis/code_usage"), strict=False):
        grid, _ = ELEMENTS[name]
        counts = np.zeros((2, len(grid)))
        for q in (rounded[name, i] for i, file in enumerate(files) if file.axis is not None):
            for sign in (0, 1):
                own = q.codes[np.signbit(q.values) == bool(sign)]
                counts[sign] += np.bincount(own.ravel(), minlength=len(grid))
        expected = np.concatenate([counts[1][::-1], counts[0]]) / counts.sum()
        outline = [patch for patch in ax.patches if isinstance(patch, StepPatch)]
        found = outline[0].get_data().values if outline else [p.get_height() for p in ax.patches]
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_scale_of_each_tensor(axes, files):
    ax = axes("statistics/scales")[0]
    names = [text.get_text().removesuffix(" (result)") for text in ax.get_yticklabels()]
    lines = [line.get_xdata() for line in ax.get_lines()]
    found = {
        name: 2.0 ** np.array([*line, *dot])
        for name, line, dot in zip(names, lines[::2], lines[1::2], strict=True)
    }

    def numbers(x):
        magnitudes = np.sort(np.abs(x.ravel()))
        one_percent = magnitudes[int(np.ceil(0.01 * x.size)) - 1]
        return [one_percent, magnitudes[-1], np.sqrt((x**2).mean())]

    def medians(values):
        return np.median(values, axis=0)

    expected = by(files, lambda f: f.place, [numbers(file.values) for file in files], medians)
    probs = expected["core attention_probs"]
    assert probs[0] == 0
    probs[0] = probs[2]  # the line of a row without a positive quantile begins at the rms
    assert_equal(found, expected)


def test_values_by_magnitude(axes, files):
    panels = axes("distributions/exponents")
    for kind, ax in zip(("forward", "weight", "gradient"), panels, strict=False):
        own = [file for file in files if file.kind == kind and file.axis is not None]
        binades = [np.floor(np.log2(file.nonzero)) for file in own]
        names = {file.name for file in own}
        found = {}
        for patch in ax.patches:
            if isinstance(patch, StepPatch):
                shares, edges, _ = patch.get_data()
                found[patch.get_label()] = dict(zip(edges[:-1].astype(int), shares, strict=True))
        assert found.keys() == names
        for name in names:
            parts = [b for file, b in zip(own, binades, strict=True) if file.name == name]
            values, counts = np.unique(np.concatenate(parts), return_counts=True)
            shares = dict(zip(values.astype(int), counts / counts.sum(), strict=True))
            shown = {e: share for e, share in found[name].items() if share}
            assert shown == pytest.approx({e: shares[e] for e in shown})
            assert sum(shown.values()) > 1 - 2e-3, "only the smallest values are left out"


def test_gradients_by_layer(axes, files):
    gradients = [file for file in files if file.kind == "gradient"]
    x = [file.values for file in gradients]
    centered = [each - each.mean() for each in x]
    panels = {
        "root mean square": [np.sqrt((each**2).mean()) for each in x],
        "largest magnitude": [np.abs(each).max() for each in x],
        "kurtosis": [(c**4).mean() / (c**2).mean() ** 2 for c in centered],
    }
    drawn = axes("gradients/by_layer")
    for (label, numbers), ax in zip(panels.items(), drawn, strict=False):
        assert ax.get_ylabel() == label
        found = {
            (line.get_label(), int(layer)): float(y)
            for line in ax.get_lines()
            for layer, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
        }
        assert_equal(found, by(gradients, lambda f: (f.name, f.layer), numbers))


def test_deviation_of_a_run_from_the_run_without_quantization(axes, files):
    last = [file for file in files if file.iteration == 2]
    base = {(f.layer, f.place): f.values for f in last if f.type == "bf16"}
    others = [file for file in last if file.type == "mxfp8"]
    numbers = []
    for file in others:
        x0 = base[file.layer, file.place]
        numbers.append(np.linalg.norm(file.values - x0) / np.linalg.norm(x0))
    expected = by(others, lambda f: (f.kind, f.layer), numbers)
    found, kinds = {}, ("forward", "weight", "gradient")
    for kind, ax in zip(kinds, axes("comparisons/deviation"), strict=False):
        [line] = ax.get_lines()
        assert line.get_label() == "mxfp8"
        for layer, y in zip(line.get_xdata(), line.get_ydata(), strict=True):
            found[kind, int(layer)] = float(y)
    assert_equal(found, expected)


def test_relative_error_by_magnitude(axes, files, rounded):
    panels = axes("quantization_analysis/error_by_magnitude")
    for kind, ax in zip(("forward", "weight", "gradient"), panels, strict=False):
        chosen = [i for i, f in enumerate(files) if f.kind == kind and f.axis is not None]
        for line in ax.get_lines():
            name = line.get_label()
            if name not in ELEMENTS:
                continue
            parts = [rounded[name, i] for i in chosen]
            x = np.concatenate([q.values.ravel() for q in parts])
            y = np.concatenate([q.results.ravel() for q in parts])[x != 0]
            x = x[x != 0]
            binade, error = np.floor(np.log2(np.abs(x))), np.abs(y - x) / np.abs(x)
            for exponent, shown in zip(line.get_xdata(), line.get_ydata(), strict=True):
                expected = error[binade == np.floor(exponent)].mean()
                assert shown == pytest.approx(expected, rel=1e-6), (kind, name, exponent)


def test_attention_compared_with_uniform_attention(axes, files):
    [probs] = [f for f in files if f.name == "attention_probs" and f.type == "mxfp8"]
    images = [
        ax.images[0] for ax in axes(f"attention_maps/probabilities_L{probs.layer}") if ax.images
    ]
    assert len(images) == probs.values.shape[1]
    for head, image in enumerate(images):
        p = probs.values[0, head]
        ratio = p * (p > 0).sum(1, keepdims=True)
        shown = image.get_array()
        assert (shown.mask == (p == 0)).all()
        np.testing.assert_allclose(shown.compressed(), np.clip(ratio[p > 0], 1 / 32, 32), rtol=1e-6)
