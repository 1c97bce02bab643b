"""Measure how fast simulated accumulators sum products, compared with other implementations.

    python benchmarks/accumulators.py                      # all named accumulators, 1024^3 products
    python benchmarks/accumulators.py --quick              # few products; write no file
    python benchmarks/accumulators.py --accumulators hopper_fp8 fda:l32:f13:m13:rz:p64 --threads 2
    python benchmarks/accumulators.py --shape 4096 256 4096 --output /tmp/speed.md

For each accumulator, `accumulated_matmul` multiplies two matrices of normally distributed elements
of the unit's first element type, with block scales if the unit has them. In the same rounds, three
other implementations are timed on fewer rows: the definition for one dot product in exact integers
(`scalar`), the implementation in plain torch operations (`reference`), and a vectorized model in
numpy on one thread, for units that align and add all products of a step at once. `torch.matmul` in
float32, which simulates nothing, is timed as well. A ratio is the median of the rounds' ratios, so
that other load on the machine affects both sides alike. The results of all implementations except
`torch.matmul` are compared bit by bit. Writes a Markdown file.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import results_page

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from megatron.console import ArgumentParser  # noqa: E402
from megatron.fake_quant.accumulate import (  # noqa: E402
    ACCUMULATORS,
    Accumulator,
    accumulated_matmul,
    get_accumulator,
    reference,
    scalar,
)
from megatron.fake_quant.accumulate.accumulator import (  # noqa: E402
    IGNORED_EXPONENT,
    ZERO_EXPONENT,
)
from megatron.fake_quant.accumulate.element_types import (  # noqa: E402
    get_element_type,
    smallest_exponent,
)
from megatron.fake_quant.accumulate.unit_operand import UnitOperand  # noqa: E402
from megatron.fake_quant.elements import Cast  # noqa: E402
from megatron.fake_quant.rounding import round_to  # noqa: E402

SEED = 1234
#: number of products per call of the slower implementations
PRODUCTS = {"scalar": 1 << 14, "reference": 1 << 20, "numpy": 1 << 22}
READING = (
    "The columns scalar, numpy and reference give the time per product of the implementation with "
    "this name, divided by that of `accumulated_matmul`. The column share of fp32 is the speed of "
    "`accumulated_matmul` divided by that of `torch.matmul` in float32 with the same number of "
    "threads. The column differing is the number of results of the three implementations that "
    "differ from those of `accumulated_matmul`."
)


class Case(NamedTuple):
    """An accumulator, and the operands of a matmul whose products it sums."""

    accumulator: Accumulator
    a: UnitOperand
    b: UnitOperand
    elements: tuple[str, str]

    @property
    def products(self) -> int:
        return self.a.elements.numel() * self.b.elements.shape[0]

    def scales(self) -> tuple[Tensor, Tensor] | None:
        if self.a.scales is None or self.b.scales is None:
            return None
        return self.a.scales, self.b.scales

    def shortened(self, products: int) -> "Case":
        """Return a case of about `products` products, with only the first rows of both operands."""
        rows, columns = self.a.elements.shape[0], self.b.elements.shape[0]
        columns = min(columns, max(1, products // self.a.elements.shape[1]))
        rows = min(rows, max(1, products // (self.a.elements.shape[1] * columns)))
        return self._replace(a=first_rows(self.a, rows), b=first_rows(self.b, columns))


def first_rows(operand: UnitOperand, count: int) -> UnitOperand:
    scales = None if operand.scales is None else operand.scales[:count]
    return operand._replace(elements=operand.elements[:count], scales=scales)


def positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        advice="see --help",
    )
    add = parser.add_argument
    simulated = [name for name, unit in ACCUMULATORS.items() if unit.simulated]
    add("--accumulators", nargs="+", default=simulated, metavar="NAME", help="default: all")
    add(
        "--shape",
        nargs=3,
        type=positive,
        metavar=("ROWS", "COLUMNS", "DEPTH"),
        help="size of the product, and length of the reduction axis; default: 1024 1024 1024",
    )
    add("--threads", nargs="+", type=positive, metavar="N", help="default: 1 and all cores")
    add("--repeats", type=positive, metavar="N", help="rounds; default: 5")
    add("--quick", action="store_true", help="shape 64 128 256, 2 rounds, no default file")
    add("--output", type=Path, metavar="FILE.md", help="default: docs/results/accumulator_speed.md")
    options = parser.parse_args(arguments)
    options.shape = options.shape or ([64, 128, 256] if options.quick else [1024, 1024, 1024])
    options.repeats = options.repeats or (2 if options.quick else 5)
    options.threads = options.threads or sorted({1, os.cpu_count() or 1})
    if options.output is None and not options.quick:
        options.output = REPO / "docs" / "results" / "accumulator_speed.md"
    try:
        options.accumulators = [get_accumulator(name) for name in options.accumulators]
    except ValueError as error:
        parser.error(f"--accumulators: {error}")
    for accumulator in options.accumulators:
        if not accumulator.simulated:
            parser.error(
                f"--accumulators: {accumulator.name} simulates nothing; leave it out, because "
                "every accumulator is compared with it"
            )
    return options


def make_case(accumulator: Accumulator, shape: list[int]) -> Case:
    """Return a case with random operands for an accumulator; block scales are powers of two."""
    rows, columns, depth = shape
    name = (accumulator.elements or ("bfloat16",))[0]
    element, generator = get_element_type(name), torch.Generator().manual_seed(SEED)
    operands = []
    for count in (rows, columns):
        x = torch.randn(count, depth, generator=generator)
        x = x.to(element.dtype).float() if isinstance(element, Cast) else round_to(x, element)
        scales = None
        if accumulator.scale_block is not None:
            blocks = (count, -(-depth // accumulator.scale_block))
            exponents = torch.randint(-6, 7, blocks, generator=generator)
            scales = torch.ldexp(torch.ones(blocks), exponents)
        operands.append(UnitOperand(x, smallest_exponent(name), scales))
    return Case(accumulator, operands[0], operands[1], (name, name))


def with_ours(case: Case) -> Tensor:
    return accumulated_matmul(
        case.a.elements,
        case.b.elements,
        case.accumulator,
        elements=case.elements,
        scales=case.scales(),
    )


def with_scalar(case: Case) -> Tensor:
    scales: Any = case.scales()
    smallest = (case.a.smallest_exponent, case.b.smallest_exponent)
    left, right = case.a.elements.tolist(), case.b.elements.tolist()
    result = torch.empty(len(left), len(right))
    for i, x in enumerate(left):
        for j, y in enumerate(right):
            pair = None if scales is None else (scales[0][i].tolist(), scales[1][j].tolist())
            result[i, j] = scalar.dot(x, y, case.accumulator, smallest=smallest, scales=pair)
    return result


def with_reference(case: Case) -> Tensor:
    return reference.summed(case.a, case.b, case.accumulator)


def with_numpy(case: Case) -> Tensor:
    """Sum finite products in numpy, with float64 for the intermediate numbers."""
    unit = case.accumulator
    a, b = (side.elements.double().numpy() for side in (case.a, case.b))
    p, q = (exponents(x, case.a.smallest_exponent, IGNORED_EXPONENT) for x in (a, b))
    running, second = np.zeros((2, len(a), len(b)))
    bits, kept, interval = unit.align_bits, unit.keep.mantissa_bits, unit.promote_every
    for first in range(0, a.shape[1], unit.step):
        part = slice(first, first + unit.step)
        largest = (p[:, None, part] + q[None, :, part]).max(-1)
        scale = np.ldexp(1.0, bits - np.maximum(largest, exponents(running, -126, ZERO_EXPONENT)))
        terms = np.trunc(a[:, None, part] * b[None, :, part] * scale[..., None])
        total = (terms.sum(-1) + np.trunc(running * scale)) / scale
        unit_of_sum = np.ldexp(1.0, exponents(total, -126, ZERO_EXPONENT) - kept)
        running = np.trunc(total / unit_of_sum) * unit_of_sum
        last = min(first + unit.step, a.shape[1])
        if interval and (last % interval == 0 or last == a.shape[1]):
            if (scales := case.scales()) is not None:
                left, right = (side[:, first // interval].numpy() for side in scales)
                running = running * np.outer(left, right)
            second = (second + running).astype(np.float32).astype(np.float64)
            running = np.zeros_like(running)
    return torch.from_numpy((second if interval else running).astype(np.float32))


def exponents(x: np.ndarray, smallest: int, zero: int) -> np.ndarray:
    return np.where(x == 0, zero, np.maximum(np.frexp(x)[1] - 1, smallest))


def other_ways(case: Case) -> dict[str, Callable[[Case], Tensor]]:
    """Return, by name, the other implementations that can compute the matmul of a case."""
    ways = {"scalar": with_scalar, "reference": with_reference}
    unit = case.accumulator
    aligned = unit.design == "fused" and unit.align_bits is not None
    if aligned and unit.keep.rounding == "rz" and unit.scales in ("after", "promotion"):
        ways["numpy"] = with_numpy
    return ways


def nanoseconds(call: Callable[[], Any], products: int) -> float:
    """Return the duration of one call in nanoseconds per product."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e9 / products


