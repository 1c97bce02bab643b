"""Compute how many bytes the linear-layer weights would take if they were stored in each format.

    python benchmarks/storage.py
    python benchmarks/storage.py --formats mxfp8 nvfp4 mx:e3m4:b16

The simulation keeps every tensor in its own dtype and saves no memory. This program packs each
weight shape of the models in `script/configs/` along the reduction axis, with
`megatron.fake_quant.packing.quantize`. A code counts as the number of bits that the format defines
(the library stores it in a byte or half a byte); a scale counts as its stored size. Embeddings,
norms and the router are not quantized and are not counted. Only 64 rows of each shape are packed,
because all rows have the same size. Prints Markdown and writes it to `docs/results/storage.md`.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import results_page

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "script")]

from configs.architecture import Architecture  # noqa: E402
from configs.models import MODELS  # noqa: E402
from megatron.console import ArgumentParser  # noqa: E402
from megatron.fake_quant.names import get_format  # noqa: E402
from megatron.fake_quant.packing import quantize  # noqa: E402

FORMATS = ("bf16", "mxfp8", "mxfp6_e3m2", "mxfp4", "nvfp4", "hifp8", "hifp4", "fp8_e4m3")
ROWS = 64


def linear_weights(model: Architecture) -> Iterator[tuple[int, int, int]]:
    """Yield (output features, input features, number of matrices) for each kind of linear layer."""
    layers, hidden, heads = model.num_hidden_layers, model.hidden_size, model.num_attention_heads
    if (latent := model.latent) is None:
        size = model.head_dim or hidden // heads
        yield (heads + 2 * model.num_key_value_heads) * size, hidden, layers
        yield hidden, heads * size, layers
    else:
        rope, nope = latent.qk_rope_head_dim, latent.qk_nope_head_dim
        yield heads * (nope + rope), hidden, layers
        yield latent.kv_lora_rank + rope, hidden, layers
        yield heads * (nope + latent.v_head_dim), latent.kv_lora_rank, layers
        yield hidden, heads * latent.v_head_dim, layers
    dense = layers
    if (experts := model.experts) is not None:
        dense = experts.first_k_dense_replace
        routed, shared = experts.n_routed_experts, experts.n_shared_experts
        size = experts.moe_intermediate_size
        yield 2 * size, hidden, (layers - dense) * routed
        yield hidden, size, (layers - dense) * routed
        yield 2 * size * shared, hidden, layers - dense
        yield hidden, size * shared, layers - dense
    yield 2 * model.intermediate_size, hidden, dense
    yield hidden, model.intermediate_size, dense


def stored_bytes(model: Architecture, name: str) -> float:
    """Return the stored size of all linear-layer weights in the format `name`, in bytes."""
    bits, total = get_format(name).element.bits, 0.0
    for out, features, number in linear_weights(model):
        quantized = quantize(torch.randn(ROWS, features, dtype=torch.bfloat16), name)
        blocks, whole = quantized.scales.blocks, quantized.scales.tensor
        row = features * bits / 8 + (0 if blocks is None else blocks.nbytes / ROWS)
        total += number * (out * row + (0 if whole is None else whole.nbytes))
    return total


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--output", type=Path, default=REPO / "docs" / "results" / "storage.md")
    options = parser.parse_args(arguments)
    torch.manual_seed(1)
    head = ["format", *(f"{model.title}, GB" for model in MODELS.values()), "bits per value"]
    models = [model.full.architecture for model in MODELS.values()]
    values = [sum(out * into * n for out, into, n in linear_weights(model)) for model in models]
    rows = []
    for name in options.formats:
        try:
            sizes = [stored_bytes(model, name) for model in models]
        except ValueError as error:
            parser.error(str(error))
        bits = 8 * sum(sizes) / sum(values)
        rows.append([name, *(f"{size / 1e9:.4g}" for size in sizes), f"{bits:.4g}"])
    numbers = ", ".join(
        f"{model.title} {count:,}" for model, count in zip(MODELS.values(), values, strict=True)
    )
    command = results_page.quoted("storage.py")
    text = "\n".join(
        [
            *("# What a real format would store", "", f"`{command}`", ""),
            "Each size includes the codes and scales of all weights of the linear layers "
            f"({numbers}).",
            *("", results_page.table(head, rows), ""),
        ]
    )
    results_page.publish(text, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
