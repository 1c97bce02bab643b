"""Compare attention layers of the model that run in tiles with layers that use whole matrices.

The tests run it in a process of its own. It prints a JSON object.
"""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gpt_worker
import torch

SEQ, BATCH, HEADS, GROUPS, DIM = 80, 2, 4, 2, 16
NAMES = ("o", "dq", "dk", "dv")


def layer(mask="causal", **options):
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    settings = {"attention_dropout": 0.0, "masked_softmax_fusion": False} | options
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_softmax_in_fp32=True,
        **settings,
    )
    # The second layer, so that --apply-query-key-layer-scaling has a coefficient.
    return DotProductAttention(config, 2, AttnMaskType[mask], "self")


def set_formats(module, name, tiling=None, *, unnormalized=True, accumulator="fp32"):
    from megatron.fake_quant import get_format
    from megatron.fake_quant.accumulate import get_accumulator
    from megatron.fake_quant.matmul.gemm_formats import ACCUMULATOR_FIELDS, GemmFormats
    from megatron.fake_quant.policy import OperationPolicy

    qk = GemmFormats.uniform(get_format(name))
    qk = replace(qk, **dict.fromkeys(ACCUMULATOR_FIELDS, get_accumulator(accumulator)))
    pv = replace(qk, unnormalized=unnormalized, tiling=tiling)
    module._plans = {
        "qk": OperationPolicy("qk", qk, "test"),
        "pv": OperationPolicy("pv", pv, "test"),
    }
    return module


def tensors(value_dim=DIM, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    shapes = [(HEADS, DIM), (GROUPS, DIM), (GROUPS, value_dim)]
    qkv = [torch.randn(SEQ, BATCH, *s, generator=generator).to(dtype) for s in shapes]
    do = torch.randn(SEQ, BATCH, HEADS * value_dim, generator=generator).to(dtype)
    return [x.requires_grad_() for x in qkv], do


def results(module, mask=None, value_dim=DIM):
    if value_dim != DIM:
        module.hidden_size_per_partition = value_dim * HEADS  # as multi-latent attention sets it
    qkv, do = tensors(value_dim)
    output = module(*qkv, mask)
    return output.detach(), *torch.autograd.grad(output, qkv, do)


def same(ours, theirs):
    return {n: torch.equal(x, y) for n, x, y in zip(NAMES, ours, theirs, strict=True)}


def errors(ours, theirs):
    pairs = zip(NAMES, ours, theirs, strict=True)
    return {n: float((x - y).norm() / y.norm()) for n, x, y in pairs}


def comparisons():
    from megatron.fake_quant.tiles.tiling import Tiling

    padding = torch.zeros(BATCH, 1, SEQ, SEQ, dtype=torch.bool)
    padding[1, ..., 50:] = True
    cases = {
        "causal": {},
        "window": {"options": {"window_size": (20, 0)}},
        "padding": {"options": {"mask": "padding"}, "mask": padding},
        "coefficient": {"options": {"apply_query_key_layer_scaling": True}},
        "value dim": {"value_dim": 24},
    }
    report = {}
    for case, settings in cases.items():
        options, how = settings.get("options", {}), dict(settings)
        how.pop("options", None)
        for unnormalized in (False, True):
            whole = set_formats(layer(**options), "mxfp8", unnormalized=unnormalized)
            expected = results(whole, **how)
            found = {}
            for tile in (96, 32):
                module = set_formats(
                    layer(**options), "mxfp8", Tiling(tile), unnormalized=unnormalized
                )
                compare = same if tile == 96 else errors
                found[str(tile)] = compare(results(module, **how), expected)
            report[f"{case} {unnormalized}"] = found
    return report


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def defaults():
    """Return what layers do by default when whole matrices are large."""
    from megatron.core.low_precision import matmul_audit
    from megatron.core.transformer import attention_tiles
    from megatron.fake_quant import get_format
    from megatron.fake_quant.matmul.operand import Operand
    from megatron.fake_quant.tiles import attention
    from megatron.fake_quant.tiles.tiling import Tiling

    lines = Lines()
    attention_tiles.logger.addHandler(lines)
    expected = results(set_formats(layer(), "mxfp8", Tiling(), unnormalized=False))
    largest, attention.WHOLE_PAIRS = attention.WHOLE_PAIRS, SEQ * SEQ - 1
    report = {"same": same(results(set_formats(layer(), "mxfp8", unnormalized=False)), expected)}
    module = set_formats(layer(), "mxfp8", unnormalized=False)
    qk, pv = (module._plans[operation].fixed for operation in ("qk", "pv"))
    delayed = replace(qk, fprop_a=Operand(get_format("fp8_e4m3:delayed")))
    attention_tiles.tiling_of(module, {"qk": delayed, "pv": pv}, SEQ, SEQ)
    results(set_formats(layer(attention_dropout=0.1), "mxfp8", unnormalized=False))
    report["audit"] = str(matmul_audit._with_tiles(module, pv, SEQ, 1).tiling)
    attention.WHOLE_PAIRS = largest
    report["small"] = str(matmul_audit._with_tiles(module, pv, SEQ, 1).tiling)
    report["lines"] = lines.lines
    return report


def message(action) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def refusals():
    from megatron.fake_quant.tiles.tiling import Tiling

    def refused(**options):
        return message(lambda: results(set_formats(layer(**options), "mxfp8", Tiling(32))))

    queries = message(
        lambda: set_formats(layer(), "mxfp8", Tiling(32))(*_shorter(tensors()[0]), None)
    )
    return {
        "dropout": refused(attention_dropout=0.1),
        "softmax": refused(softmax_type="off-by-one"),
        "blocks": message(lambda: results(set_formats(layer(), "mxfp8", Tiling(48)))),
        "queries": queries,
    }


def _shorter(qkv):
    return [qkv[0][:2], *qkv[1:]]


def recomputation():
    """Return whether a layer has the same results if its forward pass is repeated."""
    from megatron.core import tensor_parallel
    from megatron.fake_quant.tiles.tiling import Tiling

    report = {}
    cases = {"mxfp8:sr": "blackwell_mx", "fp8_e4m3": "hopper_fp8", "mxfp4:sr": "fp32"}
    for name, accumulator in cases.items():
        module = set_formats(layer(), name, Tiling(32), accumulator=accumulator)
        expected = results(module)
        passes, (qkv, do) = [], tensors()

        def forward(*operands, module=module, passes=passes):
            passes.append(torch.is_grad_enabled())
            return module(*operands, None)

        output = tensor_parallel.checkpoint(forward, False, *qkv)
        output.backward(do)
        found = (output.detach(), *(x.grad for x in qkv))
        report[name] = same(found, expected) | {"passes": passes}
    return report


def logits():
    from megatron.core.transformer.attention_logits import NAME
    from megatron.fake_quant.tiles.tiling import Tiling

    found = []
    for tiling in (None, Tiling(32), Tiling(32, "reverse")):
        module = layer(log_max_attention_logit=True, apply_query_key_layer_scaling=True)
        results(set_formats(module, "hifp8", tiling))
        found.append(getattr(module, NAME).tolist())
    return found


def main() -> None:
    from megatron.collection.training_clock import MicroBatch, clock

    gpt_worker.start(gpt_worker.parse([]))
    clock.micro_batch = MicroBatch(1, 0)  # as in a training step
    report = {
        "comparisons": comparisons(),
        "defaults": defaults(),
        "refusals": refusals(),
        "logits": logits(),
        "recomputation": recomputation(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
