"""Read matmul operands that `--collect-tensors codes` saved as quantized codes and scales."""

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
    """Memory-map a file of codes and scales, and return the quantized operand that it contains.

    The method `dequantize` of the result computes the values.

    Args:
        metadata: the fields `codes` and `format` of the file's record.

    Raises:
        UnreadableTensorError: if the file is corrupt or does not contain codes and scales.
    """
    payload = read_payload(path)
    content = payload if isinstance(payload, dict) else {}
    tensor, scales = content.get("tensor"), content.get("scales", {})
    parts = scales if isinstance(scales, dict) else {}
    if not isinstance(tensor, Tensor) or not all(isinstance(x, Tensor) for x in parts.values()):
        raise UnreadableTensorError(path, "holds no codes and scales")
    codes = metadata["codes"]
    # a suffix such as "+H16" stands for a Hadamard transform, which is not part of the format
    name = str(metadata["format"]).partition("+")[0]
    return QuantizedTensor(
        tensor,
        Scales(blocks=parts.get("blocks"), tensor=parts.get("tensor")),
        get_format(name),
        tuple(codes["shape"]),
        int(codes["axis"]),
        getattr(torch, codes["dtype"]),
    )
