"""The worker process of test_triton.py, which prints its results as JSON.

    compare NAME ...   compare the kernels with the reference, in Triton's interpreter
    compile            compile the kernels for sm_90, and count the instructions of their code;
                       record the arguments of a first launch and of later ones

The interpreter's variable must be set before Triton is imported, and a driver without a device
would affect other tests.
"""

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)
if sys.argv[1] == "compare":
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from megatron.fake_quant import Format, get_format, reference
from megatron.fake_quant.block_scaling import WHOLE_AXIS
from megatron.fake_quant.fused import triton_launch, triton_plans
from megatron.fake_quant.matmul import products
from megatron.fake_quant.quantize import checked
from megatron.fake_quant.scalings.tensor_scale import local_amax
from tests.fake_quant import triton_accumulators
from tests.fake_quant.inputs import every_bfloat16, every_float16
from tests.fake_quant.kernel_inputs import INPUTS, SEED, bits
from tests.fake_quant.triton_interpreter import hasten

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Every branch of the kernels, by format, type, shape and axis.
COMPILED = (
    ("mxfp8", torch.float32, (4096, 4096), 1),
    ("mxfp4", torch.bfloat16, (4096, 4096), 0),
    ("mxint8:sr", torch.float16, (100, 300), 0),
    ("mxfp6_e2m3", torch.float16, (256, 300), 1),
    ("mxfp4:sr", torch.float32, (65536, 65536), 1),  # places beyond int32
    ("mxfp4:head3/4", torch.bfloat16, (4096, 4096), 1),
    ("mx:e7m0:b7:floor", torch.bfloat16, (77, 75), 1),
    ("mx6", torch.bfloat16, (4096, 4096), 1),
    ("mx9", torch.float32, (4096, 4096), 0),
    ("nvfp4:2d:sr", torch.bfloat16, (4096, 4096), 0),
    ("nvfp4", torch.float32, (4096, 4096), 1),
    ("nvint4:outer-none", torch.bfloat16, (4096, 4096), 1),
    ("nvfp4:outer-1x128", torch.bfloat16, (4096, 4096), 1),
    ("nvfp4:4over6-mae", torch.bfloat16, (4096, 4096), 1),
    ("nvfp4:outer-row:4over6-mse", torch.float32, (4096, 4096), 0),
    ("nv:e2m1:b4x16:e4m3:outer-none:4over6-mse", torch.bfloat16, (4096, 4096), 1),
    ("amdfp4:outer-tensor", torch.bfloat16, (4096, 4096), 1),
    ("nv:e2m1:b16:e6m2:outer-none", torch.bfloat16, (4096, 4096), 0),
    ("fp8_block", torch.bfloat16, (4096, 4096), 1),
    ("fp8_block:2d", torch.float32, (4096, 4096), 1),
    ("fp8_rowwise", torch.bfloat16, (4096, 4096), 0),
    ("hifp8", torch.bfloat16, (4096, 4096), 1),
    ("hifp8:hr:inf", torch.float16, (4096, 4096), 1),
    ("hifp8:sr:t15", torch.float32, (65536, 65536), 1),
    ("fp8_e4m3:pow2", torch.bfloat16, (4096, 4096), 1),
)
#: Formats that are compiled with the tiles and warps of a GPU.
WHOLE = ("mxfp8", "mxfp6_e2m3", "nvfp4", "hifp8")
#: Tiles for all other formats: each thread has a quarter of the values, so that the unrolled code
#: is a quarter as long.
SHORT = {"TILE": 1 << 10, "_PER_WARP": 1 << 8, "_REPEATS": 1}
APART = "|apart"  #: mark of formats whose scale is kept apart; see `unrounded.py`
LAUNCHED = ("mxfp8", "nvfp4:sr", "hifp8", "nvfp4:outer-row")
#: Instructions that flush subnormals, are fused, or round differently from IEEE 754.
FORBIDDEN = r"\S*\.ftz\S*|fma\.\S*|mad\.\S*f32|\S*\.(?:full|approx)\S*|(?:add|sub|mul|div)\.f32"


# Comparing.


def inputs() -> dict[str, Tensor]:
    """Return 24 rows of each kind with 76 values each, so that the last block has 12."""
    rows = (slice(3, 9), slice(98, 104), slice(196, 202), slice(250, 256))
    return {kind: torch.cat([make()[part, :76] for part in rows]) for kind, make in INPUTS.items()}


def layouts(x: Tensor) -> dict[str, Tensor]:
    return {
        "transposed": x.t(),
        "permuted": x[:6].view(2, 3, 76).permute(1, 0, 2),
        "every second": x[:, ::2],
    }


class Case(NamedTuple):
    """Tensor, axes along which to quantize it, sizes that determine the tiles, and a given amax."""

    x: Tensor
    axes: list[int]
    sizes: dict[str, int]
    amax: Tensor | None = None


