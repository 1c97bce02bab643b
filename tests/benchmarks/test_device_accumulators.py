"""Test benchmarks/device_accumulators.py with simulated matmuls in place of those of a GPU."""

import re
import sys

import pytest
import torch

from megatron.fake_quant.accumulate import accumulated_matmul, get_accumulator
from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import device_accumulators as benchmark

sys.path.remove(str(REPO / "benchmarks"))

E4M3, E5M2, BF16, FP16 = benchmark.NAMES


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(benchmark, "ROWS", 64)


def operation(unit: str, types=(E4M3, E4M3), *, described_by: str | None = None, parts: int = 1):
    """Return an operation of a device that sums as `unit`, if split in parts along K."""
    elements = (benchmark.NAMES[types[0]], benchmark.NAMES[types[1]])

    def multiply(a, b):
        pieces = zip(a.float().chunk(parts, 1), b.float().chunk(parts, 1), strict=True)
        return sum(accumulated_matmul(x, y, unit, elements=elements) for x, y in pieces)

    return benchmark.Operation("device", described_by or unit, types, multiply, device="cpu")


def make_pair(kind: str, types=(E4M3, E4M3), depth: int = 64):
    generator = torch.Generator().manual_seed(1)
    a, b = benchmark.make_pair(kind, (64, 48, depth), types, generator=generator)
    assert (a.shape, b.shape) == ((64, depth), (48, depth))
    assert (a.dtype, b.dtype) == types
    return a.double(), b.double()


@pytest.mark.parametrize(
    ("unit", "types", "probed"),
    [
        ("hopper_fp8", (E4M3, E4M3), ["32", "13", "13", "never"]),
        ("hopper_fp8_promote128", (E4M3, E4M3), ["32", "13", "13", "128"]),
        ("ada_fp8", (E5M2, E5M2), ["16", "13", "13", "never"]),
        ("hopper_bf16", (BF16, BF16), ["16", "25", "23"]),
        ("hopper_bf16", (FP16, FP16), ["16", "25", "23"]),
        ("ampere_bf16", (BF16, BF16), ["8", "24", "23"]),
        ("blackwell_fp8", (E4M3, E4M3), ["32", "25", "23"]),
        ("fda:l16:f15:m12:rz:p48", (E4M3, E4M3), ["16", "15", "12", "48"]),
    ],
)
def test_the_parameters_of_a_unit_follow_from_its_results(unit, types, probed):
    # The probes see only the results: the described accumulator has other parameters.
    device = operation(unit, types, described_by="fda:l2:f9:m7:rz:p4")
    rows = benchmark.probe(device, (256,))
    assert [row[-2] for row in rows] == probed
    assert [row[-1] for row in rows] == ["2", "9", "7", "4"][: len(probed)]
    for row in benchmark.probe(operation(unit, types), (256,)):
        assert row[-2] == row[-1], row


@pytest.mark.parametrize(
    ("survives", "text"),
    [
        ([False, False], "never"),
        ([False, False, True, True], "2"),
        ([False, True, False, True, False], "1, but 2 later positions are lost"),
    ],
)
def test_the_first_surviving_position_is_described(survives, text):
    assert benchmark.describe_first(survives) == text


@pytest.mark.parametrize("kind", benchmark.KINDS)
@pytest.mark.parametrize("types", [*benchmark.FP8_PAIRS, *benchmark.HALF_PAIRS])
@pytest.mark.parametrize("depth", [16, 96])
def test_a_device_that_sums_as_described_does_not_differ(kind, types, depth):
    unit = "hopper_fp8" if types[0].itemsize == 1 else "hopper_bf16"
    generator = torch.Generator().manual_seed(1)
    shapes = [(32, 48, depth)]
    differing, row = benchmark.compare(operation(unit, types), kind, shapes, generator=generator)
    assert (differing, row[-1]) == (0, "0")
    assert row[3:-1] == [kind, "32 x 48", str(depth), "1,536"]


def test_kinds_of_data():
    a, b = make_pair("normal")
    assert a.abs().max() == b.abs().max() == 448
    a, _ = make_pair("wide", (BF16, BF16))
    magnitudes = a[a != 0].abs().log2()
    assert magnitudes.max() - magnitudes.min() > 24
    a, b = make_pair("positive")
    assert a.min() >= 0
    assert b.min() >= 0
    a, b = make_pair("canceling", (BF16, BF16))
    assert 0 < (a @ b.t()).abs().max() < (a.abs() @ b.abs().t()).min() / 8
    for types in (*benchmark.FP8_PAIRS, *benchmark.HALF_PAIRS):
        a, b = make_pair("subnormal", types)
        smallest = torch.finfo(types[0]).smallest_normal
        assert ((a != 0) & (a.abs() < smallest)).double().mean() > 0.3
        assert b.abs().max() < (
            9 if types[1] == BF16 else 8 * torch.finfo(types[1]).smallest_normal
        )
    a, b = make_pair("special", (E4M3, E5M2))
    assert a.isnan().any()
    assert not a.isinf().any()
    assert {torch.inf, -torch.inf, 57344.0, 0.0} <= {*b.flatten().tolist()}


