"""Compile the statistics kernels with numba; see `megatron.fake_quant.fused.numba_compile`."""

from __future__ import annotations

from pathlib import Path

from megatron.fake_quant import fused
from megatron.fake_quant.fused.numba_compile import kernel_compiler

_FOLDER = Path(__file__).parent


def _sources() -> list[Path]:
    """Return the source files of the statistics kernels and of the fused kernels that they use."""
    files = sorted(_FOLDER.parent.rglob("*.py"))
    markers = (b"@kernel", b"@sum_kernel", b"@inlined")
    kernels = [file for file in files if any(marker in file.read_bytes() for marker in markers)]
    return [*kernels, *sorted(Path(fused.__file__).parent.glob("*.py"))]


kernel = kernel_compiler("stats", _FOLDER, _sources)
#: like `kernel`, for functions whose sums may be computed in any order
sum_kernel = kernel_compiler("stats-sums", _FOLDER, _sources, reorder_sums=True)
