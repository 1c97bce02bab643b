"""Keep the amax histories of a model whose matmuls have formats with delayed scaling.

Each chunk of the model (each pipeline stage of this rank) has one `DelayedScaling`. It has one
history for each operand slot of each module. The pipeline schedules update it:

    after the forward pass of a micro-batch    the histories of the forward operands
    after its backward pass                    those of the backward operands

Transformer Engine updates them at the same times. There, each tensor has one history for all the
GEMMs that multiply it; here, each slot has one, because slots may have different formats and
transforms. Transformer Engine can also keep a weight in FP8 for an iteration, and then records its
amax once per iteration. Here, weights are quantized, and recorded, with each micro-batch.

An update exchanges the recorded amaxes of all rows at once, over the group of Transformer Engine's
amax reduction: all tensor-, data- and context-parallel ranks of the pipeline stage. All of them
take part in each update, even if they multiplied nothing, so an expert without tokens cannot block
it. The rows of local experts are exchanged by their position on the rank, as in Transformer Engine.

A recomputed forward pass uses the amaxes of the first one and records nothing. An evaluation
records nothing either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.collection.training_clock import clock
from megatron.core import parallel_state
from megatron.fake_quant import policy
from megatron.fake_quant.formats import Format
from megatron.fake_quant.matmul.delayed_scaling import AmaxHistories
from megatron.fake_quant.matmul.gemm_formats import SLOTS
from megatron.fake_quant.operator_rules import is_direct
from megatron.fake_quant.special_scalings import TensorScaling

FORWARD = ("fprop_a", "fprop_b")  #: slots of the forward pass
_LAST = "_last_delayed_scaling"  #: attribute of a model chunk with its last amax histories


@dataclass(frozen=True, slots=True)
class Operation:
    """A module's linear, qk or pv operation with delayed scaling, and the rows of its histories."""

    module: str  #: name of the module in the whole model
    name: str
    is_expert: bool
    rows: dict[str, int]  #: row of each slot in the histories of the forward or backward pass
    length: int  #: largest length of a history


class DelayedScaling:
    """Amax histories of the operands of one model chunk."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Create empty histories for the operands that may have a delayed format during the run."""
        self.operations: list[Operation] = []
        lengths: dict[bool, list[int]] = {True: [], False: []}
        for module in model.modules():
            for name in module.operations if _is_named_and_quantized(module) else ():
                rows = {}
                of_slots = _lengths(module, name)
                for slot, length in of_slots.items():
                    of_pass = lengths[slot in FORWARD]
                    rows[slot] = len(of_pass)
                    of_pass.append(length)
                if rows:
                    is_expert = getattr(module, "is_expert", False)
                    longest = max(of_slots.values())
                    self.operations.append(
                        Operation(module.identity.name, name, is_expert, rows, longest)
                    )
                    module.delayed_scaling = self
                    self.config = module.config
        self.forward, self.backward = AmaxHistories(lengths[True]), AmaxHistories(lengths[False])
        self._rows = {(op.module, op.name): op.rows for op in self.operations}
        #: amaxes that the forward pass of each micro-batch used, by the micro-batch's index, until
        #: its backward pass ends
        self._used: dict[int, Tensor] = {}

    def take(self, other: DelayedScaling) -> None:
        """Take over the histories of another object, which must have the same operations."""
        self.forward, self.backward = other.forward, other.backward

    def amax_of(self, module: str, operation: str, slot: str, x: Tensor, fmt: Format) -> Tensor:
        """Return the amax with which an operand is quantized, and record the operand's own amax.

        Nothing is recorded in an evaluation or a recomputed forward pass.
        Raises:
            ValueError: if torch.compile traces the call.
        """
        if not is_direct(x):
            raise ValueError(
                f"{module} has delayed scaling ({fmt.name}), whose state torch.compile and "
                f"torch.func cannot follow; run the model eagerly, or choose {_without(fmt)}"
            )
        assert isinstance(fmt.scaling, TensorScaling)
        row = self._rows[module, operation][slot]
        histories = self.forward if slot in FORWARD else self.backward
        if clock.micro_batch is None:  # evaluation
            return histories.amax[row]
        if clock.recomputing and slot in FORWARD:
            return self._used[clock.micro_batch.index][row]
        histories.record(row, x, fmt.scaling.history)
        return histories.amax[row]

    def begin_forward(self, micro_batch: int) -> None:
        """Remember the amaxes of a micro-batch's forward pass, for its recomputation."""
        self._used[micro_batch] = self.forward.amax

    def end_forward(self) -> None:
        """Update the histories of the forward operands. Must be called on all ranks of a stage."""
        self._update(self.forward)

    def end_backward(self, micro_batch: int) -> None:
        """Update the histories of the backward operands. Must be called on all ranks of a stage."""
        self._used.pop(micro_batch, None)
        self._update(self.backward)

    def state_of(self, operation: Operation) -> Tensor:
        """Return an operation's state [6, 1 + length]: each slot's amax in use, then its history.

        The rows of slots without delayed scaling are zero.
        """
        state = torch.zeros(len(SLOTS), 1 + operation.length, dtype=torch.float32, device="cpu")
        for slot, row in operation.rows.items():
            histories = self.forward if slot in FORWARD else self.backward
            state[SLOTS.index(slot), 0] = histories.amax[row]
            state[SLOTS.index(slot), 1:] = histories.history[row, : operation.length]
        return state

    def restore(self, operation: Operation, state: Tensor) -> None:
        """Set the state of an operation to one that `state_of` returned.

        The lengths of the histories may differ. The newest amaxes are kept.
        """
        for slot, row in operation.rows.items():
            histories = self.forward if slot in FORWARD else self.backward
            stored = state[SLOTS.index(slot)].to(histories.amax)
            histories.amax = histories.amax.index_fill(
                0, torch.tensor([row], dtype=torch.int64, device=stored.device), stored[0].item()
            )
            length = min(operation.length, len(stored) - 1)
            histories.history[row] = 0.0
            histories.history[row, :length] = stored[1 : 1 + length]

    def _update(self, histories: AmaxHistories) -> None:
        if not len(histories.amax):
            return
        if parallel_state.model_parallel_is_initialized():
            group = parallel_state.get_amax_reduction_group(
                with_context_parallel=True, tp_only_amax_red=self.config.tp_only_amax_red
            )
            if group.size() > 1:
                torch.distributed.all_reduce(
                    histories.recorded, op=torch.distributed.ReduceOp.MAX, group=group
                )
        histories.update()