#: Tiles that hold the whole input, so that the interpreter runs one program: one kind of input, all
#: kinds, or all values of a 16-bit type.
SINGLE, JOINED, EVERY = ({"TILE": 1 << power, "_REPEATS": 1} for power in (11, 13, 16))


def several_tiles(fmt: Format) -> dict[str, Case]:
    """Return small tensors that are cut into several tiles, with a short one at each end.

    Whole rows and columns are divided among tiles. The number of columns is odd in one of two
    cases, because the kernels draw random bits in another way then.
    """
    fmt = fmt.across() if fmt.columns else fmt
    whole = WHOLE_AXIS in (fmt.block_size, fmt.outer_size)
    groups = whole or fmt.outer_size is not None
    sizes = {"TILE": 1 << 8 if groups else 1 << 5, "_REPEATS": 4, "_STRIP": 32}
    sizes |= {"_LONGEST": 16, "_MOST": 512}
    size = fmt.outer_size or fmt.block_size or 32
    rows, columns = (36, 300) if whole else (size + 4, max(size + 8, 40))
    if fmt.block_size is None:
        rows = 3
    if fmt.height > 1:
        shapes = {-1: (fmt.height + 4, columns), -2: (columns, fmt.height + 4)}
    else:
        shapes = {-1: (2, columns), -2: (rows, 39)}
    found = {}
    for axis, shape in shapes.items():
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        x[0, 1], x[-1, -1] = torch.nan, -torch.inf
        found[f"several tiles {axis}"] = Case(x, [axis], sizes)
    return found


def cases(fmt: Format) -> dict[str, Case]:
    """Return tensors, and the axes along which to quantize each.

    Kinds of inputs are joined if no scale is shared by more values than a block of 32. Otherwise,
    each pair of a kind, a dtype and an axis occurs.
    """
    found = {}
    kinds = inputs()
    if fmt.has_outer_scale or fmt.columns or (fmt.block_size or 0) > 32:
        for i, (kind, x) in enumerate(kinds.items()):
            for j, dtype in enumerate(DTYPES):
                found[f"{dtype} {kind}"] = Case(x.to(dtype), [(i + j) % 2], SINGLE)
    else:
        joined = torch.cat(list(kinds.values()), 1)[:, :300]  # the last block is short, too
        for dtype in DTYPES:
            found[f"{dtype}"] = Case(joined.to(dtype), [0, 1], JOINED)
    for layout, y in layouts(kinds["specials"]).items():
        axes = range(-y.ndim if fmt.height == 1 else -2, 0)
        found[f"{layout} specials"] = Case(y, list(axes), SINGLE)
    found |= several_tiles(fmt)
    if fmt.has_tensor_scale:  # A given amax below the largest values makes these saturate.
        found["given amax"] = Case(kinds["specials"], [1], SINGLE, torch.tensor(0.7))
    if fmt.block_size is None:
        found["no dimensions"] = Case(torch.tensor(-2.7), [0], SINGLE)
    if fmt.rounding != "stochastic":
        rows, columns = (2048, 32) if fmt.height == 1 else (fmt.height, -1)
        found["every bfloat16"] = Case(every_bfloat16().view(rows, columns), [1], EVERY)
        columns = 32 if fmt.height == 1 else fmt.block_size
        found["every float16"] = Case(every_float16().view(columns, -1), [0], EVERY)
    return found


@contextlib.contextmanager
def tiles(sizes: dict[str, int]) -> Iterator[None]:
    """Change the constants of `triton_plans` that determine the tiles."""
    before = {name: getattr(triton_plans, name) for name in sizes}
    for values in (sizes, before):
        for name, value in values.items():
            setattr(triton_plans, name, value)
        for cached in (triton_plans.plan, triton_plans.amax_plan, triton_plans.scaled_plan):
            cached.cache_clear()
        if values is sizes:
            yield


def differences(name: str) -> list[str]:
    fmt = get_format(name.removesuffix(APART))
    if name.endswith(APART):
        fmt = fmt.with_scale_apart()
    seed = SEED if fmt.rounding == "stochastic" else None
    found = []
    for case, (x, axes, sizes, amax) in cases(fmt).items():
        for axis in axes:
            _, layout = checked(x, fmt, axis)
            expected = reference.fake_quantize(x, fmt, layout, seed, amax=amax)
            with tiles(sizes):
                ours = triton_launch.fake_quantize(x, fmt, layout, seed, amax=amax)
            if not torch.equal(bits(ours), bits(expected)):
                found.append(f"{case}, axis {axis}: {int((bits(ours) != bits(expected)).sum())}")
            elif ours.stride() != expected.stride() or ours.dtype != x.dtype:
                found.append(f"{case}, axis {axis}: {ours.stride()} {ours.dtype}")
    return found


