"""Apply Hadamard transforms along the reduction axis of a matmul.

Multiplying both operands by the same orthogonal matrix along the axis that they share does not
change their product. The transform spreads an outlier over its neighbors, so that a block's scale
suits the other values better. The matrix is block diagonal, with d x d blocks diag(s) H / sqrt(d).
H is Sylvester's matrix: its entry i, j is (-1)^n, where n is the number of one bits that i and j
have in common. The numbers s_i are signs:

    y_j = sum_i x_i s_i H_ij / sqrt(d)

There are three kinds of signs: all +1 ("deterministic"); signs that are fixed for a run, which are
drawn from a given seed or are the 16 signs of Transformer Engine for NVFP4 (arXiv 2509.25149
applies them to both operands of wgrad); and "random" signs, which are drawn for each call from a
seed given to the call.

On every device, the sum is taken in float32 from i = 0 upward, with one rounding per addition. It
is then multiplied by 1 / sqrt(d) and rounded to the tensor's dtype.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.fake_quant.fused import dispatch
from megatron.fake_quant.operator_rules import (
    NAMESPACE,
    batch_first,
    is_direct,
    seed_tensor,
    without_gradient,
)
from megatron.fake_quant.random_bits import SEEDS, check_seed
from megatron.fake_quant.reference import store
from megatron.fake_quant.rounding import check_tensor

#: Signs of the Hadamard transform in Transformer Engine's NVFP4 recipe.
NVFP4_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_NAMED_SIGNS = ("none", "nvfp4", "random")


@dataclass(frozen=True, slots=True)
class Hadamard:
    """Hadamard transform of each block of `size` consecutive values along an axis.

    size: d, a power of two from 2 to 256, which must divide the axis.
    signs: "none", "nvfp4" (size 16 only), a seed from which the signs are drawn, or "random" for
        signs that each call draws from a seed of its own.
    """

    size: int = 16
    signs: Literal["none", "nvfp4", "random"] | int = "none"

    def __post_init__(self) -> None:
        if not 2 <= self.size <= 256 or self.size & (self.size - 1):
            raise ValueError(
                f"a Hadamard transform of size {self.size}; choose a power of two from 2 to 256"
            )
        if self.signs == "nvfp4" and self.size != len(NVFP4_SIGNS):
            raise ValueError(
                f"the signs 'nvfp4' are for size {len(NVFP4_SIGNS)}, not {self.size}; "
                "give a seed instead"
            )
        if isinstance(self.signs, int) and not isinstance(self.signs, bool):
            valid = 0 <= self.signs < SEEDS
        else:
            valid = self.signs in _NAMED_SIGNS
        if not valid:
            raise ValueError(
                f"unknown signs {self.signs!r}; choose {', '.join(_NAMED_SIGNS)} or a seed from 0 "
                "to 2^62 - 1"
            )

    @property
    def random(self) -> bool:
        """True if each call draws the signs anew."""
        return self.signs == "random"

    def drawn(self, seed: int) -> "Hadamard":
        """Return this transform with its random signs drawn from `seed`."""
        return replace(self, signs=seed) if self.random else self

    def matrix(self) -> Tensor:
        """Return the matrix diag(s) H without the factor 1 / sqrt(d), as float32 `[d, d]`.

        All of its entries are +1 or -1.

        Raises:
            ValueError: if each call draws the signs anew.
        """
        index = torch.arange(self.size, device="cpu")
        common = index.unsqueeze(1) & index
        odd = torch.zeros_like(common)
        for bit in range(self.size.bit_length()):
            odd ^= common >> bit & 1
        return self._signs().unsqueeze(1) * (1 - 2 * odd).float()

    def _signs(self) -> Tensor:
        if self.signs == "none":
            return torch.ones(self.size, dtype=torch.float32, device="cpu")
        if self.signs == "nvfp4":
            return torch.tensor(NVFP4_SIGNS, dtype=torch.float32, device="cpu")
        if self.signs == "random":
            raise ValueError(
                "the signs of a random Hadamard transform are drawn for each call; give the call's "
                "seed"
            )
        generator = torch.Generator().manual_seed(self.signs)
        return (
            1 - 2 * torch.randint(0, 2, (self.size,), generator=generator, device="cpu")
        ).float()

    def apply(self, x: Tensor, axis: int = -1, *, seed: int | Tensor | None = None) -> Tensor:
        """Return a new tensor: `x` (float32, bfloat16 or float16) transformed along `axis`.

        The gradient is zero, as in `fake_quantize`. `seed` is the seed of random signs, from 0 to
        2^62 - 1, and may be an int64 tensor without dimensions. It is ignored if the signs are not
        random.

        Raises:
            ValueError: if `x` has a different dtype, if the size does not divide the axis, if the
                axis is out of range, or if the signs are random and there is no seed.
        """
        return self._times(x, axis, seed, inverse=False)

    def filled(self, x: Tensor, axis: int) -> Tensor:
        """Return `x`, zero-padded at the end of `axis` to a multiple of the transform's size."""
        missing = -x.shape[axis] % self.size
        if missing == 0:
            return x
        zeros = x.new_zeros([missing if i == axis % x.ndim else n for i, n in enumerate(x.shape)])
        return torch.cat([x, zeros], dim=axis)

    def invert(self, x: Tensor, axis: int = -1, *, seed: int | Tensor | None = None) -> Tensor:
        """Undo `apply` along `axis`, up to rounding."""
        return self._times(x, axis, seed, inverse=True)

    def _times(self, x: Tensor, axis: int, seed: int | Tensor | None, *, inverse: bool) -> Tensor:
        check_tensor(x, "transform")
        if x.ndim == 0:
            raise ValueError(
                "a Hadamard transform runs along an axis, and the tensor has none; give a tensor "
                f"with an axis whose length is a multiple of {self.size}"
            )
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(
                f"axis {axis} is out of range for a tensor of shape {tuple(x.shape)}; "
                f"choose one from {-x.ndim} to {x.ndim - 1}"
            )
        if x.shape[axis] % self.size:
            raise ValueError(
                f"a Hadamard transform of size {self.size} does not divide axis {axis} of a tensor "
                f"of shape {tuple(x.shape)}; choose a size that does, or another axis"
            )
        x = x.detach()
        if is_direct(x):
            if seed is not None:
                check_seed(seed)
            transform = self if seed is None else self.drawn(int(seed))
            return _rotated(x, transform, axis, inverse=inverse)
        axis = axis % x.ndim - x.ndim
        result: Tensor
        if self.random and seed is not None:
            result = _rotate_at_random(x, self.size, seed_tensor(seed), axis, inverse)
        else:
            result = _rotate(x, self.size, str(self.signs), axis, inverse)
        return result