def attach(model: torch.nn.Module, *, keep: bool = False) -> None:
    """Give a model chunk its amax histories, in `model.delayed_scaling`, if it needs any.

    Args:
        model: model chunk.
        keep: whether to keep earlier histories of the same operands, even if the model chunk had
            none in between.
    """
    scaling = DelayedScaling(model)
    before = getattr(model, _LAST, None)
    if keep and before is not None and before.operations == scaling.operations:
        scaling.take(before)
    if scaling.operations:
        setattr(model, _LAST, scaling)
    model.delayed_scaling = scaling if scaling.operations else None


def of_chunk(chunk: torch.nn.Module) -> DelayedScaling | None:
    """Return the amax histories of a model chunk, which may be wrapped; None if it has none."""
    while not hasattr(chunk, "delayed_scaling") and hasattr(chunk, "module"):
        chunk = chunk.module
    return getattr(chunk, "delayed_scaling", None)


def _is_named_and_quantized(module: torch.nn.Module) -> bool:
    """Return whether a module is `Quantized` and has a name.

    The class cannot be imported here, because its file imports this one.
    """
    return hasattr(module, "planned") and getattr(module, "identity", None) is not None


def _lengths(module: torch.nn.Module, operation: str) -> dict[str, int]:
    """Return the largest history length of each slot that may have a delayed format."""
    lengths: dict[str, int] = {}
    for formats, _ in module.planned(policy.current(), operation).of_all_times():
        for slot in SLOTS:
            fmt = getattr(formats, slot).format
            if fmt is not None and fmt.amax_source == "delayed":
                assert isinstance(fmt.scaling, TensorScaling)
                lengths[slot] = max(lengths.get(slot, 0), fmt.scaling.history)
    return lengths


def _without(fmt: Format) -> str:
    return "a format without delayed scaling, such as " + fmt.name.partition(":")[0]


def check_training(module: torch.nn.Module) -> None:
    """Refuse to run a module with delayed scaling if nothing would update its histories.

    Raises:
        ValueError: if a module has no histories, or trains outside the pipeline schedules.
    """
    if module.delayed_scaling is None:
        raise ValueError(
            "a module with a delayed format has no amax history; set the formats before the model "
            "is built, and call the module as a part of the model"
        )
    if clock.micro_batch is None and module.training and torch.is_grad_enabled():
        raise ValueError(
            "delayed scaling updates its amax histories in the pipeline schedules, and this "
            "forward pass runs outside of them; train with get_forward_backward_func() of "
            "megatron.core.pipeline_parallel or in `with "
            "megatron.core.tensor_saver.training_iteration(n):`, or evaluate under torch.no_grad()"
        )
