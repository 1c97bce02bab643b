"""Collect the tensors of a stand-in for Transformer Engine, and print the results as JSON.

    te_worker.py FOLDER

The folder `stand_ins` must be in PYTHONPATH. A GPT with a layer of grouped experts, and a model of
Transformer Engine's own modules, train for one iteration, with and without the collection.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import gpt_worker

gpt_worker.activate_cpu_backend()  # before megatron-core is imported

import transformer_engine.pytorch as te  # noqa: E402

from megatron.core import parallel_state, tensor_parallel, tensor_saver  # noqa: E402
from megatron.core.low_precision import program_end  # noqa: E402
from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.fake_quant import policy  # noqa: E402

SEQ, BATCH, VOCAB, HIDDEN = 8, 2, 32, 32


def config(**options) -> TransformerConfig:
    defaults = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "num_moe_experts": 2,
        "moe_ffn_hidden_size": 48,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_layer_freq": [0, 1],
        "moe_grouped_gemm": True,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**defaults | options)


def gpt(**options):
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    made = config(**options)
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(made, use_transformer_engine=True)
    model = GPTModel(made, spec, VOCAB, SEQ, position_embedding_type="rope")

    def loss(model):
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
        positions = torch.arange(SEQ).expand(BATCH, SEQ)
        return model(inputs, positions, None, labels=inputs).mean()

    return model, loss


class Own(torch.nn.Module):
    """A model of Transformer Engine's own modules."""

    def __init__(self, **options):
        super().__init__()
        self.into = te.LayerNormLinear(HIDDEN, 3 * HIDDEN, **options)
        self.attention = te.DotProductAttention(4, HIDDEN // 4, qkv_format="bshd")
        self.out = te.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp = te.LayerNormMLP(HIDDEN, HIDDEN)

    def forward(self, x):
        q, k, v = self.into(x).view(BATCH, SEQ, 12, -1).chunk(3, 2)
        attended = self.attention(query_layer=q, key_layer=k, value_layer=v)
        return self.mlp(self.out(attended))


def own(**options):
    torch.manual_seed(1)
    x = torch.randn(BATCH, SEQ, HIDDEN).requires_grad_()
    return Own(**options), lambda model: model(x).square().mean()


def train(build, folder: Path | None) -> list[str]:
    """Return hashes of the losses and gradients of one iteration."""
    tensor_saver.configure(
        {},
        save_tensors=folder is not None,
        save_dir=folder and str(folder),
        collect_micro_batches=0,
    )
    model, loss = build()
    with tensor_saver.training_iteration(1):
        losses = [loss(model) for _ in range(2)]
        for each in losses:
            each.backward()
    assert tensor_saver.close() is None
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [gpt_worker.digest(x.detach().reshape(-1)) for x in (*losses, *grads)]


def refusal(function, **formats) -> str | None:
    policy.configure(**formats)
    try:
        function()
    except ValueError as error:
        program_end._refused.clear()  # this program expects it
        return str(error)
    finally:
        policy.configure()
    return None


def sharded() -> dict[str, dict[str, str]]:
    """Return the `dims` of layers that Transformer Engine splits over two ranks."""
    from megatron.core.low_precision import transformer_engine

    results = {}
    for mode in ("column", "row"):
        for parallel in (False, True):
            linear = te.Linear(
                HIDDEN, HIDDEN, parallel_mode=mode, tp_size=2, sequence_parallel=parallel
            )
            transformer_engine.attach(linear)
            results[f"{mode} {parallel}"] = linear._dims(torch.zeros(2, 2, 2))
    linear.parallel_mode = None
    linear.weight.sequence_parallel = True
    results["duplicated"] = linear._dims(torch.zeros(2, 2, 2))
    return results


def main() -> None:
    (folder,) = map(Path, sys.argv[1:])
    gpt_worker.start_processes()
    parallel_state.initialize_model_parallel()
    report = {}
    for name, build in (("gpt", gpt), ("own", own)):
        report[name] = {"off": train(build, None), "on": train(build, folder / name)}
    report["format"] = refusal(gpt, custom_quant_type="mxfp8")
    report["attention format"] = refusal(gpt, custom_quant_type="FA_mxfp8")
    report["own format"] = refusal(lambda: train(own, None), custom_quant_type="linear_mxfp4")
    fused = {"fuse_wgrad_accumulation": True}
    report["fused"] = refusal(lambda: train(lambda: own(**fused), folder / "fused"))
    report["sharded"] = sharded()
    program_end._reached = True  # the refused models must not change the exit status
    Path(folder, "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
