"""Train a small GPT for one iteration; the tests run it in a process of its own.

It does not import `megatron.training`, so that it also runs on the plain wheel. It prints one JSON
line per rank with the loaded files, the losses, and a hash of every gradient.

    torchrun gpt_worker.py --dtype bf16 --tp 2 [--sequence-parallel] [--pp 2] [--micro-batches 2]
"""

import argparse
import atexit
import hashlib
import importlib.util
import inspect
import json
import os
import sys
from functools import partialmethod
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling the fused activations takes minutes

import torch

REPO = Path(__file__).resolve().parents[2]
VOCAB, SEQ, BATCH = 64, 32, 2


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--vpp", type=int, default=None)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--own-attention", action="store_true", help="ours, without formats")
    parser.add_argument("--attention-dropout", type=float, default=0.0)
    parser.add_argument("--hidden-dropout", type=float, default=0.0)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--bias", action="store_true", help="of the linear layers")
    parser.add_argument("--window", type=int, help="keys before a query, in every second layer")
    parser.add_argument("--freeze", nargs="*", default=[], help="parts of parameters' names")
    return parser.parse_args(arguments)


def activate_cpu_backend() -> None:
    """Load `megatron.cpu_backend` by its path, because the plain wheel has no such module.

    The wrappers of some tests have already loaded it.
    """
    if torch.cuda.is_available() or torch.cuda.current_device.__module__ != "torch.cuda":
        return
    path = REPO / "megatron" / "cpu_backend.py"
    spec = importlib.util.spec_from_file_location("cpu_backend_of_the_test", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.activate()


def build(options: argparse.Namespace) -> list[torch.nn.Module]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=options.bias,
        hidden_dropout=options.hidden_dropout,
        attention_dropout=options.attention_dropout,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bf16=options.dtype == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vpp,
        context_parallel_size=options.cp,
        sequence_parallel=options.sequence_parallel,
        window_size=None if options.window is None else (options.window, 0),
        window_attn_skip_freq=None if options.window is None else 2,
        recompute_granularity="full" if options.recompute else None,
        recompute_method="uniform" if options.recompute else None,
        recompute_num_layers=1 if options.recompute else None,
        deterministic_mode=False,
    )
    chunks = []
    for stage in range(options.vpp or 1):
        vp = {"vp_stage": stage} if options.vpp else {}
        here = {"ignore_virtual": False, **vp} if options.vpp else {}
        chunks.append(
            GPTModel(
                config,
                get_gpt_layer_local_spec(normalization="RMSNorm"),
                vocab_size=VOCAB,
                max_sequence_length=SEQ,
                pre_process=parallel_state.is_pipeline_first_stage(**here),
                post_process=parallel_state.is_pipeline_last_stage(**here),
                position_embedding_type="rope",
                **({"vp_stage": stage} if options.vpp else {}),
            ).to(dtype)  # as a trainer does; with torch 2.6, a norm in float32 returns float32
        )
    return chunks


def batches(seed: int = 7):
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def forward_step(data, model):
    from megatron.core.parallel_state import get_context_parallel_group
    from megatron.core.utils import get_batch_on_this_cp_rank

    tokens, labels = next(data)
    positions = torch.arange(SEQ).expand(BATCH, SEQ)
    mask = torch.ones(SEQ, SEQ).triu(1).bool().view(1, 1, SEQ, SEQ)
    batch = {"tokens": tokens, "labels": labels, "positions": positions, "attention_mask": mask}
    parameters = inspect.signature(get_batch_on_this_cp_rank).parameters
    options = {"cp_group": get_context_parallel_group()}
    if "is_hybrid_cp" in parameters:  # since megatron-core 0.18
        options["is_hybrid_cp"] = False
    tokens, labels, positions, mask = get_batch_on_this_cp_rank(batch, **options).values()
    return model(tokens, positions, mask, labels=labels), loss_of


def loss_of(losses):
    """Return the mean loss over the whole sequence, with this rank's share for the gradient.

    The schedule multiplies the gradient by the context-parallel size again.
    """
    from megatron.core import parallel_state

    loss = losses.float().mean()
    ranks = parallel_state.get_context_parallel_world_size()
    return loss / ranks**2, {"loss": loss.detach().clone()}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def start_processes() -> None:
    """Set up the device and torch.distributed."""
    activate_cpu_backend()
    os.environ.setdefault("RANK", "0")
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
    else:  # without torchrun; no port is needed, which another process could have taken
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    atexit.register(leave)


def start(options: argparse.Namespace) -> None:
    """Set up device, process groups and seeds."""
    start_processes()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        options.tp,
        options.pp,
        virtual_pipeline_model_parallel_size=options.vpp,
        context_parallel_size=options.cp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)


def leave() -> None:
    """Destroy the groups, even after an exception; otherwise, gloo may abort the process."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def main() -> None:
    options = parse()
    start(options)
    from megatron.core import tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model = build(options)
    if options.own_attention:
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        DotProductAttention.forward = partialmethod(
            DotProductAttention._quantized_forward, formats=(None, None)
        )
    for module in model:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not any(part in name for part in options.freeze))
    losses, grads = [], {}
    data = [batches() for _ in model]
    for _ in range(options.iterations):
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if options.vpp else data[0],
            model=model if options.vpp else model[0],
            num_microbatches=options.micro_batches,
            seq_length=SEQ,
            micro_batch_size=BATCH,
        )
        losses += [float(result["loss"]).hex() for result in results]
    for chunk, module in enumerate(model):
        for name, parameter in module.named_parameters():
            grad = parameter.grad
            grads[f"{chunk}.{name}"] = None if grad is None else digest(grad)
    layers = sys.modules["megatron.core.tensor_parallel.layers"].__file__
    report = {
        "losses": losses,
        "grads": grads,
        "layers": layers,
        "rng": digest(torch.get_rng_state()),
    }
    report["tracker"] = {
        name: digest(state)
        for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()
    }
    if out := os.environ.get("REPORT_DIR"):
        Path(out, f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))
    else:
        print(json.dumps(report))
    torch.distributed.barrier()  # a rank that left first could abort the other
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
