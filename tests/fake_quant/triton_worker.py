"""The worker process of test_triton.py, which prints its results as JSON.

    compare NAME ...   compare the kernels with the reference, in Triton's interpreter
    compile            compile the kernels for sm_90, and count the instructions of their code
    launch             record the arguments of a first launch and of later ones

The interpreter's variable must be set before Triton is imported, and a driver without a device
would affect other tests.
"""

import json
import os
import re
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
if sys.argv[1] == "compare":
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter

from megatron.fake_quant import Format, get_format, reference
from megatron.fake_quant.fused import triton_launch
from megatron.fake_quant.quantize import checked
from tests.fake_quant.inputs import every_bfloat16, every_float16
from tests.fake_quant.kernel_inputs import INPUTS, SEED, bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Every branch of the kernels, by format, type, shape and axis.
COMPILED = (
    ("mxfp8", torch.float32, (4096, 4096), 1),
    ("mxfp4", torch.bfloat16, (4096, 4096), 0),
    ("mxint8:sr", torch.float16, (100, 300), 0),
    ("mxfp4:sr", torch.float32, (65536, 65536), 1),  # places beyond int32
    ("mx:e7m0:b7:floor", torch.bfloat16, (77, 75), 1),
    ("nvfp4:2d:sr", torch.bfloat16, (4096, 4096), 0),
    ("nvfp4", torch.float32, (4096, 4096), 1),
    ("hifp8", torch.bfloat16, (4096, 4096), 1),
    ("hifp8:hr:inf", torch.float16, (4096, 4096), 1),
    ("hifp8:sr:t15", torch.float32, (65536, 65536), 1),
    ("fp8_e4m3:pow2", torch.bfloat16, (4096, 4096), 1),
)
#: Flushing of subnormals, fusion, operations that round otherwise than IEEE's.
FORBIDDEN = r"\S*\.ftz\S*|fma\.\S*|mad\.\S*f32|\S*\.(?:full|approx)\S*|(?:add|sub|mul|div)\.f32"


# Comparing.


def inputs() -> dict[str, Tensor]:
    """Return 24 rows of each kind with 76 values each, so that the last block has 12."""
    rows = (slice(3, 9), slice(98, 104), slice(196, 202), slice(250, 256))
    return {kind: torch.cat([make()[part, :76] for part in rows]) for kind, make in INPUTS.items()}


def layouts(x: Tensor) -> dict[str, Tensor]:
    return {
        "transposed": x.t(),
        "permuted": x.view(4, 6, 76).permute(1, 0, 2),
        "every second": x[:, ::2],
    }


def cases(fmt: Format) -> dict[str, tuple[Tensor, list[int]]]:
    """Return tensors, and the axes along which to quantize each."""
    found = {}
    slow = fmt.rounding == "stochastic"  # to interpret
    for kind, x in inputs().items():
        if kind == "zeros" and (fmt.scaling is None or fmt.name.startswith("mx")):
            continue  # among the specials, where no other value sets the scale
        for dtype in DTYPES[: 2 if slow else 3]:
            found[f"{dtype} {kind}"] = (x.to(dtype), [0, 1])
        if kind == "specials":
            for layout, y in layouts(x).items():
                found[f"{layout} {kind}"] = (y, list(range(-y.ndim, 0)))
    x = INPUTS["specials"]()
    found["several tiles"] = (x[:, :280].contiguous(), [0, 1])
    if fmt.block_size is None:
        found["no dimensions"] = (torch.tensor(-2.7), [0])
    if not slow:
        found["every bfloat16"] = (every_bfloat16().view(2048, 32), [1])
        found["every float16"] = (every_float16().view(32, 2048), [0])
    return found


def differences(name: str) -> list[str]:
    fmt = get_format(name)
    seed = SEED if fmt.rounding == "stochastic" else None
    found = []
    for case, (x, axes) in cases(fmt).items():
        for axis in axes:
            if fmt.square and axis < -2:
                continue
            _, layout = checked(x, fmt, axis)
            expected = reference.fake_quantize(x, fmt, layout, seed)
            ours = triton_launch.fake_quantize(x, fmt, layout, seed)
            if not torch.equal(bits(ours), bits(expected)):
                found.append(f"{case}, axis {axis}: {int((bits(ours) != bits(expected)).sum())}")
            elif ours.stride() != expected.stride() or ours.dtype != x.dtype:
                found.append(f"{case}, axis {axis}: {ours.stride()} {ours.dtype}")
    return found


def hasten() -> None:
    """Prepare Triton's language once for each module, instead of for each call of a function."""
    prepare, prepared = interpreter._patch_lang, set()

    def once(function: Any) -> Any:
        if id(function.__globals__) not in prepared:
            prepared.add(id(function.__globals__))
            prepare(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once


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
            # Without Triton's own metadata and hooks.
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
    chosen = triton_launch.plan(get_format(name), shape, axis, dtype)
    x = torch.empty(64, dtype=dtype)
    plans = [(chosen, (x, x, torch.zeros((), dtype=torch.int32) if chosen.amax else None, 5, 7))]
    if chosen.amax:
        plans.append(
            (triton_launch.amax_plan(x.numel(), dtype), (x, torch.zeros((), dtype=torch.int32)))
        )
    found: dict[str, Any] = {"forbidden": [], "operations": []}
    for plan, arguments in plans:
        arguments = (*arguments, *plan.numbers, *plan.constants.values())
        binary = plan.kernel.warmup(*arguments, grid=(1,), **plan.options)
        found["forbidden"] += re.findall(FORBIDDEN, binary.asm["ptx"])
        found["operations"] += re.findall(r"\bdiv\.rn\.f32|[a-z]+\.global\S*", binary.asm["ptx"])
        assert binary.asm["cubin"].startswith(b"\x7fELF")
        assert ".target sm_90" in binary.asm["ptx"]
    return found


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
        np.seterr(all="ignore")  # values that are computed and not chosen
        hasten()
        result = {name: differences(name) for name in sys.argv[2:]}
    else:
        driver.set_active(device := Driver())
        if sys.argv[1] == "compile":
            result = {case[0]: compiled(*case) for case in COMPILED}
        else:
            result = {name: launched(name, device) for name in ("mxfp8", "nvfp4:sr", "hifp8")}
    print(json.dumps({"triton": triton.__version__} | result))


if __name__ == "__main__":
    main()