def measure(case: Case, threads: int, repeats: int) -> dict[str, Any]:
    """Time every implementation in ns per product, and count the results that differ from ours."""
    torch.set_num_threads(threads)
    a, bt = case.a.elements, case.b.elements.t()
    calls = {
        "ours": (lambda: with_ours(case), case.products),
        "fp32": (lambda: torch.matmul(a, bt), case.products),
    }
    differing = 0
    for name, way in other_ways(case).items():
        short = case.shortened(PRODUCTS[name])
        calls[name] = (lambda way=way, short=short: way(short), short.products)
        ours, theirs = (f(short).view(torch.int32) for f in (with_ours, way))
        differing += int((ours != theirs).sum())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call, products in calls.values():
        nanoseconds(call, products)  # compiles, and warms up
    for _ in range(repeats):
        for name, (call, products) in calls.items():
            times[name].append(nanoseconds(call, products))
    return {"times": times, "differing": differing}


def ratio(times: dict[str, list[float]], name: str, over: str) -> str:
    """Return the median ratio of two implementations' times, or "-" if one was not timed."""
    if name not in times or over not in times:
        return "-"
    pairs = zip(times[name], times[over], strict=True)
    middle = statistics.median(one / other for one, other in pairs)
    return f"{middle:,.0f}" if middle >= 100 else f"{middle:.3g}"


