"""Results of public programs for some tensors; `tests/data/README.md` names their sources."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import oracle

SCALED = dict(np.load(oracle.DATA / "reference_scaled_formats.npz"))
HYBRID = dict(np.load(oracle.DATA / "reference_hif8_hybrid.npz"))
KINDS = sorted({name.partition("/")[0] for name in SCALED} - {"scale"})


def tensor(kind: str, dtype: str = "float32") -> Tensor:
    return torch.from_numpy(SCALED[f"{kind}/x"]).to(getattr(torch, dtype))


def expected(kind: str, dtype: str, what: str) -> NDArray[np.generic]:
    return SCALED[f"{kind}/{dtype}/{what}"]


def expected_nibbles(kind: str, dtype: str, name: str) -> NDArray[np.uint8]:
    """Return sign and element of each value.

    Both references turn -0.0 into 0.0 and keep the sign of an underflow; the package keeps both."""
    packed = SCALED[f"{kind}/{dtype}/{name}/codes"]
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    x = tensor(kind, dtype).float().numpy()
    return np.where((x == 0) & np.signbit(x), codes | 8, codes)


def nibbles(packed: Tensor) -> NDArray[np.uint8]:
    codes = packed.numpy()
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