def test_differing_bits_are_counted_and_compared_with_a_split_sum():
    x = torch.tensor([0.0, 1.0, torch.nan, torch.inf])
    y = torch.tensor([-0.0, 1.0, -torch.nan, torch.inf])
    assert benchmark.count_differing(x, y) == 1
    device = operation("hopper_bf16", (BF16, BF16), parts=4)
    generator = torch.Generator().manual_seed(1)
    shapes = [(32, 32, 16), (32, 32, 512)]
    differing, row = benchmark.compare(device, "normal", shapes, generator=generator)
    assert differing > 100
    assert row[-1].startswith(f"{differing:,}; K = ")
    assert re.search(r"; K = 512: \d+, and 0 from a sum in 4 parts$", row[-1])


@pytest.mark.parametrize(("unit", "agrees"), [("hopper_fp8", True), ("blackwell_fp8", False)])
def test_page_of_a_quick_run(unit, agrees, monkeypatch, tmp_path, capsys):
    small = {"small_shapes": ((16, 16, 256),), "size": 32, "timed": ("hopper_fp8", "blackwell_mx")}
    operations = [operation(unit, pair, described_by="hopper_fp8") for pair in benchmark.FP8_PAIRS]
    monkeypatch.setattr(benchmark, "QUICK", benchmark.QUICK | small)
    monkeypatch.setattr(benchmark, "milliseconds", lambda call, repeats: call().shape[0] / repeats)
    monkeypatch.setattr(benchmark, "refusal", lambda: None)
    monkeypatch.setattr(benchmark, "operations_of", {(9, 0): operations}.get)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    path = tmp_path / "page.md"
    assert benchmark.main(["--quick", "--output", str(path)]) == (0 if agrees else 1)
    page = path.read_text()
    assert page in capsys.readouterr().out
    assert "\n\nH100 (compute capability 9.0), torch " in page
    lines = page.splitlines()
    headings = [line for line in lines if line.startswith("## ")]
    assert headings == ["## Bits", "## Probes", "## Speed"]
    differing = 0 if agrees else 3
    assert f"16 x 16 results with K = 256, results of {differing} of the 3 pairs" in page
    bits = [line for line in lines if " | normal | 64 x 64 | 32, 256 | 8,192 | " in line]
    assert [line.endswith(" | 0 |") for line in bits] == [agrees] * 3
    assert "| products per step | 32 | 32 |" in page
    assert ("| fractional bits of a term | 13 | 13 |" in page) is agrees
    assert "| torch.matmul, float32 | 10.7 | 1 | 1 |" in page
    assert "| blackwell_mx | 10.7 | 1 | 1 |" in page


def test_operations_of_a_gpu():
    hopper = [one.labels() for one in benchmark.operations_of((9, 0))]
    assert [labels[1] for labels in hopper] == [
        *["hopper_fp8"] * 3,
        *["hopper_fp8_promote128"] * 3,
        *["hopper_bf16"] * 2,
    ]
    assert hopper[1] == ["_scaled_mm, use_fast_accum=True", "hopper_fp8", "e4m3 x e5m2"]
    assert [one.accumulator for one in benchmark.operations_of((8, 0))] == ["ampere_bf16"] * 2


def test_a_cpu_takes_the_arguments_of_scaled_mm():
    a, b = torch.eye(16, 32).to(E4M3), torch.ones(16, 32).to(E5M2)
    assert benchmark.scaled_mm(a, b, fast=False).tolist() == [[1.0] * 16] * 16


def test_every_named_unit_exists():
    assert {"hopper_fp8", "blackwell_nvfp4"} <= {*benchmark.FULL["timed"]}
    names = [name for units in benchmark.UNITS.values() for name in units if name is not None]
    assert all(get_accumulator(name).hardware for name in names)
    assert all(get_accumulator(name).simulated for name in benchmark.FULL["timed"])


def test_machines_without_a_suitable_gpu_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main(["--quick"]) == 2
    assert "needs a CUDA GPU; run it on an H100 or H200" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    assert benchmark.main(["--quick"]) == 2
    said = "no accumulator is assigned to V100; use a GPU of compute capability 8.0, 8.6, 8.9, 9.0"
    assert said in capsys.readouterr().err
