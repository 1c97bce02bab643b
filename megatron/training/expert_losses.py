"""Collect the losses of mixture-of-experts routers for the training log.

These losses contribute to the gradient, but are not part of the `lm loss`.
"""

from dataclasses import dataclass

import torch

from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import device

HAS_TRACKER_OBJECT = hasattr(moe_utils, "get_moe_metrics_tracker")
if HAS_TRACKER_OBJECT:  # since megatron-core 0.18
    from megatron.core.transformer.moe.moe_utils import get_moe_metrics_tracker
else:
    from megatron.core.transformer.moe.moe_utils import (
        get_moe_layer_wise_logging_tracker,
        track_moe_metrics,
    )


@dataclass(frozen=True)
class _Loss:
    """A router loss, and how its values are combined across ranks."""

    name: str  #: name of the loss in megatron-core's tracker
    sums_over_data: bool = False  #: True if the loss is summed over data-parallel ranks
    #: True if the loss is summed over tensor- and context-parallel ranks; if not, it is averaged
    sums: bool = True


_LOSSES = {
    "aux_loss": _Loss("load_balancing_loss"),
    "seq_aux_loss": _Loss("seq_load_balancing_loss"),
    "global_aux_loss": _Loss("global_load_balancing_loss", sums_over_data=True),
}
_Z_LOSS = _Loss("z_loss", sums=False)


def expert_losses(config: TransformerConfig) -> dict[str, float]:
    """Return the mean of each router loss (without its coefficient) over layers and micro-batches.

    Must be called on all ranks, once per iteration. The result is the same on every rank.
    """
    losses = _in_use(config)
    if not losses:
        return {}
    layers = config.num_layers + (config.mtp_num_layers or 0)
    # Pipeline stages without experts also need entries in the tracker, because all ranks must
    # reduce the same losses.
    for loss in losses:
        _enter(loss, layers)
    means: dict[str, torch.Tensor] = {}
    report = get_moe_metrics_tracker().report if HAS_TRACKER_OBJECT else track_moe_metrics
    report(
        loss_scale=1 / get_num_microbatches(),
        iteration=0,  # used only by a TensorBoard writer, and none is passed
        total_loss_dict=means,
        num_layers=config.num_layers,
        moe_layer_freq=config.moe_layer_freq,
        mtp_num_layers=config.mtp_num_layers,
    )
    return {loss.name.replace("_", " "): means[loss.name].item() for loss in losses}


def _in_use(config: TransformerConfig) -> list[_Loss]:
    if not config.num_moe_experts:
        return []
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, coefficients = [kinds], [coefficients]
    balancing = [
        _LOSSES[kind]
        for kind, coefficient in zip(kinds, coefficients, strict=True)
        if kind in _LOSSES and coefficient
    ]
    return balancing + ([_Z_LOSS] if config.moe_z_loss_coeff else [])


def _enter(loss: _Loss, layers: int) -> None:
    """Register a loss, and the groups that reduce it, in megatron-core's tracker."""
    groups = _groups(loss)
    if HAS_TRACKER_OBJECT:
        tracker = get_moe_metrics_tracker()
        tracker.ensure_initialized(loss.name, layers, device.current())
        entry = tracker.metrics[loss.name]
        entry.reduce_group, entry.avg_group = groups["reduce_group"], groups["avg_group"]
        entry.needs_dp_avg = loss.sums and not loss.sums_over_data
        return
    entry = get_moe_layer_wise_logging_tracker().setdefault(
        loss.name, {"values": torch.zeros(layers, device=device.current())}
    )
    entry |= groups | {"reduce_group_has_dp": loss.sums_over_data}


def _groups(loss: _Loss) -> dict:
    data = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if not loss.sums:
        return {"reduce_group": None, "avg_group": data}
    model = parallel_state.get_tensor_and_context_parallel_group()
    return {"reduce_group": data if loss.sums_over_data else model, "avg_group": None}
