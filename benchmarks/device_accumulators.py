"""Compare simulated accumulators with the matrix unit of this machine's GPU, bit by bit.

    python benchmarks/device_accumulators.py --output /tmp/page.md
    python benchmarks/device_accumulators.py --quick           # a check of a few seconds
    python benchmarks/device_accumulators.py --parts probe     # only one of the parts

The GPU multiplies with `torch._scaled_mm` (FP8) and `torch.mm` (bfloat16, float16), both with
float32 results. "compare" counts the results of `accumulated_matmul` that differ. "probe" finds the
parameters of the unit from the GPU's results alone. "speed" times `accumulated_matmul`. The GPU
should be an H100 or H200; those of Ampere, Ada and Blackwell are compared with other accumulators.
Prints a page in Markdown. The exit status is 1 if a result of a large product or a probed parameter
differs, and 2 if there is no suitable GPU.
"""

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils._pytree import tree_map_only

import accumulators
import results_page

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.console import ArgumentParser
from megatron.fake_quant.accumulate import accumulated_matmul, get_accumulator

Pair = tuple[Tensor, Tensor]
Types = tuple[torch.dtype, torch.dtype]
Shape = tuple[int, int, int]  #: rows, columns, and length K of the reduction axis

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2", torch.bfloat16: "bfloat16", torch.float16: "float16"}
TOP = {E4M3: 448.0, E5M2: 57344.0, torch.bfloat16: 8.0, torch.float16: 8.0}  # maximum
FP8_PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))
HALF_PAIRS = ((torch.bfloat16,) * 2, (torch.float16,) * 2)
#: accumulators by compute capability: FP8 with and without `use_fast_accum`, and 16 bits; None if
#: the GPU does not multiply FP8, or if no accumulator describes its sum
UNITS: dict[tuple[int, int], tuple[str | None, str | None, str]] = {
    (8, 0): (None, None, "ampere_bf16"),
    (8, 6): (None, None, "ampere_bf16"),
    (8, 9): ("ada_fp8", None, "ampere_bf16"),
    (9, 0): ("hopper_fp8", "hopper_fp8_promote128", "hopper_bf16"),
    (10, 0): ("blackwell_fp8", "blackwell_fp8", "blackwell_bf16"),
    (10, 3): ("blackwell_fp8", "blackwell_fp8", "blackwell_bf16"),
}
LABELS = ("operation", "accumulator", "elements")
PARTS = ("compare", "probe", "speed")
KINDS = ("normal", "wide", "positive", "canceling", "subnormal", "special")
ROWS = 1024  #: rows and columns of the products that are compared, and fewest of those that probe
SPLITS = (2, 4, 8, 16, 32)  #: numbers of parts of a split sum that are tried
PROBED_BITS = 26  #: a product of 2^-26 is the smallest one that is probed next to a product of 1
LARGE = 14  #: the unit multiplies 2^7 by 2^7 where the text calls a product 1
OTHERS = ("blackwell_mx", "blackwell_nvfp4", "cdna3_fp8", "bf16")
#: sizes of all parts; the keys of `depths` are bytes per element
FULL: dict[str, Any] = {
    "kinds": KINDS,
    "depths": {1: (32, 128, 256, 1024, 4096, 8192), 2: (16, 64, 256, 1024, 4096, 8192)},
    "small_shapes": ((128, 128, 8192), (128, 128, 16384)),
    "interval_depths": (512, 1024, 2048, 4096),
    "size": 4096,
    "repeats": 7,
    "timed": ("hopper_fp8", "hopper_fp8_promote128", "hopper_bf16", "blackwell_fp8", *OTHERS),
}
QUICK = {name: sizes[:1] for name, sizes in FULL.items() if isinstance(sizes, tuple)}
QUICK |= {"depths": {1: (32, 256), 2: (16, 256)}, "size": 512, "repeats": 3}
BITS = (
    "NaN equals NaN. Normal and positive elements are scaled to the maximum 448 (e4m3), 57344 "
    "(e5m2) or 8. Wide magnitudes cover 24 binades. Canceling products cancel in pairs, except for "
    "a few small ones. Subnormal elements are normal deviates times the smallest normal number (in "
    "bfloat16, only those of the left operand). Special data contain NaN, Inf (not in e4m3), zeros "
    "and the largest number of the type. If a product has few rows and columns, cuBLAS may split "
    "the sum along K, which is not a property of the unit. Differing results are therefore also "
    "compared with the float32 sum of simulated parts of equal size, in the best number of parts. "
)
PROBED = (
    "The probed values follow from the GPU's results for powers of two. The promotion interval is "
    "the first position at which a product too small for the running sum survives after a 1."
)
SPEED = (
    "Medians of {repeats} timings with CUDA events after warm-up, for {size} x {size} x {size} "
    "products. `accumulated_matmul` is timed with its checks of the inputs. The torch functions "
    "have no such checks, and do not use TF32. Blocks have scales if the unit applies them."
)


