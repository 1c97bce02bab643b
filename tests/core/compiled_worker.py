"""Compare layers of the model under torch.compile with eager mode, in a process of their own.

The result is a JSON object on stdout. For each format and layer, it holds the error, or whether the
results are bit-identical and how many graphs there were.

    compiled_worker.py "FORMAT LAYER/MODE..." ...     MODE: whole (one graph), parts (graph breaks)
"""

import json
import os
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "0"  # the CPU backend switches compilation off otherwise

import gpt_worker
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

TOKENS, BATCH, WIDTH, HEADS = 32, 2, 64, 4


def built(config):
    """Return the layers by name, and example inputs."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    shared = {"config": config, "init_method": config.init_method, "bias": True}
    column = ColumnParallelLinear(WIDTH, 3 * WIDTH, **shared, gather_output=False)
    row = RowParallelLinear(WIDTH, WIDTH, **shared, input_is_parallel=True, skip_bias_add=False)
    attention = DotProductAttention(config, 1, AttnMaskType.causal, "self")

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.column, self.attention, self.row = column, attention, row

        def forward(self, x):
            qkv, _ = self.column(x)
            q, k, v = qkv.view(*x.shape[:2], HEADS, -1).chunk(3, -1)
            context = self.attention(q, k, v, None)
            return x + self.row(context)[0]

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            q, k, v = x.view(*x.shape[:2], HEADS, -1).chunk(3, -1)
            return self.attention(q, k, v, None)

    return {"column": column, "row": row, "attention": Heads(), "block": Block()}


def results(module, function, x):
    """Return the output and all gradients."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    y = y[0] if isinstance(y, tuple) else y
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def compare(module, x, *, fullgraph):
    """Return the comparison of compiled training steps with eager ones."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(module, backend=counter, fullgraph=fullgraph)
    try:
        expected = [results(module, module, x * scale) for scale in (1, 3)]
        found = [results(module, function, x * scale) for scale in (1, 3)]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:1500]}
    pairs = [zip(a, b, strict=True) for a, b in zip(found, expected, strict=True)]
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    return {
        "equal": [all(torch.equal(a, b) for a, b in pair) for pair in pairs],
        "graphs": len(counter.graphs),
        "matmuls": sum("autograd_function_apply" in target for target in targets),
    }


def main() -> None:
    gpt_worker.activate_cpu_backend()
    from megatron.collection.training_clock import MicroBatch, clock
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.fake_quant import policy

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(3)
    x, report = torch.randn(TOKENS, BATCH, WIDTH), {}
    for name, *layers in (case.split() for case in sys.argv[1:]):
        policy.configure(custom_quant_type=name)
        clock.micro_batch = MicroBatch(1, 0) if ":sr" in name else None
        modules = built(config)
        for layer in layers:
            layer, _, mode = layer.partition("/")
            wide = x.repeat(1, 1, 3) if layer == "attention" else x
            report[f"{name} {layer}"] = compare(modules[layer], wide, fullgraph=mode == "whole")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
