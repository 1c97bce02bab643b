"""Compare the quantized operands of sharded layers with those of whole layers, on four ranks.

The tests run it under torchrun. Every rank first runs the whole layers alone and keeps the codes of
all operands. It then runs its shards of the same layers in several parallel layouts, and compares
its codes with its part of the whole ones. Data-parallel ranks have different inputs. The report of
each rank, in $REPORT_DIR, names the operands that differ, by layout and format.
"""

import json
import os
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import gpt_worker
import torch
from context_parallel_worker import message, own_part, set_formats
from slots_worker import SLOTS

SEQ, BATCH, HEADS, DIM, TOKENS = 128, 2, 4, 16, 64
WIDTH = HEADS * DIM
#: sizes of the tensor-, context-, expert- and expert-tensor-parallel groups, by layout
LAYOUTS = {
    "tp2": (2, 1, 1, 2),
    "cp2": (1, 2, 1, 1),
    "tp2 cp2": (2, 2, 1, 2),
    "cp4 ep2": (1, 4, 2, 1),
    "tp2 ep2": (2, 1, 2, 1),
}
#: layouts and the formats that they run in
CASES = [(name, "nvfp4") for name in LAYOUTS]
CASES += [(name, "fp8_e4m3") for name in ("tp2", "cp2", "tp2 ep2")]
PLAIN = ("tp2", "cp2")  #: layouts in which the plain formats run, too
#: dims of the operands A, B and C of each matmul, as megatron-core shards them
DIMS = {
    "column": ("s b h", "o[tp] h", "s b o[tp]"),
    "row": ("s b h[tp]", "o h[tp]", "s b o"),
    "expert column": ("t h", "o[etp] h", "t o[etp]"),
    "expert row": ("t h[etp]", "o h[etp]", "t o"),
    "qk": ("b a[tp] s d", "b a[tp] k d", "b a[tp] s k"),
    "pv": ("b a[tp] s k", "b a[tp] d k", "b a[tp] s d"),
}
LINEAR = ("column", "row", "expert column", "expert row")
#: slots of attention in the order in which its two matmuls quantize their operands
ATTENTION = [
    *(f"{operation} {slot}" for operation in ("qk", "pv") for slot in SLOTS[:2]),
    *(f"{operation} {slot}" for operation in ("pv", "qk") for slot in SLOTS[2:]),
]


