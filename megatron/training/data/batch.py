"""Feed micro-batches to the pipeline stages and compute the loss from their output.

In shapes, b is the micro-batch size and s is the sequence length.
"""

import argparse
import inspect
from functools import partial

import torch
import torch.distributed as dist

from megatron.core import parallel_state, tensor_saver
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import device
from megatron.training.data.datasets import MicroBatches, stage_needs_data
from megatron.training.signals import raise_if_received

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
#: True for megatron-core 0.18 and later, whose `get_batch_on_this_cp_rank` also divides packed
#: sequences
_NAMES_HYBRID = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters


def _share(batch: dict[str, torch.Tensor] | None, args: argparse.Namespace) -> dict:
    """Broadcast the batch of the first tensor-parallel rank to its group, and return the batch.

    All [b, s] fields are sent in one message.
    """
    target = device.current()
    shape = (len(FIELDS), args.micro_batch_size, args.seq_length)
    if batch is not None:
        # The loss mask holds only zeros and ones, so sending it as integers loses nothing.
        packed = torch.stack([batch[name].to(torch.int64) for name in FIELDS]).to(target)
    else:
        assert parallel_state.get_tensor_model_parallel_rank() > 0, "the first rank reads the data"
        packed = torch.empty(shape, dtype=torch.int64, device=target)
    mask = None
    if args.create_attention_mask_in_dataloader:
        b, s = shape[1:]
        mask = (
            batch["attention_mask"].to(target)
            if batch is not None
            else torch.empty((b, 1, s, s), dtype=torch.bool, device=target)
        )
    if args.tensor_model_parallel_size > 1:
        group = parallel_state.get_tensor_model_parallel_group()
        source = parallel_state.get_tensor_model_parallel_src_rank()
        for tensor in (packed, mask):
            if tensor is not None:
                dist.broadcast(tensor, source, group=group)
    shared = dict(zip(FIELDS, packed.unbind(), strict=True))
    return shared | {"loss_mask": shared["loss_mask"].float(), "attention_mask": mask}


def get_batch(batches: MicroBatches, args: argparse.Namespace) -> dict[str, torch.Tensor | None]:
    """Return this context-parallel rank's part of the next micro-batch.

    Every value is None on a pipeline stage that needs no data.
    """
    raise_if_received()
    sample_idx, batch = next(batches)
    tensor_saver.set_sample_idx(sample_idx)
    if not stage_needs_data(args):
        return dict.fromkeys((*FIELDS, "attention_mask"))
    return part_of_this_rank(_share(batch, args))


def part_of_this_rank(batch: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Return this context-parallel rank's part of a batch whose sequences are not packed."""
    # Without `cp_group`, megatron-core 0.18 and later would use a group of all ranks.
    group = parallel_state.get_context_parallel_group()
    not_hybrid = {"is_hybrid_cp": False} if _NAMES_HYBRID else {}
    return get_batch_on_this_cp_rank(batch, cp_group=group, **not_hybrid)


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor, *, args: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the token losses, the number of tokens, and a dict with both for the log.

    With context parallelism, `_weight_over_context` may scale the sum, but not the one in the dict.

    Args:
        loss_mask: 1 for each token that contributes to the loss and 0 for the others, [b, s].
        output: the loss of every token, [b, s].
        args: the run's arguments.
    """
    mask = loss_mask.view(-1)
    loss = (output.view(-1).float() * mask).sum()
    tokens = mask.sum().to(torch.int)
    logged = torch.stack([loss.detach(), tokens.to(loss.dtype)])
    if args.context_parallel_size > 1 and not args.calculate_per_token_loss:
        loss = loss * _weight_over_context(tokens)
    return loss, tokens, {"lm loss": logged}


def _weight_over_context(tokens: torch.Tensor) -> torch.Tensor:
    """Return this rank's token count divided by the mean count in its context-parallel group.

    megatron-core divides the sum of the losses by this rank's token count, and then averages the
    gradients over the ranks. Without this weight, a rank with few unmasked tokens would count as
    much as one with many. Without `--eod-mask-loss`, the weight is 1.
    """
    mean = tokens.to(torch.float32)
    group = parallel_state.get_context_parallel_group()
    dist.all_reduce(mean, group=group)
    mean /= group.size()
    return tokens / mean.clamp(min=1 / group.size())


def forward_step(batches: MicroBatches, model: torch.nn.Module, *, args: argparse.Namespace):
    """Run the model on the next micro-batch, and return the output and the loss function.

    megatron-core's pipeline schedules call this function on each stage.
    """
    batch = get_batch(batches, args)
    extra = {"loss_mask": batch["loss_mask"]} if args.mtp_num_layers else {}
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"] if _computes_loss(model) else None,
        **extra,
    )
    return output, partial(loss_func, batch["loss_mask"], args=args)


def _computes_loss(model: torch.nn.Module) -> bool:
    return get_attr_wrapped_model(model, "post_process")


def average_losses(per_micro_batch: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Return the mean loss per token over all micro-batches and data-parallel ranks.

    The last pipeline stage computes the mean and broadcasts it to the other stages, because all
    ranks must react in the same way to a loss that is not finite.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    names = ["lm loss"]
    means = torch.zeros(len(names), dtype=torch.float64, device=device.current())
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        for index, name in enumerate(names):
            total = torch.stack([losses[name] for losses in per_micro_batch]).sum(dim=0)
            dist.all_reduce(
                total, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
            )
            means[index] = total[0] / total[1]
    if dist.get_world_size(group) > 1:
        dist.broadcast(means, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return dict(zip(names, means.tolist(), strict=True))
