"""What is quantized, matmul by matmul, read off the model that was built.

A recipe says what should be; this says what is: every module that multiplies matrices, what the
operands of its three GEMMs go through and who said so, and which share of the floating-point
operations of all matmuls that is. A GEMM counts as quantized when both of its operands are.

Operations are those that are carried out for one token: attention multiplies whole matrices, causal
or not, and each expert gets its share of the tokens. Embedding, norms and softmax have no matmul.
"""

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron.collection.module_identity import natural_order, transformer_layers, unwrapped
from megatron.core.low_precision.quantized_module import Quantized
from megatron.fake_quant.gemm import AS_IT_IS, SLOTS, GemmFormats
from megatron.fake_quant.recipe_operands import GEMMS

_LAYER = re.compile(r"(?<=layers\.)\d+")


@dataclass(frozen=True, slots=True)
class Softmax:
    """What one attention layer does between its two matmuls."""

    scale: float  #: that QK^T is multiplied by
    coefficient: float | None  #: that the scores are multiplied by again, before the mask
    window: tuple[int, int] | None  #: keys before and after a query that it sees; None: causal
    dropout: float
    kind: str  #: vanilla, off-by-one or learnable
    in_fp32: bool

    @classmethod
    def of(cls, attention: torch.nn.Module) -> "Softmax":
        """That of a `DotProductAttention`."""
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
    """One operation of one module, forward and backward."""

    module: str  #: name in the whole model
    operation: str  #: linear, qk or pv
    flops: float  #: of one of its three GEMMs, per token
    gemms: tuple[str, ...]  #: what the operands of each go through
    quantized: int  #: how many of the three have both operands quantized
    source: str
    slots: tuple[str, ...]  #: what each of SLOTS really goes through
    marks: tuple[str, ...] = ()  #: of a way to multiply that the operands do not tell
    softmax: Softmax | None = None  #: of QK^T, what its scores go through

    @property
    def summary(self) -> str:
        """The three GEMMs in one line, or what they share."""
        if len(set(self.gemms)) == 1 and len(set(self.gemms[0].split(" x "))) == 1:
            alike = self.gemms[0].split(" x ")[0]
            summary = "high precision" if alike == str(AS_IT_IS) else alike
        else:
            named = zip(GEMMS[self.operation], self.gemms, strict=True)
            summary = ", ".join(f"{gemm} {operands}" for gemm, operands in named)
        return " ".join([summary, *(f"({mark})" for mark in self.marks)])


def matmuls(chunks: Sequence[torch.nn.Module], seq_length: int, iteration: int) -> list[Matmul]:
    """Those of this rank's stages, in an iteration (from 1)."""
    found = []
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Quantized) and module.identity is not None:
                for operation in module.operations:
                    plan = module.plan_of(operation)
                    found.append(
                        _matmul(
                            module.identity.name,
                            operation,
                            _flops(module, operation, seq_length),
                            plan.at(iteration),
                            plan.source_at(iteration),
                            Softmax.of(module) if operation == "qk" else None,
                        )
                    )
        for local_name, layer in transformer_layers(chunk):
            name = re.sub(r"\d+$", str(layer.layer_number - 1), local_name)
            for path, module in layer.named_modules(prefix=name):
                if path.endswith(".router"):
                    flops = 2.0 * module.weight.numel()
                    why = "routers stay in high precision"
                    found.append(_matmul(unwrapped(path), "linear", flops, None, why))
    return found


def _matmul(
    module: str,
    operation: str,
    flops: float,
    formats: GemmFormats | None,
    source: str,
    softmax: Softmax | None = None,
) -> Matmul:
    formats = GemmFormats() if formats is None else formats
    operands = [formats.effective(slot) for slot in SLOTS]
    pairs = [operands[index : index + 2] for index in (0, 2, 4)]
    marks = {
        "straight-through": formats.straight_through,
        "unnormalized probabilities": formats.unnormalized,
    }
    return Matmul(
        module,
        operation,
        flops,
        gemms=tuple(" x ".join(map(str, pair)) for pair in pairs),
        quantized=sum(all(each.format is not None for each in pair) for pair in pairs),
        source=source,
        slots=tuple(map(str, operands)),
        softmax=softmax,
        marks=tuple(mark for mark, there in marks.items() if there),
    )


def _flops(module: Quantized, operation: str, seq_length: int) -> float:
    """Of one GEMM for one token of the whole model."""
    config = module.config
    if operation == "linear":
        flops = 2.0 * module.input_size * module.output_size
        if module.is_expert:
            flops *= config.moe_router_topk / config.num_moe_experts
        return flops
    head_dim = config.kv_channels
    if getattr(config, "multi_latent_attention", False):
        of_scores = config.qk_head_dim + config.qk_pos_emb_head_dim
        head_dim = of_scores if operation == "qk" else config.v_head_dim
    return 2.0 * seq_length * head_dim * config.num_attention_heads


def of_whole_model(
    chunks: Sequence[torch.nn.Module], seq_length: int, iteration: int = 1
) -> list[Matmul]:
    """The matmuls of all ranks, each once, by name; to be called on all of them."""
    own = matmuls(chunks, seq_length, iteration)
    parts = [own]
    if torch.distributed.is_initialized():
        parts = [[] for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(parts, own)
    whole = {(each.module, each.operation): each for part in parts for each in part}
    return sorted(whole.values(), key=lambda each: natural_order(each.module))


def share(found: Iterable[Matmul]) -> float:
    """The share of the FLOPs of all matmuls, forward and backward, that low precision has."""
    found = list(found)
    total = sum(3 * each.flops for each in found)
    return sum(each.quantized * each.flops for each in found) / total if total else 0.0


def table(found: Sequence[Matmul]) -> list[str]:
    """A line for each group of consecutive layers whose matmul of that name is treated alike."""
    groups = _layers_alike(found, lambda each: (each.summary, each.source))
    rows = [(modules, one.operation, one.summary, one.source) for modules, one in groups]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1, 2)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]


def for_card(found: Sequence[Matmul]) -> list[dict[str, Any]]:
    """The same for programs, as plain values: what recomputes a matmul must know of it.

    `modules` names one, or with `layers.0-2,5` several; `slots` says what each operand really goes
    through, in a straight-through backward pass too. A reader that does not know one of the `marks`
    cannot recompute the matmul.
    """
    groups = _layers_alike(found, lambda each: (each.slots, each.marks, each.softmax, each.source))
    return [
        {
            "modules": modules,
            "operation": one.operation,
            "slots": dict(zip(SLOTS, one.slots, strict=True)),
            "marks": list(one.marks),
            "softmax": None if one.softmax is None else asdict(one.softmax),
            "source": one.source,
        }
        for modules, one in groups
    ]


def _layers_alike(
    found: Iterable[Matmul], key: Callable[[Matmul], Hashable]
) -> list[tuple[str, Matmul]]:
    """One matmul of each group of layers that have the same key, and the modules of all of them."""
    groups: dict[Hashable, tuple[list[str], Matmul]] = {}
    for each in found:
        name = _LAYER.sub("*", each.module, count=1)
        layers, _ = groups.setdefault((name, each.operation, key(each)), ([], each))
        layer = _LAYER.search(each.module)
        layers.append(layer[0] if layer else "")
    return [
        (_LAYER.sub(_ranges(layers), one.module, count=1), one) for layers, one in groups.values()
    ]


def _ranges(layers: Sequence[str]) -> str:
    """0,1,2,5 as 0-2,5."""
    numbers = sorted({int(layer) for layer in layers if layer})
    runs = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return ",".join(runs)