class Layout:
    """One parallel layout, and the position of this rank in it."""

    def __init__(self, name: str) -> None:
        from megatron.core import parallel_state, tensor_parallel

        self.tp, self.cp, self.ep, self.etp = LAYOUTS.get(name, (1, 1, 1, 1))
        parallel_state.initialize_model_parallel(
            self.tp,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        rank = torch.distributed.get_rank()
        self.data_rank, self.expert = self.place(name)
        self.ranks = {"tp": rank % self.tp, "cp": rank // self.tp % self.cp, "etp": rank % self.etp}
        replicas = max(self.tp * self.cp // (self.etp * self.ep), 1)
        replica = rank % (self.tp * self.cp) // (self.etp * self.ep)
        rows = torch.arange(TOKENS).chunk(replicas)
        #: rows of an expert's tokens that are on this rank; those of expert 1 are all on one rank
        self.tokens = rows[replica]
        if self.expert == 1 and replicas > 1:
            self.tokens = torch.arange(TOKENS if replica == 1 else 0)

    @staticmethod
    def place(name: str) -> tuple[int, int]:
        """Return the data-parallel rank and the expert of this rank."""
        tp, cp, ep, etp = LAYOUTS.get(name, (1, 1, 1, 1))
        rank = torch.distributed.get_rank()
        return rank // (tp * cp), rank // etp % ep

    def part(self, x: torch.Tensor, dims: str) -> torch.Tensor:
        """Return this rank's part of a tensor with one letter of `dims` per dimension."""
        for axis, letter in enumerate(dims.split()):
            group = letter.partition("[")[2].rstrip("]")
            if letter == "s" and self.cp > 1:
                turned = own_part(x.movedim(axis, 0), self.ranks["cp"], self.cp)
                x = turned.movedim(0, axis)
            elif letter == "t":
                x = x[self.tokens]
            elif group:
                x = x.chunk(getattr(self, group), axis)[self.ranks[group]]
        return x.detach().contiguous()

    def config(self):
        from megatron.core.transformer import TransformerConfig

        return TransformerConfig(
            num_layers=1,
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            attention_dropout=0.0,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=self.tp,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            num_moe_experts=2,
            add_bias_linear=False,
            sequence_parallel=self.tp > 1 and (self.cp > 1 or self.ep > 1),
        )


def inputs(data_rank: int, expert: int) -> dict[str, torch.Tensor]:
    """Return the whole operands of all layers: A, B and C of a linear layer, Q, K, V and dO."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        # With such heavy tails, the largest values differ strongly between the parts of a tensor.
        return torch.randn(*shape, generator=generator) ** 3

    whole = {f"{name} w": normal(WIDTH, WIDTH) for name in ("column", "row")}
    generator.manual_seed(6 + data_rank)
    for name in ("column x", "column y", "row x", "row y"):
        whole[name] = normal(SEQ, BATCH, WIDTH)
    for name in "qkv":
        whole[name] = torch.randn(SEQ, BATCH, HEADS, DIM, generator=generator)
    whole["do"] = normal(SEQ, BATCH, HEADS * DIM)
    generator.manual_seed(20 + 2 * data_rank + expert)
    for name in ("column", "row"):
        whole[f"expert {name} w"] = normal(WIDTH, WIDTH)
        whole[f"expert {name} x"], whole[f"expert {name} y"] = (
            normal(TOKENS, WIDTH) for _ in range(2)
        )
    return whole


class Spy:
    """A replacement of `quantize_parts` in the matmuls, which keeps the quantized operands."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def __call__(self, parts, fmt, axis, *, seed=None, amax=None, dtype=None):
        from megatron.fake_quant import fake_quantize, quantize
        from megatron.fake_quant.code_points import unpack_nibbles

        x = parts.values
        found = {"values": fake_quantize(x, fmt, axis=axis, seed=seed, amax=amax)}
        if x.numel():
            packed = quantize(x, fmt, axis, seed=seed, amax=amax)
            codes = packed.codes
            if fmt.element.bits <= 4:
                codes = unpack_nibbles(codes, x.shape[axis])
            found |= {"codes": codes.movedim(-1, axis).float(), "scale": packed.scales.tensor}
        self.seen.append(found)
        return parts._replace(values=found["values"], dtype=dtype)

    def take(self, slots) -> dict[str, dict[str, torch.Tensor]]:
        seen, self.seen = self.seen, []
        return dict(zip(slots, seen, strict=True))


def linear(layout: Layout, name: str):
    """Return the linear layer of this rank: column- or row-parallel, and of an expert or not."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    config = layout.config()
    shared = {"config": config, "init_method": config.init_method, "bias": False}
    shared["is_expert"] = name.startswith("expert")
    if name.endswith("column"):
        return ColumnParallelLinear(WIDTH, WIDTH, **shared, gather_output=False)
    return RowParallelLinear(WIDTH, WIDTH, **shared, input_is_parallel=True, skip_bias_add=True)


def run_linear(layout, name, whole, fmt, spy, *, frozen=False):
    """Return the operands of a linear layer.

    A frozen layer has no weight gradient, and its forward pass is recomputed.
    """
    from megatron.core.tensor_parallel.random import checkpoint

    module = linear(layout, name)
    set_formats(module, fmt)
    parts = [whole[f"{name} {letter}"] for letter in "xwy"]
    x, weight, dy = (layout.part(*pair) for pair in zip(parts, DIMS[name], strict=True))
    if module.config.sequence_parallel and not name.startswith("expert"):
        x, dy = (
            x.chunk(layout.tp)[layout.ranks["tp"]].contiguous() if cut else x
            for x, cut in ((x, name == "column"), (dy, name == "row"))
        )
    module.weight.data.copy_(weight)
    x.requires_grad_()
    if frozen:
        module.weight.requires_grad_(False)
        checkpoint(lambda x: module(x)[0], False, x).backward(dy)
        slots = [f"first {name} fprop_a", f"first {name} fprop_b"]
        return spy.take([*slots, *(f"frozen {name} {slot}" for slot in SLOTS[:4])])
    module(x)[0].backward(dy)
    return spy.take([f"{name} {slot}" for slot in SLOTS])


def run_attention(layout, whole, fmt, spy):
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    module = DotProductAttention(layout.config(), 1, AttnMaskType.causal, "self")
    set_formats(module, fmt)
    qkv = [layout.part(whole[name], "s b a[tp] d").requires_grad_() for name in "qkv"]
    module(*qkv, None).backward(layout.part(whole["do"], "s b h[tp]"))
    return spy.take(ATTENTION)


def run_all(layout, fmt, spy):
    whole = inputs(layout.data_rank, layout.expert)
    seen = run_attention(layout, whole, fmt, spy)
    for name in LINEAR:
        seen |= run_linear(layout, name, whole, fmt, spy)
    return seen | run_linear(layout, "row", whole, fmt, spy, frozen=True)


def differing(layout, seen, expected) -> list[str]:
    """Return the operands of this rank whose codes, scale or values are not those expected."""
    names = []
    for name, found in seen.items():
        operation, _, slot = name.removeprefix("first ").removeprefix("frozen ").rpartition(" ")
        dims = DIMS[operation]["abc".index(slot[-1])]
        count = len(dims.split())
        for what, x in found.items():
            whole = expected[name][what]
            if what != "scale":
                if count > whole.dim():  # batch and heads, or tokens and batch, are one dimension
                    whole = whole.unflatten(0, (-1, HEADS) if count == 4 else (-1, BATCH))
                whole = layout.part(whole, dims).reshape(x.shape)
            if not torch.equal(whole, x):
                names.append(f"{name} {what}")
    return names


def refusal() -> str:
    """Return the error if an expert's tokens come from one and a half micro-batches."""
    from megatron.core.low_precision.global_amax import global_amax

    ranks = [[0, 1, 2], [2, 3]]  # ranks that share a micro-batch, and ranks that exchange tokens
    with mock.patch("torch.distributed.get_process_group_ranks", side_effect=ranks):
        return message(lambda: global_amax(torch.ones(2, 2), "t h", is_expert=True))


def main() -> None:
    gpt_worker.start_processes()
    from megatron.core import parallel_state
    from megatron.fake_quant.matmul import gemm

    spy = gemm.quantize_parts = Spy()
    expected, report = {}, {}
    whole = Layout("whole")
    for place, fmt in sorted({(Layout.place(name), fmt) for name, fmt in CASES}):
        whole.data_rank, whole.expert = place
        expected[place, fmt] = run_all(whole, fmt, spy)
    parallel_state.destroy_model_parallel()
    for name in LAYOUTS:
        layout = Layout(name)
        for fmt in (fmt for case, fmt in CASES if case == name):
            for variant in (fmt, f"{fmt}:global") if name in PLAIN else (f"{fmt}:global",):
                seen = run_all(layout, variant, spy)
                differences = differing(layout, seen, expected[Layout.place(name), fmt])
                report[f"{name} {variant}"] = {"operands": len(seen), "differing": differences}
        if name == "cp2":
            report["refusal"] = refusal()
        parallel_state.destroy_model_parallel()
    Path(os.environ["REPORT_DIR"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))
    torch.distributed.barrier()  # a rank that left first could abort the others


if __name__ == "__main__":
    main()
