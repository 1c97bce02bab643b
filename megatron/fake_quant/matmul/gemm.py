"""Define one autograd function for every quantized matmul: linear, QK^T and PV.

All three compute C = alpha A B^T, with or without leading batch dimensions:

    linear  y = x W^T        A = x [tokens, in]        B = W [out, in]
    QK^T    S = scale Q K^T  A = Q [queries, head_dim] B = K [keys, head_dim]
    PV      O = P V          A = P [queries, keys]     B = V^T [head_dim, keys], a view

Their gradients have the same form: dA = alpha dC B and dB = alpha dC^T A. Each of the three GEMMs
quantizes both of its operands along its own reduction axis, by default from the high-precision
tensor. A tensor quantized along K differs from the same tensor quantized along N, and quantizing
the quantized copy again adds a second error. (Transformer Engine's documentation of MXFP8 gives
the same reason for its row-wise and column-wise copies.) Implementations that keep only the
quantized forward copy in memory do quantize it again: an operand of the backward pass with the
source "dequantized" reproduces them.

Operands carry the values of the low-precision format, which are not rounded to the tensors' dtype
(see `unrounded.py`). Products are accumulated as in a matmul of that dtype (in fp32 for bf16 on
every device), and the result has that dtype. If `GemmFormats` sets an accumulator for a GEMM, a
simulation of this accumulator adds up the products instead, in the order of the tensor core (see
`accumulate/product.py`).

Shape suffixes: M for the rows of A, N for the rows of B, K for the axis that they share. Leading
batch dimensions are omitted.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.fake_quant.accumulate.accumulator import Accumulator
from megatron.fake_quant.accumulate.product import accumulated_product
from megatron.fake_quant.accumulate.unit_matrix import unit_matrix
from megatron.fake_quant.formats import Format
from megatron.fake_quant.matmul.autocast import autocast_of
from megatron.fake_quant.matmul.gemm_formats import AXES, GEMM_SLOTS, OF_FORWARD, GemmFormats
from megatron.fake_quant.matmul.hadamard import Hadamard
from megatron.fake_quant.matmul.mean_split import SplitMatrix, with_means
from megatron.fake_quant.matmul.operand import AS_IT_IS, Operand
from megatron.fake_quant.matmul.products import (
    Matmul,
    matmul,
    matmul_then_scale,
    multiply,
    product_dtype,
)
from megatron.fake_quant.matmul.unrounded import quantize_parts
from megatron.fake_quant.operator_rules import derive_seeds, drawn, is_direct, seed_tensor
from megatron.fake_quant.random_bits import derive_seed, draw_seed

#: Callback that receives an operand's slot (such as fprop_a), the tensor (split and transformed,
#: not yet quantized), its `Operand`, the reduction axis, the seed and the given amax (or None).
Observer = Callable[[str, Tensor, Operand, int, int | Tensor | None, Tensor | None], None]
#: Callback that receives an operand's slot, the tensor (split and transformed, not yet quantized)
#: and its format, and returns the amax from which the scale of the tensor is computed.
AmaxCallback = Callable[[str, Tensor, Format], Tensor]


class _QuantizedMatmul(torch.autograd.Function):
    """Autograd function behind `quantized_matmul`; see the module's docstring.

    The main result is C. The backward pass may also need the quantized operands of the forward pass
    (see `_Call.keeps`). They are returned too, each as its values and their scale, because
    `torch.func` lets a function save only its inputs and results.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a_MK: Tensor,
        b_NK: Tensor,
        whole_MK: Tensor | None,
        sums_M1: Tensor | None,
        seed: Tensor | None,
        call: "_Call",
    ) -> tuple[Tensor, ...]:
        call = call.seeded(seed)
        left = SplitMatrix(a_MK if whole_MK is None else whole_MK)
        c_MN, a, b = call.multiplied("fprop", left, SplitMatrix(b_NK), matmul)
        if sums_M1 is not None:
            c_MN = (c_MN / sums_M1).to(c_MN.dtype)
        keep_a, keep_b = call.keeps(whole_MK)
        results = [c_MN]
        if keep_a:
            results += _kept(a, sums_M1)
        if keep_b:
            results += _kept(b, None)
        return tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        a_MK, b_NK, whole_MK, _, seed, call = inputs
        ctx.call = call
        # The backward pass runs in the forward pass's autocast state, as in megatron-core.
        ctx.device = a_MK.device.type
        ctx.autocast = autocast_of(ctx.device)
        kept = list(output[1:])
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)  # allocate no zero gradients for the saved operands
        ctx.dtypes = a_MK.dtype, b_NK.dtype
        keep_a, keep_b = call.keeps(whole_MK)
        of_a = (kept.pop(0), kept.pop(0)) if keep_a else (a_MK, None)
        of_b = (kept.pop(0), kept.pop(0)) if keep_b else (b_NK, None)
        ctx.save_for_backward(*of_a, *of_b, seed)

    @staticmethod
    def backward(ctx: Any, dc_MN: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.autocast is None or ctx.autocast == autocast_of(ctx.device):
            return _QuantizedMatmul._gradients(ctx, dc_MN)
        enabled, dtype = ctx.autocast
        with torch.autocast(ctx.device, enabled=enabled, dtype=dtype):
            return _QuantizedMatmul._gradients(ctx, dc_MN)

    @staticmethod
    def _gradients(ctx: Any, dc_MN: Tensor) -> tuple[Tensor | None, ...]:
        a_MK, scale_a, b_NK, scale_b, seed = ctx.saved_tensors
        call: _Call = ctx.call.seeded(seed)
        da_MK = db_NK = None
        dc = SplitMatrix(dc_MN)
        if ctx.needs_input_grad[0]:
            da_MK = call.gradient("dgrad", dc, _saved(b_NK, scale_b, ctx.dtypes[1]))
        if ctx.needs_input_grad[1]:
            db_NK = call.gradient("wgrad", dc, _saved(a_MK, scale_a, ctx.dtypes[0]))
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            kept = scale_a is not None or scale_b is not None
            sources = (dc_MN, a_MK, b_NK)
            if da_MK is not None and call.rounds("dgrad"):
                da_MK = _constant(da_MK, sources, kept=kept)
            if db_NK is not None and call.rounds("wgrad"):
                db_NK = _constant(db_NK, sources, kept=kept)
        return da_MK, db_NK, None, None, None, None


_NO_SECOND = (
    "a quantized matmul has no second derivative; compute gradients of gradients "
    "(create_graph=True, a gradient penalty, a Hessian) without formats"
)


def _constant(gradient: Tensor, sources: tuple[Tensor, ...], *, kept: bool) -> Tensor:
    """Return `gradient` so that computing its derivative with respect to `sources` is an error.

    Args:
        gradient: gradient of a quantized matmul.
        sources: tensors from which it was computed.
        kept: True if one of the sources is a quantized copy, to which autograd has no connection.

    Raises:
        ValueError: if there is such a copy, and the derivative may be computed later.
    """
    transformed = torch._C._are_functorch_transforms_active()
    if kept and (_gradients_of_gradients() if transformed else True):
        raise ValueError(_NO_SECOND)
    if not transformed:  # otherwise, a source of an outer transform seems to need no gradient
        sources = tuple(x for x in sources if x.requires_grad)
    if not sources:
        return gradient
    result: Tensor = _ConstantGradient.apply(gradient, *sources)  # type: ignore[no-untyped-call]
    return result


def _gradients_of_gradients() -> bool:
    """Return whether transforms of `torch.func` that compute gradients are nested."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    kind = torch._C._functorch.TransformType.Grad
    return sum(level.key() == kind for level in stack) > 1


class _ConstantGradient(torch.autograd.Function):
    """Function that returns a gradient unchanged and refuses to compute its derivative.

    Quantization rounds, so the derivative of a gradient from quantized operands is zero almost
    everywhere, and no format defines another one. Without this function, autograd would silently
    use zero.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        raise ValueError(_NO_SECOND)


# `torch.autograd.Function.apply` calls `inspect.signature` each time (torch 2.13). This takes 20
# microseconds unless the function has this attribute; quantizing a small operand takes 70.
_QuantizedMatmul.forward.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    _QuantizedMatmul.forward
)


