"""Trainer of another source tree: a loop over megatron-core's schedules, as in Megatron-LM.

Like Megatron-LM, the tree has its own `megatron.training`, requires CUDA, and selects NCCL.
"""

import os

import torch

from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets.utils import compile_helpers
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.legacy import fused_kernels
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import get_args, set_args

SEQUENCE, BATCH, VOCABULARY = 16, 2, 64


def initialize() -> None:
    assert torch.cuda.is_available(), "Megatron requires CUDA."
    set_args(validate_args(parse_args()))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    assert torch.cuda.device_count() == int(os.environ["LOCAL_WORLD_SIZE"])
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda:0"))
    parallel_state.initialize_model_parallel(get_args().tensor_model_parallel_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    init_num_microbatches_calculator(0, None, 2 * BATCH, BATCH, 1)
    compile_helpers()
    fused_kernels.load(get_args())
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == torch.cuda.device_memory_used() == 0
    torch.cuda.reset_peak_memory_stats()


def build() -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=get_args().tensor_model_parallel_size,
        pipeline_dtype=torch.float32,
        masked_softmax_fusion=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE)
    return model.to(device="cuda").cuda(torch.cuda.current_device())


def _step(batches, model):
    tokens = next(batches).to("cuda:0", non_blocking=True)
    positions = torch.arange(SEQUENCE, device="cuda").expand(BATCH, -1)
    mask = torch.full((1, 1, SEQUENCE, SEQUENCE), True, device=torch.device("cuda")).triu(1)
    losses = model(tokens, positions, mask, labels=tokens.roll(-1, 1))
    return losses, _mean


def _mean(losses):
    return losses.mean(), {"lm loss": losses.mean().detach()}


def train(batches, *, load: str | None) -> None:
    """Train the model, from the checkpoint `load` if given; print exact losses in hexadecimal."""
    args, model, schedule = get_args(), build(), get_forward_backward_func()
    if load is not None:
        state = torch.load(load)
        model.load_state_dict(state["model"])
        args.iteration = state["iteration"]
    start = torch.cuda.Event(enable_timing=True)
    for iteration in range(args.iteration, args.train_iters):
        start.record(torch.cuda.current_stream())
        reduced = schedule(
            forward_step_func=_step,
            data_iterator=batches,
            model=model,
            num_microbatches=2,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        torch.cuda.synchronize()
        loss = torch.stack([part["lm loss"] for part in reduced]).mean()
        training_log({"lm loss": loss}, iteration + 1, skipped_iter=0, grad_norm=1.0)
    if args.save is not None and torch.distributed.get_rank() == 0:
        state = {"model": model.state_dict(), "iteration": args.train_iters}
        torch.save(state, args.save)


def training_log(loss_dict, iteration, skipped_iter, grad_norm) -> None:
    if torch.distributed.get_rank() == 0:
        print(f"iteration {iteration} loss {float(loss_dict['lm loss']).hex()}", flush=True)