def _rotated(x: Tensor, transform: Hadamard, axis: int, *, inverse: bool) -> Tensor:
    """Return `x` transformed along `axis`, whose length must be a multiple of `transform.size`."""
    matrix = transform.matrix().t() if inverse else transform.matrix()
    root = 1 / math.sqrt(transform.size)
    factor = float(torch.tensor(root, dtype=torch.float32, device="cpu"))  # rounded to float32
    if x.numel() == 0:
        return torch.empty_like(x)
    if (kernel := dispatch.find_rotation(x)) is not None:
        return kernel(x, matrix, factor, axis % x.ndim)
    blocks = torch.unflatten(x.float().movedim(axis, -1), -1, (-1, transform.size))
    matrix = matrix.to(x.device)
    total = blocks[..., :1] * matrix[0]
    for i in range(1, transform.size):
        total += blocks[..., i : i + 1] * matrix[i]  # products with 1 and -1 are exact
    total *= factor
    return store(total.flatten(-2).movedim(-1, axis), torch.empty_like(x))


@torch.library.custom_op(f"{NAMESPACE}::rotate", mutates_args=())
def _rotate(x: Tensor, size: int, signs: str, axis: int, inverse: bool) -> Tensor:
    """Apply a Hadamard transform with fixed signs (a `torch.library` operator).

    `axis` is counted from the end.
    """
    transform = Hadamard(size, signs if signs in _NAMED_SIGNS else int(signs))  # type: ignore[arg-type]
    return _rotated(x, transform, axis, inverse=inverse)


@_rotate.register_fake
def _(x: Tensor, size: int, signs: str, axis: int, inverse: bool) -> Tensor:
    return torch.empty_like(x)


@_rotate.register_vmap
def _(
    info: Any, in_dims: Any, x: Tensor, size: int, signs: str, axis: int, inverse: bool
) -> tuple[Tensor, int]:
    return _rotate(x.movedim(in_dims[0], 0), size, signs, axis, inverse), 0


without_gradient(_rotate)


@torch.library.custom_op(f"{NAMESPACE}::rotate_at_random", mutates_args=())
def _rotate_at_random(x: Tensor, size: int, seeds: Tensor, axis: int, inverse: bool) -> Tensor:
    """Apply a Hadamard transform with random signs (a `torch.library` operator).

    `seeds` has one seed per sample, in the shape of the leading dimensions that `vmap` has added.
    """
    transform = Hadamard(size, "random")
    if not seeds.ndim:
        return _rotated(x, transform.drawn(int(seeds)), axis, inverse=inverse)
    samples = zip(x.flatten(0, seeds.ndim - 1), seeds.flatten().tolist(), strict=True)
    results = [_rotated(s, transform.drawn(seed), axis, inverse=inverse) for s, seed in samples]
    return torch.empty_like(x).copy_(torch.stack(results).view(x.shape))


@_rotate_at_random.register_fake
def _(x: Tensor, size: int, seeds: Tensor, axis: int, inverse: bool) -> Tensor:
    return torch.empty_like(x)


@_rotate_at_random.register_vmap
def _(
    info: Any, in_dims: Any, x: Tensor, size: int, seeds: Tensor, axis: int, inverse: bool
) -> tuple[Tensor, int]:
    x, seeds = batch_first(info, in_dims, {0: x, 2: seeds})
    return _rotate_at_random(x, size, seeds, axis, inverse), 0


without_gradient(_rotate_at_random)
