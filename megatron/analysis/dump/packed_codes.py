"""Read the codes and scales of a matmul's operand, which `--collect-tensors codes` stores."""

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
    """Return the memory-mapped operand of a `..._codes` file; `dequantize` returns its values.

    Args:
        metadata: the fields `codes` and `format` of the file's record.

    Raises:
        UnreadableTensorError: the file is corrupt, or contradicts its record.
    """
    payload = read_payload(path)
    content = payload if isinstance(payload, dict) else {}
    tensor, scales = content.get("tensor"), content.get("scales", {})
    parts = scales if isinstance(scales, dict) else {}
    if not isinstance(tensor, Tensor) or not all(isinstance(x, Tensor) for x in parts.values()):
        raise UnreadableTensorError(path, "holds no codes and scales")
    codes = metadata["codes"]
    name = str(metadata["format"]).partition("+")[0]  # a Hadamard transform precedes quantization
    return QuantizedTensor(
        tensor,
        Scales(blocks=parts.get("blocks"), tensor=parts.get("tensor")),
        get_format(name),
        tuple(codes["shape"]),
        int(codes["axis"]),
        getattr(torch, codes["dtype"]),
    )