def _kept(operand: "SplitMatrix | _Prepared", sums_M1: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a quantized operand's values and scale; divide the rows by `sums_M1`, if given.

    The scale is empty if it is 1.
    """
    matrix = operand.quantized() if isinstance(operand, _Prepared) else operand
    matrix = matrix.joined()
    values, scale = matrix.values, matrix.scale
    if sums_M1 is not None:
        values, scale = matrix.dense(), None
        values = (values / sums_M1).to(values.dtype)
    return values, values.new_empty(0) if scale is None else scale


def _saved(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> SplitMatrix:
    """Return an operand of the forward pass that was saved for the backward pass."""
    none = scale is None or (scale.dim() == 1 and scale.numel() == 0)
    return SplitMatrix(values, scale=None if none else scale, dtype=dtype)


class _Prepared(NamedTuple):
    """Operand of a GEMM that is split and transformed, but not yet quantized."""

    parts: SplitMatrix
    axis: int  #: reduction axis
    format: Format | None = None  #: None if `parts` are multiplied as they are
    seed: int | Tensor | None = None
    amax: Tensor | None = None

    @property
    def empty(self) -> bool:
        """True if the operand has no values."""
        return self.parts.values.numel() == 0

    def quantized(self) -> SplitMatrix:
        """Return the operand with its values quantized."""
        if self.format is None:
            return self.parts
        dtype = self.parts.dtype
        return quantize_parts(
            self.parts, self.format, self.axis, seed=self.seed, amax=self.amax, dtype=dtype
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments that the forward pass and the backward pass of one quantized matmul share."""

    formats: GemmFormats
    alpha: float
    seed: int | Tensor | None
    observe: Observer | None = None
    amax_of: AmaxCallback | None = None

    def seeded(self, seed: Tensor | None) -> "_Call":
        """Return these arguments with the tensor `seed` as their seed, unless `seed` is None.

        Such a seed is an input of the autograd function, so that `vmap` can make it differ between
        samples.
        """
        return self if seed is None else replace(self, seed=seed)

    def rounds(self, gemm: str) -> bool:
        """Return whether a GEMM has a quantized operand or a simulated accumulator.

        An operand may also be a quantized copy from the forward pass.
        """
        operands = [self.formats.effective(slot) for slot in GEMM_SLOTS[gemm]]
        quantized = any(x.format is not None or x.source == "dequantized" for x in operands)
        return quantized or self.formats.simulated_accumulator(gemm) is not None

    def multiplied(
        self, gemm: str, left: SplitMatrix, right: SplitMatrix, plain: Matmul
    ) -> tuple[Tensor, SplitMatrix | _Prepared, SplitMatrix | _Prepared]:
        """Return the product of a GEMM, multiplied by `alpha`, and the two operands of the GEMM.

        The operands are not yet quantized as matrices if an accumulator has read their elements.
        `plain` multiplies tensors that need neither scales nor an accumulator.
        """
        (slot_a, slot_b), (axis_a, axis_b) = GEMM_SLOTS[gemm], AXES[gemm]
        # A zip over the operands would fail in torch.compile of torch 2.6 if `prepared` breaks the
        # graph.
        a = self.prepared(slot_a, left, axis=axis_a)
        b = self.prepared(slot_b, right, axis=axis_b)
        accumulator = self.formats.simulated_accumulator(gemm)
        if accumulator is not None and not (a.empty or b.empty):
            return _accumulated(a, b, accumulator, self.alpha), a, b
        of_a, of_b = a.quantized(), b.quantized()
        left = of_a if a.axis == -1 else of_a.t()
        right = of_b.t() if b.axis == -1 else of_b
        product = with_means(multiply(left, right, self.alpha, plain), left, right, self.alpha)
        return product, of_a, of_b

    def prepared(self, slot: str, matrix: SplitMatrix, *, axis: int) -> _Prepared:
        """Split and transform the operand `slot`, and show it to the observer.

        `matrix` is a tensor, or an operand of the forward pass; see `keeps`.
        """
        operand: Operand = getattr(self.formats, slot)
        forward = OF_FORWARD[slot] if operand.source == "dequantized" else None
        rotated = forward is not None and getattr(self.formats, forward).hadamard is not None
        if not (operand.changes_values or rotated):
            return _Prepared(matrix, axis)
        x, dtype = matrix.dense(), matrix.dtype or matrix.values.dtype
        if forward is not None:
            x = getattr(self.formats, forward).rotated_back(x, signs=self._signs(forward, x))
        # Both operands of wgrad are padded with the same number of zeros, which does not change the
        # sum over tokens.
        signs = self._signs(slot, x)
        parts = operand.prepared(x, axis=axis, fill=slot.startswith("wgrad"), signs=signs)
        parts = parts._replace(dtype=dtype)
        if operand.format is None:
            return _Prepared(parts, axis)
        seed = self._derived(slot, x) if operand.format.stochastic else None
        amax = None
        if self.amax_of is not None and operand.format.amax_source != "own":
            amax = self.amax_of(slot, parts.values, operand.format)
        if self.observe is not None:
            self.observe(slot, parts.values, operand.drawn(signs), axis, seed, amax)
        return _Prepared(parts, axis, operand.format, seed, amax)

    def keeps(self, whole_MK: Tensor | None) -> tuple[bool, bool]:
        """Return whether the backward pass needs quantized A, and whether it needs quantized B."""
        formats = self.formats
        changed_a = formats.fprop_a != AS_IT_IS or whole_MK is not None
        changed_b = formats.fprop_b != AS_IT_IS
        through = formats.straight_through
        return (
            changed_a and (through or formats.wgrad_a.source == "dequantized"),
            changed_b and (through or formats.dgrad_b.source == "dequantized"),
        )

    def _signs(self, slot: str, x: Tensor) -> int | Tensor | None:
        """Return the seed of the random signs that `slot` shares with the GEMM's other operand.

        The result is None if the operand `slot` has no transform with random signs.
        """
        hadamard: Hadamard | None = getattr(self.formats, slot).hadamard
        if hadamard is None or not hadamard.random:
            return None
        return self._derived(slot.partition("_")[0], x)

    def _derived(self, name: str, x: Tensor) -> int | Tensor:
        """Return a seed for the slot or GEMM `name`, as an int if `x` is a plain tensor."""
        if self.seed is None:
            return draw_seed(None) if is_direct(x) else drawn(None)
        if is_direct(x):
            return derive_seed(int(self.seed), name)
        derived: Tensor = derive_seeds(seed_tensor(self.seed), name)
        return derived

    def gradient(self, gemm: str, left: SplitMatrix, right: SplitMatrix) -> Tensor:
        """Return the gradient of A or B, which is the product of the GEMM `gemm`.

        A straight-through backward pass multiplies the forward pass's operands, whose transform
        along K is undone in the product.
        """
        grad, _, _ = self.multiplied(gemm, left, right, matmul_then_scale)
        if not self.formats.straight_through:
            return grad
        return self.formats.fprop_a.rotated_back(grad, signs=self._signs("fprop_a", grad))


def _accumulated(a: _Prepared, b: _Prepared, accumulator: Accumulator, alpha: float) -> Tensor:
    """Return `alpha` times the product of two operands, as a unit with `accumulator` sums it."""
    left, right = (
        unit_matrix(x.parts.values, x.format, x.axis, accumulator, seed=x.seed, amax=x.amax)
        for x in (a, b)
    )
    dtype = product_dtype(a.parts, b.parts)
    return accumulated_product(left, right, accumulator, alpha).to(dtype)


def quantized_matmul(
    a_MK: Tensor,
    b_NK: Tensor,
    formats: GemmFormats,
    *,
    alpha: float = 1.0,
    seed: int | Tensor | None = None,
    unnormalized: tuple[Tensor, Tensor] | None = None,
    observe: Observer | None = None,
    amax_of: AmaxCallback | None = None,
) -> Tensor:
    """Return `alpha * A @ B^T`; fake-quantize the operands of this GEMM and of both gradients.

    Args:
        a_MK: A, with the shape `[..., M, K]`. All tokens form one axis, so blocks along M run over
            `[s, b]` jointly.
        b_NK: B, with the shape `[..., N, K]` and the same leading dimensions as A.
        formats: transform and format of each operand.
        alpha: factor by which the accumulated products are multiplied.
        seed: seed from which a seed for each slot's stochastic rounding and for each GEMM's random
            signs is derived. If None, seeds are drawn from torch's default generator.
        unnormalized: e = exp(s - rowmax), `[..., M, K]`, and its row sums, `[..., M, 1]` (float32),
            where A = e / sums. This computes PV as flash-attention kernels do: C is
            Q(e) Q(B)^T / sums. The backward pass uses A, which these kernels recompute.
        observe: function that is called with each operand before it is quantized.
        amax_of: function that is called with each operand whose format demands an amax, in the
            forward and in the backward pass, even if the operand is empty. It returns the amax.

    Returns:
        C, with the shape `[..., M, N]` and the dtype of the operands.

    Raises:
        ValueError: if the shapes of A and B do not match, if a format demands an amax and there is
            no `amax_of`, if the formats are not a `GemmFormats`, or if they are for attention in
            tiles. Differentiating the gradients also raises ValueError if their operands are
            quantized.
    """
    if not isinstance(formats, GemmFormats):
        raise ValueError(
            f"formats={formats!r}; give a GemmFormats, such as GemmFormats.uniform("
            "get_format('mxfp8'))"
        )
    if formats.tiling is not None:
        raise ValueError(
            f"the formats are for attention in {formats.tiling}; pass them to tiled_attention, or "
            "leave the tiling out for whole matrices"
        )
    if a_MK.dim() < 2 or a_MK.dim() != b_NK.dim() or a_MK.shape[-1] != b_NK.shape[-1]:
        raise ValueError(
            f"A {tuple(a_MK.shape)} and B {tuple(b_NK.shape)} do not fit; "
            "A is [..., M, K] and B is [..., N, K] with equal leading dimensions"
        )
    if a_MK.shape[:-2] != b_NK.shape[:-2]:
        raise ValueError(
            f"leading dimensions differ: A {tuple(a_MK.shape)}, B {tuple(b_NK.shape)}; "
            "expand the smaller one first, so that autograd sums its gradient over these dimensions"
        )
    whole_MK, sums_M1 = (None, None) if unnormalized is None else unnormalized
    # The operands of a GEMM need the same random signs, and the backward pass may undo those of the
    # forward pass, so draw one seed for all signs.
    if seed is None and formats.random_signs:
        seed = draw_seed(None) if is_direct(a_MK) else drawn(None)
    tensor_seed, int_seed = (seed, None) if isinstance(seed, Tensor) else (None, seed)
    call = _Call(formats, alpha, int_seed, observe, amax_of)
    results: tuple[Tensor, ...] = _QuantizedMatmul.apply(  # type: ignore[no-untyped-call]
        a_MK, b_NK, whole_MK, sums_M1, tensor_seed, call
    )
    return results[0]
