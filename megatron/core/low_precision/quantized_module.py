"""A layer whose matmuls can be quantized: what they go through now, and with which random numbers.

Which formats are in force depends on the layer's name, on its number and, under a recipe with a
schedule, on the iteration. The answer is looked up once a layer and then read off a plan.
"""

import torch

from megatron.collection.module_identity import Identified
from megatron.collection.training_clock import clock
from megatron.core import parallel_state
from megatron.fake_quant import policy
from megatron.fake_quant.gemm import SLOTS, GemmFormats
from megatron.fake_quant.policy import OperationPolicy
from megatron.fake_quant.random_bits import derive_seed
from megatron.tensor_record import CODES, TENSOR_NAMES


class Quantized(Identified):
    """A module with matmuls of ours."""

    operations: tuple[str, ...] = ()  #: of `quant_type.OPERATIONS`, those of this module
    layer_type: str  #: as records have it
    _plans: dict[str, OperationPolicy] | None = None

    def plan_of(self, operation: str) -> OperationPolicy:
        """What an operation goes through over the run. A module outside of a named model is taken
        for one outside of the layers.
        """
        if self._plans is None:
            custom_quant_type = policy.current()
            name = "" if self.identity is None else self.identity.name
            layer = -1 if self.identity is None else self.identity.layer_idx
            head = self.identity is not None and self.identity.is_lm_head
            layers = self.config.num_layers
            self._plans = {
                each: custom_quant_type.plan(each, name, layer, layers, is_lm_head=head)
                for each in self.operations
            }
        return self._plans[operation]

    def tensor_names(self) -> set[str]:
        """The tensors that it can show: codes only of operands that are quantized at some time."""
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
        """What an operation goes through in this iteration; None: the wheel's own path."""
        return self.plan_of(operation).at(max(clock.iteration, 1))

    def rounding_seed(self, formats: GemmFormats, operation: str = "linear") -> int | None:
        """The seed of a matmul's stochastic rounding, None where nothing is rounded so.

        It follows from the run's seed, the layer, the iteration and the micro-batch, so that a
        recomputed forward pass, a resumed run and other pipeline stages round as the first one did.
        Ranks with other data have other seeds. Tensor-parallel ranks have the same, since some of
        their operands are replicas of one tensor; of their shards, values at the same place of two
        ranks get the same random bits. A forward pass alone (evaluation) takes the iteration's, and
        leaves torch's generators as they were.
        """
        if not formats.stochastic:
            return None
        name = "" if self.identity is None else self.identity.name
        place: tuple[int | str, ...] = ("evaluation", clock.iteration)
        if clock.micro_batch is not None:
            place = (clock.micro_batch.iteration, clock.micro_batch.index)
        seed = torch.initial_seed() if clock.seed is None else clock.seed
        ranks = _data_ranks(is_expert=getattr(self, "is_expert", False))
        return derive_seed(seed, name, operation, *place, *ranks)


def _data_ranks(*, is_expert: bool) -> tuple[int, ...]:
    """Where this rank stands among those that see other data."""
    if not parallel_state.model_parallel_is_initialized():
        return ()
    if is_expert:
        return (parallel_state.get_expert_data_parallel_rank(),)
    return (parallel_state.get_data_parallel_rank(with_context_parallel=True),)


def operand_names(formats: GemmFormats | None, *slots: str) -> str | None:
    """What a tensor goes through in the slots in which it is an operand, as a record has it."""
    if formats is None:
        return None
    return " | ".join(dict.fromkeys(str(formats.effective(slot)) for slot in slots))