def row(case: Case, threads: int, result: dict[str, Any]) -> list[str]:
    times = result["times"]
    rate = 1e3 / statistics.median(times["ours"])
    return [
        case.accumulator.name,
        str(threads),
        f"{rate:,.0f}",
        *(ratio(times, name, "ours") for name in ("scalar", "numpy", "reference")),
        ratio(times, "fp32", "ours"),
        str(result["differing"]),
    ]


HEAD = (
    *("accumulator", "threads", "million products/s", "scalar", "numpy", "reference"),
    *("share of fp32", "differing"),
)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    rows = []
    for accumulator in options.accumulators:
        case = make_case(accumulator, options.shape)
        for threads in options.threads:
            rows.append(row(case, threads, measure(case, threads, options.repeats)))
            print(" ".join(rows[-1]), file=sys.stderr)
    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    )
    size = " x ".join(map(str, options.shape))
    page = (
        "# Speed of the accumulators\n\n"
        f"`{results_page.quoted('accumulators.py', arguments)}`\n\n"
        f"Rows x columns x reduction axis: {size}; median of {options.repeats} rounds; "
        f"{platform.machine()}, {versions}.\n\n{results_page.table(HEAD, rows)}\n\n{READING}\n"
    )
    results_page.publish(page, options.output)
    return 1 if any(cells[-1] != "0" for cells in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
