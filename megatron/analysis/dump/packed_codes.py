"""Codes and scales of a matmul's operand, as a run stores them on request (`--collect-tensors
codes`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.analysis.dump.tensor_files import UnreadableTensorError, read_payload
from megatron.fake_quant import get_format
from megatron.fake_quant.packing import QuantizedTensor
from megatron.fake_quant.scales import Scales


def read_codes(path: Path, metadata: dict[str, Any]) -> QuantizedTensor:
    """The operand of a `..._codes` file, memory-mapped; `dequantize` gives its values.

    Args:
        path: of the file.
        metadata: its record's `codes` and `format`.

    Raises:
        UnreadableTensorError: the file is corrupt, or is not what its record says.
    """
    content = read_payload(path)
    held = content if isinstance(content, dict) else {}
    tensor, scales = held.get("tensor"), held.get("scales", {})
    parts = scales if isinstance(scales, dict) else {}
    if not isinstance(tensor, Tensor) or not all(isinstance(x, Tensor) for x in parts.values()):
        raise UnreadableTensorError(path, "holds no codes and scales")
    codes = metadata["codes"]
    name = str(metadata["format"]).partition("+")[0]  # a Hadamard transform is done before
    return QuantizedTensor(
        tensor,
        Scales(blocks=parts.get("blocks"), tensor=parts.get("tensor")),
        get_format(name),
        tuple(codes["shape"]),
        int(codes["axis"]),
        getattr(torch, codes["dtype"]),
    )