class Operation(NamedTuple):
    """A matmul of a device, and the accumulator that simulates it."""

    name: str
    accumulator: str
    types: Types
    multiply: Callable[[Tensor, Tensor], Tensor]
    device: str = "cuda"

    def elements(self) -> tuple[str, str]:
        return NAMES[self.types[0]], NAMES[self.types[1]]

    def simulate(self, a: Tensor, b: Tensor) -> Tensor:
        """Return A B^T as the accumulator sums it."""
        return accumulated_matmul(a.float(), b.float(), self.accumulator, elements=self.elements())

    def labels(self) -> list[str]:
        return [self.name, self.accumulator, " x ".join(self.elements())]


def scaled_mm(a: Tensor, b: Tensor, *, fast: bool) -> Tensor:
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast)


def mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b.t(), out_dtype=torch.float32)


def operations_of(capability: tuple[int, int]) -> list[Operation]:
    """Return those matmuls of a GPU whose sums an accumulator describes."""
    fast, promoted, half = UNITS[capability]
    operations = [Operation("mm", half, pair, mm) for pair in HALF_PAIRS]
    for is_fast, unit in ((False, promoted), (True, fast)):
        if unit is not None:
            name = f"_scaled_mm, use_fast_accum={is_fast}"
            multiply = functools.partial(scaled_mm, fast=is_fast)
            operations[:0] = [Operation(name, unit, pair, multiply) for pair in FP8_PAIRS]
    return operations


def make_pair(kind: str, shape: Shape, types: Types, *, generator: Generator) -> Pair:
    """Return operands `[rows, K]` and `[columns, K]` with data of one of KINDS."""
    rows, columns, depth = shape
    a = random_elements(kind, (rows, depth), types[0], generator)
    b = random_elements(kind, (columns, depth), types[1], generator)
    if kind == "canceling":
        half, small = depth // 2, torch.arange(0, depth // 2, 16, device=a.device)
        a[:, small] *= 2.0**-6
        a[:, depth - half :] = -a[:, :half].flip(-1)
        b[:, depth - half :] = b[:, :half].flip(-1)
        a[:, depth - 1 - small] = 0.0
    elif kind == "subnormal" and types[1] == torch.bfloat16:
        b = random_elements("normal", (columns, depth), types[1], generator)
    return a.to(types[0]), b.to(types[1])


def random_elements(kind: str, shape: tuple[int, ...], dtype: torch.dtype, g: Generator) -> Tensor:
    """Return random float32 values of one of KINDS for an operand; `make_pair` rounds them."""
    draw = functools.partial(torch.empty, shape, device=g.device)
    normal = draw().normal_(generator=g)
    if kind == "wide":
        exponents = draw().uniform_(-24, 0, generator=g)
        return (normal * exponents.exp2() * TOP[dtype]).clamp(-TOP[dtype], TOP[dtype])
    if kind == "positive":
        return draw().uniform_(generator=g) * TOP[dtype]
    if kind == "subnormal":
        return normal * torch.finfo(dtype).smallest_normal
    x = normal * (TOP[dtype] / normal.abs().max())
    if kind == "special":
        rare = 0.125 / shape[1]  # in one of eight rows
        shares = {torch.nan: rare, torch.finfo(dtype).max: 4 * rare, 0.0: 0.25}
        if dtype != E4M3:
            shares |= {torch.inf: rare, -torch.inf: rare}
        for value, share in shares.items():
            x = x.masked_fill(draw().uniform_(generator=g) < share, value)
    return x


def count_differing(x: Tensor, y: Tensor) -> int:
    """Return the number of float32 results with different bits; every NaN has the same bits."""
    one, other = (side.masked_fill(side.isnan(), torch.nan).view(torch.int32) for side in (x, y))
    return int((one != other).sum())


def fewest_differing(operation: Operation, pair: Pair, result: Tensor) -> str:
    """Return, as text, how few results differ from a simulation that splits the sum along K."""
    counts = []
    for parts in SPLITS:
        pieces = zip(*(side.chunk(parts, dim=1) for side in pair), strict=True)
        total = functools.reduce(torch.add, (operation.simulate(a, b) for a, b in pieces))
        counts.append((count_differing(result, total), parts))
    fewest, parts = min(counts)
    return f"{fewest:,} from a sum in {parts} parts"


