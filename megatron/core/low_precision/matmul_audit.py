"""List which matmuls of a model are quantized, in which formats, and where each format was set.

A recipe is a request, and this list, the audit, shows its effect on the model that was built. The
audit covers every module that multiplies matrices, with the formats of the operands of its three
GEMMs. It also computes which share of the floating-point operations of all matmuls is quantized. A
GEMM counts as quantized if both of its operands are quantized.

Operations are counted for one token. Attention multiplies whole matrices, causal or not, and each
expert gets its share of the tokens. Embedding, norms and softmax have no matmul.
"""

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from megatron.collection.module_identity import natural_order, transformer_layers, unwrapped
from megatron.core.low_precision.quantized_module import Quantized
from megatron.core.low_precision.transformer_engine import TransformerEngineLayer
from megatron.core.transformer import attention_tiles
from megatron.core.transformer.enums import AttnMaskType
from megatron.fake_quant.matmul.gemm_formats import GEMM_SLOTS, SLOTS, GemmFormats
from megatron.fake_quant.matmul.operand import AS_IT_IS, Operand
from megatron.fake_quant.recipe.operands import GEMMS

#: Marks of attention whose mask is not causal: no key is hidden, or the mask depends on the data.
ALL_VISIBLE, MASK_NOT_SAVED = "all keys visible", "mask not saved"
#: Mark of a matmul of Transformer Engine, whose formats are not visible.
TRANSFORMER_ENGINE = "computed by Transformer Engine"
_LAYER = re.compile(r"(?<=layers\.)\d+")


@dataclass(frozen=True, slots=True)
class Softmax:
    """Parameters of the operations between QK^T and PV: scaling, mask, softmax and dropout."""

    scale: float  #: factor by which QK^T is multiplied
    coefficient: float | None  #: additional factor of QK^T, applied before masking; None means 1
    #: numbers of keys that a query sees before and after itself; None without a sliding window
    window: tuple[int, int] | None
    dropout: float
    kind: str  #: type of softmax: vanilla, off-by-one or learnable
    in_fp32: bool

    @classmethod
    def of(cls, attention: torch.nn.Module) -> "Softmax":
        """Return the softmax parameters of a `DotProductAttention`."""
        softmax, context = attention.scale_mask_softmax, attention.context
        window = softmax.window_size if context is None else context.window_size
        return cls(
            scale=attention.softmax_scale,
            coefficient=softmax.scale,
            window=None if window is None else (window[0], window[1]),
            dropout=attention.attention_dropout.p,
            kind=attention.config.softmax_type,
            in_fp32=softmax.softmax_in_fp32,
        )


@dataclass(frozen=True, slots=True)
class Matmul:
    """Audit entry: formats of a module's operation (linear, qk or pv) and where they were set."""

    module: str  #: name of the module in the whole model
    operation: str  #: linear, qk (QK^T) or pv (PV)
    flops: float  #: number of FLOPs per token of one of the three GEMMs
    gemms: tuple[str, ...]  #: formats of the operands of each GEMM
    quantized: int  #: number of GEMMs with both operands quantized
    source: str  #: text that says where the formats were set
    slots: tuple[str, ...]  #: effective format of each operand, in the order of SLOTS
    marks: tuple[str, ...] = ()  #: properties of the matmul that the formats do not show
    softmax: Softmax | None = None  #: softmax after QK^T; None for other operations

    @property
    def summary(self) -> str:
        """Formats of the three GEMMs in one line, or the format that all operands share."""
        if TRANSFORMER_ENGINE in self.marks:
            return TRANSFORMER_ENGINE
        if len(set(self.gemms)) == 1 and len(set(self.gemms[0].split(" x "))) == 1:
            shared = self.gemms[0].split(" x ")[0]
            summary = "high precision" if shared == str(AS_IT_IS) else shared
        else:
            named = zip(GEMMS[self.operation], self.gemms, strict=True)
            summary = ", ".join(f"{gemm} {operands}" for gemm, operands in named)
        return " ".join([summary, *(f"({mark})" for mark in _joined(self.marks))])


def _joined(marks: Sequence[str]) -> list[str]:
    """Return a matmul's marks, with all marks about accumulators joined into one.

    An example is `fprop and dgrad accumulated in hopper_fp8, wgrad in fp32`.
    """
    others, gemms = [], {}
    for mark in marks:
        gemm, separator, name = mark.partition(" accumulated in ")
        if separator:
            gemms.setdefault(name, []).append(gemm)
        else:
            others.append(mark)
    parts = ", ".join(f"{' and '.join(of_name)} in {name}" for name, of_name in gemms.items())
    return [*others, parts.replace(" in ", " accumulated in ", 1)] if parts else others


