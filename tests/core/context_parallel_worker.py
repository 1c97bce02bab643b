"""Compare attention over context-parallel ranks with attention over the whole sequence.

The tests run it under torchrun with four ranks. The first rank writes a JSON object to $REPORT_DIR.
Every rank generates the whole tensors from one seed, passes its part to the layer and compares the
result with its part of the exact result, so that the comparison needs no communication.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gpt_worker
import torch

SEQ, BATCH, HEADS, GROUPS, DIM = 256, 2, 4, 2, 16
NAMES = ("o", "dq", "dk", "dv")
TILES = "mxfp4 in tiles of 64 keys, reverse, P x 256"


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def exact_attention(q, k, v, do, scale, hidden):
    """Return O, dQ, dK, dV [s, b, heads, d] in float64 by definition; `hidden` is the mask."""
    wide = [x.repeat_interleave(q.shape[2] // x.shape[2], 2).permute(1, 2, 0, 3) for x in (k, v)]
    scores = scale * q.permute(1, 2, 0, 3) @ wide[0].mT
    probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    o = (probs @ wide[1]).permute(2, 0, 1, 3).flatten(2)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do)


def tensors(dtype, value_dim=DIM):
    generator = torch.Generator().manual_seed(3)
    shapes = [(HEADS, DIM), (GROUPS, DIM), (GROUPS, value_dim)]
    qkv = [torch.randn(SEQ, BATCH, *s, generator=generator, dtype=dtype) for s in shapes]
    do = torch.randn(SEQ, BATCH, HEADS * value_dim, generator=generator, dtype=dtype)
    return [x.requires_grad_() for x in qkv], do


def own_part(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the two chunks of this rank, selected without the code under test."""
    chunks = x.chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]).detach().requires_grad_()


def layer(size: int, mask: str = "causal", **options):
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    config = TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        context_parallel_size=size,
        **options,
    )
    return DotProductAttention(config, 1, AttnMaskType[mask], "self")


def set_formats(module, name: str | None) -> None:
    from megatron.fake_quant import get_format
    from megatron.fake_quant.matmul.gemm_formats import GemmFormats
    from megatron.fake_quant.policy import OperationPolicy
    from megatron.fake_quant.tiles.tiling import Tiling

    formats = None
    if name is not None:
        name, _, tiles = name.partition(" in ")
        formats = GemmFormats.uniform(get_format(name))
        formats = replace(formats, unnormalized=bool(tiles), tiling=Tiling.parse(tiles))
    module._plans = {each: OperationPolicy(each, formats, "test") for each in module.operations}


def through(module, qkv, do, attention_mask=None):
    o = module(*qkv, attention_mask)
    return o.detach(), *torch.autograd.grad(o, qkv, do)


def hidden_of(case: str) -> torch.Tensor:
    """Return the whole mask by definition, which is True where a key is hidden."""
    query, key = torch.arange(SEQ)[:, None], torch.arange(SEQ)[None]
    if case == "window":
        return (key > query) | (key < query - 20)
    if case in ("given", "no mask"):
        return (key > query) & (key % 7 > 0) if case == "given" else torch.zeros(SEQ, SEQ).bool()
    return key > query


def in_float64(case: str, rank: int, size: int) -> dict[str, float]:
    """Return the errors of the unquantized layer in float64."""
    value_dim = 8 if case == "value dim" else DIM
    options = {"window_size": (20, 0)} if case == "window" else {}
    module = layer(size, mask="no_mask" if case == "no mask" else "causal", **options)
    set_formats(module, None)
    if value_dim != DIM:
        module.hidden_size_per_partition = value_dim * HEADS  # as multi-latent attention sets it
    (q, k, v), do = tensors(torch.float64, value_dim)
    hidden = hidden_of(case)
    given = None
    if case == "given":
        given = own_part(hidden.double(), rank, size).bool()[None, None]
    exact = exact_attention(q, k, v, do, DIM**-0.5, hidden)
    parts = [own_part(x, rank, size) for x in (q, k, v)]
    found = through(module, parts, own_part(do, rank, size).detach(), given)
    return {
        name: relative(f, own_part(e, rank, size).detach())
        for name, f, e in zip(NAMES, found, exact, strict=True)
    }


def quantized(name: str, rank: int, size: int) -> dict[str, float]:
    """Return the errors relative to a layer on one rank with the same format, in float32."""
    alone = layer(size)
    alone.context = None
    (q, k, v), do = tensors(torch.float32)
    module = layer(size)
    set_formats(alone, name)
    set_formats(module, name)
    exact = through(alone, (q, k, v), do)
    parts = [own_part(x, rank, size) for x in (q, k, v)]
    found = through(module, parts, own_part(do, rank, size).detach())
    return {
        result: relative(f, own_part(e, rank, size).detach())
        for result, f, e in zip(NAMES, found, exact, strict=True)
    }


def message(action) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def refusals(size: int) -> dict[str, str]:
    module, (qkv, _) = layer(size), tensors(torch.float32)
    qkv = [x[: SEQ // size] for x in qkv]
    whole_mask = torch.zeros(SEQ, SEQ, dtype=torch.bool)
    other = {"layer_number": 1, "attn_mask_type": module.attn_mask_type, "attention_type": "self"}
    return {
        "mask": message(lambda: module(*qkv, whole_mask)),
        "bias": message(lambda: module(*qkv, None, attention_bias=torch.ones(1))),
        "packed": message(lambda: module(*qkv, None, packed_seq_params=object())),
        "odd": message(lambda: module(*(x[:5] for x in qkv), None)),
        "cache": message(lambda: module(qkv[0][:2], *qkv[1:], None)),
        "group": message(lambda: layer(1)),
        "comm type": message(lambda: type(module)(module.config, **other, cp_comm_type="p2p")),
    }


def worst(report: dict[str, float]) -> dict[str, float]:
    """Return the maximum over all ranks."""
    values = torch.tensor(list(report.values()), dtype=torch.float64)
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
    return dict(zip(report, values.tolist(), strict=True))


def main() -> None:
    gpt_worker.start_processes()
    from megatron.core import parallel_state, tensor_parallel

    report: dict = {}
    for size in (2, 4):
        parallel_state.initialize_model_parallel(context_parallel_size=size)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        rank = parallel_state.get_context_parallel_rank()
        for case in ("causal", "window", "given", "no mask", "value dim"):
            report[f"{case} cp{size}"] = worst(in_float64(case, rank, size))
        for name in ("mxfp8", "mxfp4", "hifp8", TILES):
            report[f"{name} cp{size}"] = worst(quantized(name, rank, size))
        if size == 2:
            report["refusals"] = refusals(size)
        parallel_state.destroy_model_parallel()
    if os.environ["RANK"] == "0":
        Path(os.environ["REPORT_DIR"], "report.json").write_text(json.dumps(report))
    torch.distributed.barrier()  # a rank that left first could abort the others


if __name__ == "__main__":
    main()
