"""Look up the formats and random seeds with which the matmuls of a layer are quantized.

The formats depend on the layer's name and number and, under a recipe with a schedule, on the
iteration. Each layer looks them up once and then reads them from a plan.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.collection.module_identity import Identified, ModuleIdentity
from megatron.collection.training_clock import clock, need_clock
from megatron.core import parallel_state
from megatron.core.low_precision import model_roots
from megatron.core.low_precision.delayed_scaling import DelayedScaling, check_training
from megatron.core.low_precision.global_amax import global_amax
from megatron.fake_quant import policy
from megatron.fake_quant.formats import Format
from megatron.fake_quant.matmul.gemm import AmaxCallback
from megatron.fake_quant.matmul.gemm_formats import SLOTS, GemmFormats
from megatron.fake_quant.policy import OperationPolicy
from megatron.fake_quant.random_bits import derive_seed
from megatron.tensor_record import CODES, ON_REQUEST, TENSOR_NAMES

#: One set per observed forward pass, to which each layer adds itself when its own code runs. The
#: code does not run if something has replaced the forward pass of the layer.
observers: list[set["Quantized"]] = []


class Collected(Identified):
    """A module whose tensors can be collected."""

    operations: tuple[str, ...] = ()  #: operations of this module, from `quant_type.OPERATIONS`
    layer_type: str  #: layer type in the records of the module's tensors
    is_called = True  #: True if the module itself is called, not only the module that contains it

    def tensor_names(self) -> set[str]:
        """Return the names of this module's tensors."""
        return set(TENSOR_NAMES[self.layer_type]) - set(ON_REQUEST)


class Quantized(Collected):
    """A module whose matmuls can be quantized and whose tensors can be collected."""

    #: amax histories of the model chunk; None if no operand of this module has delayed scaling
    delayed_scaling: DelayedScaling | None = None
    _plans: dict[str, OperationPolicy] | None = None
    _planned_in = 0  #: value of `policy.changes()` when the formats were looked up

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model_roots.register(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copied or loaded layer, and look its formats up anew."""
        super().__setstate__(state)  # type: ignore[misc]
        self._plans = None
        if self.identity is None:  # it was copied before its model ran
            model_roots.register(self)

    def identify(self, identity: ModuleIdentity, layers_in_stack: int) -> None:
        """Set the name, and look the formats up anew if it has changed."""
        if identity != self.identity:
            self._plans = None
        super().identify(identity, layers_in_stack)

    def plan_of(self, operation: str) -> OperationPolicy:
        """Return the formats of this module's operation (linear, qk or pv) for all iterations.

        A module that no model has named gets a name of its own.
        """
        if self._plans is None or self._planned_in != policy.changes():
            if self.identity is None:
                model_roots.name_alone(self)
            current = policy.current()
            self._plans = {name: self.planned(current, name) for name in self.operations}
            self._planned_in = policy.changes()
        return self._plans[operation]

    def planned(self, current: policy.Policy, operation: str) -> OperationPolicy:
        """Return the formats that a policy gives to this module's operation."""
        name = "" if self.identity is None else self.identity.name
        layer = -1 if self.identity is None else self.identity.layer_idx
        head = self.identity is not None and self.identity.is_lm_head
        return current.plan(operation, name, layer, self.num_layers, is_lm_head=head)

    def tensor_names(self) -> set[str]:
        """Return the names of this module's tensors.

        The codes of operands that are never quantized are left out.
        """
        names = set(TENSOR_NAMES[self.layer_type])
        for operation in self.operations:
            times = [formats for formats, _ in self.plan_of(operation).of_all_times()]
            names -= {
                name
                for slot, name in zip(SLOTS, CODES[operation], strict=True)
                if all(getattr(formats, slot).format is None for formats in times)
            }
        return names

    def formats_of(self, operation: str) -> GemmFormats | None:
        """Return an operation's formats in the current iteration, or None for high precision.

        Raises:
            ValueError: if the formats depend on the iteration and the module trains, but nothing
                counts iterations.
        """
        plan = self.plan_of(operation)
        # This order of the conditions keeps compiled code independent of the observers.
        if not torch.compiler.is_compiling() and observers:
            for ran in observers:
                ran.add(self)
        if clock.micro_batch is None and plan.changes:
            need_clock("a recipe with iterations", training=self.training)
        return plan.at(max(clock.iteration, 1))

    def rounding_seed(self, formats: GemmFormats, operation: str = "linear") -> int | None:
        """Return the seed of a matmul's random numbers; None if its formats need no random numbers.

        Stochastic rounding and the signs of Hadamard transforms use the random numbers. The seed is
        computed from the run's seed, the layer, the iteration and the micro-batch. A recomputed
        forward pass, a resumed run and another pipeline layout therefore round in the same way.
        Ranks with different data have different seeds. Tensor-parallel ranks share one seed,
        because some of their operands are replicas of one tensor. Values at the same position in
        two shards thus get the same random bits. In evaluation, the seed depends on the iteration,
        but not on a micro-batch. The state of torch's generators does not change.

        Raises:
            ValueError: if the module trains, but nothing counts iterations.
        """
        if not formats.random:
            return None
        if clock.micro_batch is None:
            need_clock("rounding with random numbers", training=self.training)
        name = "" if self.identity is None else self.identity.name
        place: tuple[int | str, ...] = ("evaluation", clock.iteration)
        if clock.micro_batch is not None:
            place = (clock.micro_batch.iteration, clock.micro_batch.index)
        seed = torch.initial_seed() if clock.seed is None else clock.seed
        ranks = _data_ranks(is_expert=getattr(self, "is_expert", False))
        return derive_seed(seed, name, operation, *place, *ranks)

    def amax_of(
        self, formats: GemmFormats, dims: Sequence[str], operation: str = "linear"
    ) -> AmaxCallback | None:
        """Return the callback that returns amaxes for operands with `:global` or delayed scaling.

        The result is None if no operand has such a format.

        Args:
            formats: formats of the operands of a matmul.
            dims: dimension letters and sharding of the operands A, B and C; see `global_amax`.
            operation: operation of this module (linear, qk or pv).

        Raises:
            ValueError: if delayed scaling is set, but the module has no amax histories or nothing
                updates them.
        """
        sources = formats.amax_sources
        if sources <= {"own"}:
            return None
        if "delayed" in sources:
            check_training(self)
        is_expert = getattr(self, "is_expert", False)
        of_operand = dict(zip("abc", dims, strict=True))

        def amax_of(slot: str, x: torch.Tensor, fmt: Format) -> torch.Tensor:
            if fmt.amax_source == "delayed":
                return self.delayed_scaling.amax_of(self.identity.name, operation, slot, x, fmt)
            return global_amax(x, of_operand[slot[-1]], is_expert=is_expert)

        return amax_of


def _data_ranks(*, is_expert: bool) -> tuple[int, ...]:
    """Return (data-parallel rank,), or an empty tuple if there are no parallel groups."""
    if not parallel_state.model_parallel_is_initialized():
        return ()
    if is_expert:
        return (parallel_state.get_expert_data_parallel_rank(),)
    return (parallel_state.get_data_parallel_rank(with_context_parallel=True),)


def operand_names(formats: GemmFormats | None, *slots: str) -> str | None:
    """Return the `format` field of a tensor's record; see `GemmFormats.names`."""
    return None if formats is None else formats.names(*slots)