def matmuls(chunks: Sequence[torch.nn.Module], seq_length: int, iteration: int) -> list[Matmul]:
    """Return the audit entries of this rank's matmuls at `iteration`, counted from 1."""
    results = []
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Quantized) and module.identity is not None:
                for operation in module.operations:
                    plan = module.plan_of(operation)
                    formats = plan.at(iteration)
                    if operation == "pv":
                        formats = _with_tiles(module, formats, seq_length, iteration)
                    results.append(
                        _matmul(
                            module.identity.name,
                            operation,
                            _flops(module, operation, seq_length),
                            formats,
                            plan.source_at(iteration),
                            Softmax.of(module) if operation == "qk" else None,
                            _mask_of(module) if operation == "qk" else (),
                        )
                    )
            elif isinstance(module, TransformerEngineLayer) and module.identity is not None:
                results += [
                    _of_transformer_engine(module, operation, seq_length)
                    for operation in module.operations
                ]
        for local_name, layer in transformer_layers(chunk):
            name = re.sub(r"\d+$", str(layer.layer_number - 1), local_name)
            for path, module in layer.named_modules(prefix=name):
                if path.endswith(".router"):
                    flops = 2.0 * module.weight.numel()
                    why = "routers stay in high precision"
                    results.append(_matmul(unwrapped(path), "linear", flops, None, why))
    return results


def _of_transformer_engine(
    module: TransformerEngineLayer, operation: str, seq_length: int
) -> Matmul:
    """Return the audit entry of a matmul of Transformer Engine."""
    why = "collected, with formats of its own that are not visible"
    flops = module.flops(operation, seq_length)
    result = _matmul(module.identity.name, operation, flops, None, why)
    return replace(result, marks=(TRANSFORMER_ENGINE,))


def _with_tiles(
    module: Quantized, pv: GemmFormats | None, seq_length: int, iteration: int
) -> GemmFormats | None:
    """Return the formats of PV with the tiles in which attention runs for this sequence length."""
    if pv is not None and pv.tiling is not None:
        return pv
    matmuls = {"qk": module.plan_of("qk").at(iteration), "pv": pv}
    queries = seq_length // module.config.context_parallel_size
    tiling, _ = attention_tiles.default(module, matmuls, queries, seq_length)
    if tiling is None:
        return pv
    return replace(GemmFormats() if pv is None else pv, tiling=tiling)


def note_mask(attention: torch.nn.Module, mask: torch.Tensor | None) -> None:
    """Note for the audit whether the mask of a forward pass can be recomputed.

    Args:
        attention: a `DotProductAttention`.
        mask: mask that is given to this layer, True where a key is hidden.
    """
    if _mask_follows_positions(attention):
        return
    if attention.scale_mask_softmax.attn_mask_type == AttnMaskType.causal:
        causal = mask is None or bool((mask == torch.ones_like(mask).triu(1)).all())
        attention.mask_mark = None if causal else MASK_NOT_SAVED
    else:
        visible = mask is None or not bool(mask.any())
        attention.mask_mark = ALL_VISIBLE if visible else MASK_NOT_SAVED


def _mask_follows_positions(attention: torch.nn.Module) -> bool:
    """Return whether positions determine the mask (context parallelism or a sliding window)."""
    return attention.context is not None or attention.scale_mask_softmax.window_size is not None


def _mask_of(attention: torch.nn.Module) -> tuple[str, ...]:
    """Return the audit's mark for the mask of an attention layer, or () if it needs none."""
    mark = MASK_NOT_SAVED
    if _mask_follows_positions(attention):
        return ()
    if hasattr(attention, "mask_mark"):
        mark = attention.mask_mark
    elif attention.scale_mask_softmax.attn_mask_type == AttnMaskType.causal:
        mark = None
    return () if mark is None else (mark,)


def _matmul(
    module: str,
    operation: str,
    flops: float,
    formats: GemmFormats | None,
    source: str,
    softmax: Softmax | None = None,
    mask: tuple[str, ...] = (),
) -> Matmul:
    formats = GemmFormats() if formats is None else formats
    operands = [formats.effective(slot) for slot in SLOTS]
    pairs = [operands[index : index + 2] for index in (0, 2, 4)]
    marks = {
        "straight-through": formats.straight_through,
        "unnormalized probabilities": formats.unnormalized,
        str(formats.tiling): formats.tiling is not None,
    }
    return Matmul(
        module,
        operation,
        flops,
        gemms=tuple(" x ".join(map(str, pair)) for pair in pairs),
        quantized=sum(all(map(_is_quantized, pair)) for pair in pairs),
        source=source,
        slots=tuple(map(str, operands)),
        softmax=softmax,
        marks=(
            *mask,
            *(mark for mark, applies in marks.items() if applies),
            *_accumulated(operation, formats),
        ),
    )