def unlike_torch() -> dict[str, int]:
    """Return how many amaxes and products with scales differ from those of torch operations."""
    counts = {"amax": 0, "scaled": 0}
    for x in (*inputs().values(), torch.full((3, 5), torch.inf), torch.tensor(-2.5)):
        for dtype in DTYPES:
            y = x.to(dtype)
            parts = layouts(y).values() if y.numel() > 1000 else (y,)
            with tiles(SINGLE):
                found = [triton_launch.finite_amax(part) for part in parts]
            expected = [local_amax(part) for part in parts]
            pairs = zip(found, expected, strict=True)
            counts["amax"] += sum(not torch.equal(one, other) for one, other in pairs)
    scales = torch.tensor(1e-30), torch.tensor(3.7)
    for x in inputs().values():
        for alpha, scale_a, scale_b in ((0.3, *scales), (1.0, None, scales[1]), (-2.0, None, None)):
            for dtype in DTYPES[1:]:
                with tiles(SINGLE):
                    found = triton_launch.scaled(x, alpha, scale_a, scale_b, dtype)
                expected = products._times(x, alpha, scale_a, scale_b).to(dtype)
                expected.masked_fill_(expected.isnan(), torch.nan)  # clears signs and payloads
                counts["scaled"] += int((bits(found) != bits(expected)).sum())
    return counts


# Compiling and launching, without a device.


class Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 1, 1, 0, 0, 1024


class Driver:
    """A fake H100 that records the kernels it was asked to run."""

    utils = Utils()

    def __init__(self) -> None:
        self.launches: list[list[str]] = []

    def launcher_cls(self, *_: Any) -> Any:
        def launch(*arguments: Any) -> None:
            # Leave out Triton's own metadata and hooks.
            asked = (*arguments[:6], *arguments[9:])
            named = (f"{a.dtype}{list(a.shape)}" if isinstance(a, Tensor) else a for a in asked)
            self.launches.append([str(argument) for argument in named])

        return launch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7


def compiled(name: str, dtype: torch.dtype, shape: tuple[int, ...], axis: int) -> dict[str, Any]:
    with tiles({} if name in WHOLE else SHORT):
        chosen = triton_launch.plan(get_format(name), shape, axis, dtype)
    x, amax = torch.empty(64, dtype=dtype), torch.zeros(64, dtype=torch.int32)
    plans = [(chosen, (x, x, None if chosen.maxima is None else amax, 5, 7))]
    if chosen.maxima is not None:
        plans.append((chosen.maxima, (x, amax)))
    found: dict[str, Any] = {"forbidden": [], "operations": [], "half_nan": False}
    for plan, arguments in plans:
        arguments = (*arguments, *plan.numbers, *plan.constants.values())
        binary = plan.kernel.warmup(*arguments, grid=(1,), **plan.options)
        found["forbidden"] += re.findall(FORBIDDEN, binary.asm["ptx"])
        found["half_nan"] |= bool(re.search(r"\b(?:0x7E00|32256)\b", binary.asm["ptx"]))
        found["operations"] += re.findall(r"\bdiv\.rn\.f32|[a-z]+\.global\S*", binary.asm["ptx"])
        assert binary.asm["cubin"].startswith(b"\x7fELF")
        assert ".target sm_90" in binary.asm["ptx"]
    return found


def compiled_scaling() -> dict[str, Any]:
    """Compile the kernel that multiplies sums by scales, for both dtypes."""
    code, sums, scale = [], torch.empty(64), torch.zeros(())
    for dtype in DTYPES[1:]:
        plan = triton_plans.scaled_plan(1 << 20, dtype, (True, True, True))
        arguments = (sums, sums.to(dtype), scale, scale, 0.3, *plan.numbers)
        binary = plan.kernel.warmup(*arguments, *plan.constants.values(), grid=(1,), **plan.options)
        code.append(binary.asm["ptx"])
    return {"forbidden": re.findall(FORBIDDEN, "".join(code)), "operations": []}


def launched(name: str, device: Driver) -> list[list[list[str]]]:
    """Return the launcher's arguments in three calls, the last with unaligned memory."""
    values = torch.ones(4097)
    found = []
    for x in (values[:4096], values[:4096], values[1:]):
        device.launches.clear()
        fmt, layout = checked(x, name, 0)
        triton_launch.fake_quantize(x, fmt, layout, SEED if fmt.rounding == "stochastic" else None)
        found.append(list(device.launches))
    return found


def main() -> None:
    result: dict[str, Any]
    if sys.argv[1] == "compare":
        np.seterr(all="ignore")  # some computed values are not selected
        hasten()
        result = {name: differences(name) for name in sys.argv[2:]}
        result["accumulators"] = triton_accumulators.differences()
        result["unlike torch"] = unlike_torch()
    else:
        driver.set_active(device := Driver())
        result = {"compiled": {case[0]: compiled(*case) for case in COMPILED}}
        result["compiled"] |= triton_accumulators.compiled(FORBIDDEN)
        result["compiled"]["scaling of a product"] = compiled_scaling()
        with tiles(SHORT):
            result["launched"] = {name: launched(name, device) for name in LAUNCHED}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