def compare(
    operation: Operation, kind: str, shapes: list[Shape], *, generator: Generator
) -> tuple[int, list[str]]:
    """Compare products with one kind of data; return the number of differing results and a row."""
    total, remarks = 0, []
    for shape in shapes:
        pair = make_pair(kind, shape, operation.types, generator=generator)
        result = operation.multiply(*pair)
        if differing := count_differing(result, operation.simulate(*pair)):
            split = fewest_differing(operation, pair, result)
            remarks.append(f"K = {shape[2]}: {differing:,}, and {split}")
        total += differing
    rows, columns, _ = shapes[0]
    depths = ", ".join(str(depth) for _, _, depth in shapes)
    count = f"{rows * columns * len(shapes):,}"
    cells = [kind, f"{rows} x {columns}", depths, count, "; ".join([f"{total:,}", *remarks])]
    print(*operation.labels(), *cells, sep=" | ", file=sys.stderr)
    return total, [*operation.labels(), *cells]


def dot_products(
    operation: Operation, shape: tuple[int, int], places: list[tuple[Any, Any]]
) -> Tensor:
    """Return sums of powers of two, one per row of `shape`.

    `places` has pairs of the indices of products and their exponents; other products are zero.
    """
    left, right = (torch.full(shape, -torch.inf, device=operation.device) for _ in range(2))
    for index, exponents in places:
        both = torch.as_tensor(exponents, device=left.device) + LARGE
        left[index], right[index] = (both // 2).float(), (both - both // 2).float()
    # Use at least ROWS rows, because cuBLAS may split the sums of smaller products along K.
    rows = torch.arange(-(-shape[0] // ROWS) * ROWS, device=left.device) % shape[0]
    a, b = (x[rows].exp2().to(t) for x, t in zip((left, right), operation.types, strict=True))
    return operation.multiply(a, b).diagonal()[: shape[0]] * 2.0**-LARGE


def probe_bits(operation: Operation, *, ones: int, small: int) -> int:
    """Return the largest f such that `small` products of 2^-f survive next to `ones` products of 1.

    If a term has F bits and the running sum has M, then f is F or M + log2(small) - log2(ones),
    whichever is smaller. One of `small` and `ones` must be 1.
    """
    bits = torch.arange(1, PROBED_BITS + 1, device=operation.device)
    places = [(np.s_[:, :ones], 0), (np.s_[:, ones : ones + small], -bits[:, None])]
    return int((bits * (dot_products(operation, (PROBED_BITS, 64), places) > ones)).max())


def probe_step(operation: Operation, *, term_bits: int, sum_bits: int) -> str:
    """Return the number of products per step.

    Small products precede a product of 1. In the same step, each of them is lost. In an earlier
    step, they are added first, and their sum survives.
    """
    small, depth = 2 ** max(1, term_bits + 1 - sum_bits), 128
    large = torch.arange(small, depth, device=operation.device)
    places = [(np.s_[:, :small], -term_bits - 1), ((large - small, large), 0)]
    survives = dot_products(operation, (len(large), depth), places) > 1
    return describe_first([False] * small + survives.tolist())


def probe_interval(operation: Operation, *, depth: int, sum_bits: int) -> str:
    """Return the position from which a product too small for the running sum survives."""
    positions = torch.arange(1, depth, device=operation.device)
    places = [(np.s_[:, 0], 0), ((positions - 1, positions), -sum_bits - 1)]
    survives = dot_products(operation, (depth - 1, depth), places) > 1
    return describe_first([False, *survives.tolist()])


def describe_first(survives: list[bool]) -> str:
    """Return, as text, the first position that survives, and how many later ones are lost."""
    if True not in survives:
        return "never"
    first = survives.index(True)
    lost = survives[first:].count(False)
    return f"{first}, but {lost} later positions are lost" if lost else str(first)


def probe(operation: Operation, depths: tuple[int, ...]) -> list[list[str]]:
    """Return the rows of the table "Probes" for one operation."""
    unit = get_accumulator(operation.accumulator)
    term_bits = probe_bits(operation, ones=1, small=8)
    sum_bits = probe_bits(operation, ones=4, small=1) + 2
    step = probe_step(operation, term_bits=term_bits, sum_bits=sum_bits)
    quantities = [
        ("products per step", step, unit.step),
        ("fractional bits of a term", term_bits, unit.align_bits),
        ("bits of the running sum", sum_bits, unit.keep.mantissa_bits),
    ]
    if sum_bits < 23:  # otherwise a float32 sum loses what the running sum loses
        simulated = unit.promote_every or "never"
        for depth in depths:
            interval = probe_interval(operation, depth=depth, sum_bits=sum_bits)
            quantities.append((f"promotion interval, K = {depth}", interval, simulated))
    return [[*operation.labels(), *map(str, quantity)] for quantity in quantities]


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median duration of a call in ms, after two calls that compile and warm up."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 3)]
    for event in events:
        event.record()
        call()
    torch.cuda.synchronize()
    timed = itertools.pairwise(events[2:])
    return statistics.median(start.elapsed_time(end) for start, end in timed)


def time_all(operations: list[Operation], options: argparse.Namespace) -> list[list[str]]:
    """Return the rows of the table "Speed": torch's own matmuls first, then the accumulators."""
    device, size = operations[0].device, options.size
    generator = Generator(device).manual_seed(accumulators.SEED)
    x, y = torch.randn(2, size, size, device=device, generator=generator)
    torch.backends.cuda.matmul.allow_tf32 = False
    calls: dict[str, Callable[[], object]] = {
        "torch.matmul, float32": functools.partial(torch.matmul, x, y.t()),
        "torch.matmul, bfloat16": functools.partial(torch.matmul, x.bfloat16(), y.bfloat16().t()),
    }
    for one in (one for one in operations if one.types == (E4M3, E4M3)):
        calls[f"torch.{one.name}"] = functools.partial(one.multiply, x.to(E4M3), y.to(E4M3))
    for name in options.timed:
        case = accumulators.make_case(get_accumulator(name), [size] * 3)
        case = tree_map_only(Tensor, lambda x: x.to(device), case)
        calls[name] = functools.partial(accumulators.with_ours, case)
    times = {name: milliseconds(call, options.repeats) for name, call in calls.items()}
    baselines = list(times.values())[:2]
    return [[name, *(f"{ms / over:.3g}" for over in (1, *baselines))] for name, ms in times.items()]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(description=__doc__, formatter_class=raw, advice="see --help")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--quick", action="store_true", help="few sizes; a check of a few seconds")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="default: print only")
    options = parser.parse_args(arguments)
    vars(options).update(QUICK if options.quick else FULL)
    return options


def refusal() -> str | None:
    """Return why this machine cannot run the benchmark, or None if it can."""
    if not torch.cuda.is_available():
        return "this benchmark needs a CUDA GPU; run it on an H100 or H200, with torch for CUDA"
    if torch.cuda.get_device_capability() not in UNITS:
        known = ", ".join(f"{major}.{minor}" for major, minor in UNITS)
        name = torch.cuda.get_device_name()
        return f"no accumulator is assigned to {name}; use a GPU of compute capability {known}"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8):
        return f"torch {torch.__version__} has no torch.mm with out_dtype; install torch 2.8"
    return None


def compare_all(operations: list[Operation], options: argparse.Namespace) -> tuple[int, list[str]]:
    """Return the number of differing results of large products, and a section of the page."""
    generator = Generator(operations[0].device).manual_seed(accumulators.SEED)
    measure = functools.partial(compare, generator=generator)
    pairs, text = [], BITS
    for operation in operations:
        shapes = [(ROWS, ROWS, depth) for depth in options.depths[operation.types[0].itemsize]]
        pairs += [measure(operation, kind, shapes) for kind in options.kinds]
    total = sum(differing for differing, _ in pairs)
    for shape in options.small_shapes:
        small = [measure(operation, "normal", [shape]) for operation in operations]
        count = sum(differing > 0 for differing, _ in small)
        text += f"In products of {shape[0]} x {shape[1]} results with K = {shape[2]}, results of "
        text += f"{count} of the {len(small)} pairs of operation and elements differ. "
        pairs += small
    head = (*LABELS, "data", "results", "K", "dot products", "differing bit patterns")
    return total, ["## Bits", text.strip(), results_page.table(head, [row for _, row in pairs])]


def sections(operations: list[Operation], options: argparse.Namespace) -> tuple[bool, list[str]]:
    """Run the requested parts. Return whether all bits agree, and the sections of the page."""
    agree, texts = True, []
    if "compare" in options.parts:
        differing, texts = compare_all(operations, options)
        agree = not differing
    if "probe" in options.parts:
        equal = [operation for operation in operations if len({*operation.types}) == 1]
        rows = [row for operation in equal for row in probe(operation, options.interval_depths)]
        agree &= all(row[-2] == row[-1] for row in rows)
        head = (*LABELS, "quantity", "probed", "simulated")
        texts += ["## Probes", PROBED, results_page.table(head, rows)]
    if "speed" in options.parts:
        head = ("multiplication", "ms", "over float32", "over bfloat16")
        text = SPEED.format(repeats=options.repeats, size=options.size)
        texts += ["## Speed", text, results_page.table(head, time_all(operations, options))]
    return agree, texts


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if reason := refusal():
        print(f"device_accumulators.py: {reason}", file=sys.stderr)
        return 2
    major, minor = torch.cuda.get_device_capability()
    agree, texts = sections(operations_of((major, minor)), options)
    command = f"`{results_page.quoted('device_accumulators.py', arguments)}`"
    gpu = f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    page = ["# Accumulators compared with a GPU", command, f"{gpu}, {versions}.", *texts]
    results_page.publish("\n\n".join(page) + "\n", options.output)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