def _accumulated(operation: str, formats: GemmFormats) -> list[str]:
    """Return the audit's marks about the accumulators of a matmul's GEMMs."""
    named = formats.accumulators
    if len(named) == len(GEMM_SLOTS) and len(set(named.values())) == 1:
        return [f"accumulated in {named['fprop'].name}"]
    names = dict(zip(GEMM_SLOTS, GEMMS[operation], strict=True))
    return [f"{names[gemm]} accumulated in {named[gemm].name}" for gemm in named]


def _is_quantized(operand: Operand) -> bool:
    """Return whether a GEMM multiplies quantized values of an operand."""
    return operand.format is not None or operand.source == "dequantized"


def _flops(module: Quantized, operation: str, seq_length: int) -> float:
    """Return the number of FLOPs per token of one GEMM, over all shards of the module."""
    config = module.config
    if operation == "linear":
        flops = 2.0 * module.input_size * module.output_size
        if module.is_expert:
            flops *= config.moe_router_topk / config.num_moe_experts
        return flops
    head_dim = config.kv_channels
    if getattr(config, "multi_latent_attention", False):
        qk_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
        head_dim = qk_dim if operation == "qk" else config.v_head_dim
    return 2.0 * seq_length * head_dim * config.num_attention_heads


def of_whole_model(
    chunks: Sequence[torch.nn.Module], seq_length: int, iteration: int = 1
) -> list[Matmul]:
    """Return the audit entries of all ranks without duplicates, sorted by module name.

    Must be called on all ranks.
    """
    own = matmuls(chunks, seq_length, iteration)
    parts = [own]
    if torch.distributed.is_initialized():
        parts = [[] for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(parts, own)
    whole = {(matmul.module, matmul.operation): matmul for part in parts for matmul in part}
    return sorted(whole.values(), key=lambda matmul: natural_order(matmul.module))


def share(results: Iterable[Matmul]) -> float:
    """Return the quantized share of all matmul FLOPs, forward and backward."""
    results = list(results)
    total = sum(3 * matmul.flops for matmul in results)
    quantized = sum(matmul.quantized * matmul.flops for matmul in results)
    return quantized / total if total else 0.0


def table(results: Sequence[Matmul]) -> list[str]:
    """Return the audit as a table with one line per matmul; equal layers share a line."""
    groups = _equal_layers(results, lambda matmul: (matmul.summary, matmul.source))
    rows = [
        (modules, matmul.operation, matmul.summary, matmul.source) for modules, matmul in groups
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1, 2)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]


def period_for_card(results: Sequence[Matmul], start: int) -> dict[str, Any]:
    """Return the run card's entry for the period that begins with iteration `start`."""
    return {
        "iteration": start,
        "share_of_matmul_flops": share(results),
        "matmuls": table(results),
        "operands": for_card(results),
    }


def for_card(results: Sequence[Matmul]) -> list[dict[str, Any]]:
    """Return the audit as plain values for the run card, detailed enough to recompute the matmuls.

    `modules` names one module, or several as in `layers.0-2,5`. `slots` contains the effective
    format of each operand, even for a straight-through backward pass. A matmul cannot be recomputed
    if one of its `marks` is unknown to the reader.
    """
    groups = _equal_layers(
        results, lambda matmul: (matmul.slots, matmul.marks, matmul.softmax, matmul.source)
    )
    return [
        {
            "modules": modules,
            "operation": matmul.operation,
            "slots": dict(zip(SLOTS, matmul.slots, strict=True)),
            "marks": list(matmul.marks),
            "softmax": None if matmul.softmax is None else asdict(matmul.softmax),
            "source": matmul.source,
        }
        for modules, matmul in groups
    ]


def _equal_layers(
    results: Iterable[Matmul], key: Callable[[Matmul], Hashable]
) -> list[tuple[str, Matmul]]:
    """Group the matmuls that are equal except for the layer number; return (name, matmul) pairs.

    Matmuls are equal if `key` returns the same value for them. A name contains all layer numbers of
    its group, as in `layers.0-2,5`.
    """
    groups: dict[Hashable, tuple[list[str], Matmul]] = {}
    for matmul in results:
        name = _LAYER.sub("*", matmul.module, count=1)
        layers, _ = groups.setdefault((name, matmul.operation, key(matmul)), ([], matmul))
        layer = _LAYER.search(matmul.module)
        layers.append(layer[0] if layer else "")
    return [
        (_LAYER.sub(_ranges(layers), matmul.module, count=1), matmul)
        for layers, matmul in groups.values()
    ]


def _ranges(layers: Sequence[str]) -> str:
    """Return layer numbers as ranges: 0, 1, 2 and 5 become `0-2,5`."""
    numbers = sorted({int(layer) for layer in layers if layer})
    runs = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return ",".join(runs)
