"""Train a layer of experts twice, as `SequentialMLP` and as `GroupedMLP` with the same weights.

    grouped_worker.py FOLDER FORMAT [ep|etp]

The model trains for one iteration of two micro-batches, with all tensors collected to FOLDER/KIND.
FORMAT may be `none`. With two ranks, the last word names the parallelism of the experts. Each rank
prints a JSON line with a hash of each output and gradient, by the name of the run. `grouped off`
runs without the collection, and `grouped kernel` with a stand-in for the package grouped_gemm.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parent))
import gpt_worker

gpt_worker.activate_cpu_backend()  # before megatron-core is imported

from megatron.core import parallel_state, tensor_parallel, tensor_saver  # noqa: E402
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe import experts as experts_module  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402
from megatron.fake_quant import policy  # noqa: E402

HIDDEN, FFN, EXPERTS, TOKENS = 64, 32, 4, 24


def config(*, grouped: bool, ep: int, etp: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=FFN,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=grouped,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=etp,
        sequence_parallel=etp > 1,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )


class Layer(torch.nn.Module):
    """A layer with a number, as megatron-core's transformer layers have."""

    def __init__(self, config):
        super().__init__()
        self.config, self.layer_number = config, 1
        spec = get_moe_module_spec(False, EXPERTS, config.moe_grouped_gemm)
        self.mlp = build_module(spec, config=config)

    def forward(self, x):
        return self.mlp(x)[0]


class Model(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(config)])

    def forward(self, x):
        return self.layers[0](x)


def weight_of(number: int, name: str, rows: int, columns: int) -> torch.Tensor:
    """Return the weight of an expert's layer, which depends on its number and its name only."""
    generator = torch.Generator().manual_seed(2 * number + (name == "linear_fc2"))
    return torch.randn(rows, columns, generator=generator).bfloat16() / 8


def weights(mlp: torch.nn.Module, of: str) -> dict[str, torch.Tensor]:
    """Return [O, H] views of all weights of this rank's experts, or of their gradients."""
    tensors, first = {}, mlp.local_expert_indices[0]
    for name, grouped in (("linear_fc1", "weight1"), ("linear_fc2", "weight2")):
        for number in range(mlp.num_local_experts):
            if hasattr(mlp.experts, grouped):
                whole = getattr(mlp.experts, grouped)
                whole = whole.data if of == "data" else whole.grad
                shape = (
                    mlp.num_local_experts,
                    *((HIDDEN, -1) if name[-1] == "1" else (-1, HIDDEN)),
                )
                part = whole.view(shape)[number].t()
            else:
                linear = getattr(mlp.experts.local_experts[number], name)
                part = linear.weight.data if of == "data" else linear.weight.grad
            tensors[f"{first + number}.{name}"] = part
    return tensors


def fill(mlp: torch.nn.Module, etp: int) -> None:
    """Set the weights of the experts and the router, independently of how they are stored."""
    rank = parallel_state.get_expert_tensor_parallel_rank()
    for name, weight in weights(mlp, "data").items():
        number, layer = name.split(".")
        rows, columns = weight.shape
        if layer == "linear_fc1":
            shard = weight_of(int(number), layer, rows * etp, columns).chunk(etp, 0)[rank]
        else:
            shard = weight_of(int(number), layer, rows, columns * etp).chunk(etp, 1)[rank]
        weight.copy_(shard)
    with torch.no_grad():  # expert 2 gets no token
        mlp.router.weight.copy_(weight_of(99, "router", EXPERTS, HIDDEN))
        mlp.router.weight[2] = mlp.router.weight[1] - 1
        mlp.router.weight[2, 0] = -100
        mlp.router.weight[1, 0] = 100


def train(folder: Path | None, fmt: str, *, grouped: bool, ep: int, etp: int) -> dict[str, str]:
    """Return hashes of the outputs and gradients of one iteration."""
    policy.configure(custom_quant_type=None if fmt == "none" else fmt)
    tensor_saver.configure(
        {},
        save_tensors=folder is not None,
        save_dir=folder and str(folder),
        collect_micro_batches=0,
    )
    model = Model(config(grouped=grouped, ep=ep, etp=etp)).bfloat16()
    fill(model.layers[0].mlp, etp)
    results = {}
    generator = torch.Generator().manual_seed(7)
    with tensor_saver.training_iteration(1):
        for batch in range(2):
            whole = torch.randn(TOKENS, 1, HIDDEN, generator=generator).bfloat16()
            whole[..., 0] = whole[..., 0].abs() + 1
            x = (
                whole.clone()
                if etp == 1
                else whole.chunk(etp)[parallel_state.get_tensor_model_parallel_rank()].clone()
            )
            x.requires_grad_()
            output = model(x)
            output.float().square().sum().backward()
            results[f"output {batch}"] = gpt_worker.digest(output.detach())
            results[f"grad_input {batch}"] = gpt_worker.digest(x.grad)
    for name, grad in weights(model.layers[0].mlp, "grad").items():
        results[f"grad {name}"] = gpt_worker.digest(grad)
    assert tensor_saver.close() is None
    return results


class Kernel(torch.autograd.Function):
    """A product as the package grouped_gemm computes it: one operation for all experts."""

    @staticmethod
    def forward(ctx, a, b, counts):
        ctx.save_for_backward(a, b, counts)
        return experts_module._gmm(a, b, counts)

    @staticmethod
    def backward(ctx, grad):
        a, b, counts = ctx.saved_tensors
        pieces = zip(a.split(counts.tolist()), b, grad.split(counts.tolist()), strict=True)
        pairs = [(g @ w.t(), x.t() @ g) for x, w, g in pieces]
        return (
            torch.cat([pair[0] for pair in pairs]),
            torch.stack([pair[1] for pair in pairs]),
            None,
        )


calls = []


def gmm(a, b, counts, trans_b):
    assert a.is_contiguous()
    assert counts.device.type == "cpu"
    assert len(a), "grouped_gemm refuses an empty input"
    calls.append(len(b))
    return Kernel.apply(a, b, counts)


def main() -> None:
    folder, fmt, *kind = sys.argv[1:]
    gpt_worker.start_processes()
    ranks = torch.distributed.get_world_size()
    sizes = {"ep": 1, "etp": 1} | {name: ranks for name in kind}
    parallel_state.initialize_model_parallel(
        sizes["etp"],
        expert_model_parallel_size=sizes["ep"],
        expert_tensor_parallel_size=sizes["etp"],
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    report = {}
    for name, collected, grouped in (
        ("sequential", True, False),
        ("grouped", True, True),
        ("grouped off", False, True),
    ):
        report[name] = train(
            Path(folder, name) if collected else None, fmt, grouped=grouped, **sizes
        )
    if fmt == "none":
        experts_module.HAVE_GROUPED_GEMM = True
        experts_module._upstream.gg.ops = SimpleNamespace(gmm=gmm)
        for name, collected in (("kernel off", False), ("kernel", True)):
            calls.clear()
            report[name] = train(
                Path(folder, name) if collected else None, fmt, grouped=True, **sizes
            )
            report[f"calls of {name}"] = list(calls)
    Path(folder, f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(report))
    torch.distributed.barrier()  # a rank that left first could abort the other


if __name__ == "__main__":
    main()
