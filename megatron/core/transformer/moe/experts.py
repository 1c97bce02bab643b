"""Quantize and collect the grouped experts of the local layers, one expert at a time.

The file is overlaid because the local layer specification names `GroupedMLP`, which multiplies all
experts of a layer by one kernel of the package grouped_gemm. megatron-core has this class up to
release 0.16; later releases build `SequentialMLP` instead, whose experts are parallel linear
layers. The seam is `forward`.

Each linear layer of each expert gets a module of its own, `ExpertLinear`, with the name that it has
in `SequentialMLP`. With a format, this module quantizes the operands of its expert and multiplies
them. Therefore, results and records equal those of `SequentialMLP` with the same weights. Experts
without a format are still multiplied together by grouped_gemm, even when they are collected. If
this package is not installed, as on a CPU, torch multiplies for each expert separately.

Shape suffixes: T tokens, H input features, O output features, E experts of this rank.
"""

import dataclasses
from types import SimpleNamespace

import torch

from megatron.collection.capture import Capture
from megatron.collection.module_identity import Identified
from megatron.core import tensor_parallel, tensor_saver
from megatron.core._overlay import shadowed
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    QuantizedLinear,
    RowParallelLinear,
)
from megatron.fake_quant import policy
from megatron.fake_quant.matmul.gemm_formats import GemmFormats

_upstream = shadowed(__name__)


def _gmm(input_TH, weight_EHO, tokens_per_expert, trans_b=False):
    """Multiply each expert's tokens by the expert's weight, as `grouped_gemm.ops.gmm` does."""
    assert not trans_b, "GroupedMLP does not transpose its weights"
    parts = torch.split(input_TH, tokens_per_expert.tolist())
    return torch.cat([x_TH @ w_HO for x_TH, w_HO in zip(parts, weight_EHO, strict=True)])


@dataclasses.dataclass
class _Operands:
    """Operands of one expert's matmul, with its formats and the recorder of its tensors."""

    input_TH: torch.Tensor
    weight_OH: torch.Tensor
    formats: GemmFormats | None  #: formats of the product; None for high precision
    capture: Capture | None  #: recorder of this pass's tensors; None if they are not collected


class ExpertLinear(QuantizedLinear, torch.nn.Module):
    """A linear layer of one of the grouped experts; `GroupedMLP` owns its weight."""

    is_expert = True

    def __init__(self, config, *, input_size, output_size, shards, dims):
        """Create the layer without parameters.

        Args:
            config: configuration of the model.
            input_size: number of input features, over all shards.
            output_size: number of output features, over all shards.
            shards: number of shards of the weight's input features and output features.
            dims: `dims` of the records; see `QuantizedLinear`.
        """
        super().__init__()
        self.config, self.dims = config, dims
        self.input_size, self.output_size = input_size, output_size
        self.input_size_per_partition = input_size // shards[0]
        self.output_size_per_partition = output_size // shards[1]

    def watch(self, input_TH, weight_OH):
        """Pass the operands of the expert's product to the collection, and return them."""
        formats = self.formats_of("linear")
        capture = tensor_saver.capture(self.identity, self.layer_type, training=self.training)
        if formats is not None or capture is not None:
            weight_OH = weight_OH.contiguous()  # as the weight of a parallel linear layer
        if capture is not None:
            capture.note_accumulators(linear=formats)
            input_TH, weight_OH = self._watch_operands(capture, input_TH, weight_OH, formats)
        return _Operands(input_TH, weight_OH, formats, capture)

    def forward(self, operands, output_TO):
        """Compute the expert's product, pass it to the collection, and return it.

        Args:
            operands: the operands from `watch`.
            output_TO: product in high precision if grouped_gemm has computed it; None otherwise.
        """
        if operands.formats is not None:
            output_TO = self._quantized_matmul(
                operands.input_TH, operands.weight_OH, operands.formats, operands.capture
            )
        elif output_TO is None:
            output_TO = operands.input_TH @ operands.weight_OH.t()
        if operands.capture is not None:
            self._watch_output(operands.capture, output_TO, operands.formats)
        return output_TO


class _Expert(torch.nn.Module):
    """The two linear layers of one of the grouped experts."""

    def __init__(self, config, shards):
        super().__init__()
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        gated = 2 if config.gated_linear_unit else 1
        self.linear_fc1 = ExpertLinear(
            config,
            input_size=hidden,
            output_size=gated * ffn,
            shards=(1, shards),
            dims=ColumnParallelLinear.dims,
        )
        self.linear_fc2 = ExpertLinear(
            config,
            input_size=ffn,
            output_size=hidden,
            shards=(shards, 1),
            dims=RowParallelLinear.dims,
        )


if hasattr(_upstream, "GroupedMLP"):
    #: True if the package grouped_gemm is installed
    HAVE_GROUPED_GEMM = _upstream.gg.grouped_gemm_is_available()
    if not HAVE_GROUPED_GEMM:
        _upstream.gg = SimpleNamespace(
            ops=SimpleNamespace(gmm=_gmm), assert_grouped_gemm_is_available=lambda: None
        )

    class GroupedMLP(Identified, _upstream.GroupedMLP):
        """The `GroupedMLP` of megatron-core, with matmuls that can be quantized and collected."""

        def __init__(self, num_local_experts, config, pg_collection=None):
            super().__init__(num_local_experts, config, pg_collection)
            self.local_experts = torch.nn.ModuleList(
                _Expert(config, self.tp_group.size()) for _ in range(num_local_experts)
            )

        def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs):
            """Apply the experts to their tokens, which are sorted by expert."""
            if not (policy.current().changes_matmuls or tensor_saver.enabled()):
                return super().forward(
                    permuted_local_hidden_states, tokens_per_expert, permuted_probs
                )
            return self._one_by_one(permuted_local_hidden_states, tokens_per_expert, permuted_probs)

        def _one_by_one(self, hidden_TH, tokens_per_expert, probs_T):
            """Compute what the wheel's `forward` computes, but call `_product` for the matmuls."""
            if not self.config.bf16:
                raise ValueError(
                    "grouped experts (moe_grouped_gemm) run in bf16 only; give --bf16, or leave "
                    "out --moe-grouped-gemm"
                )
            if self.config.moe_apply_probs_on_input:
                if self.config.moe_router_topk != 1:
                    raise ValueError(
                        "moe_apply_probs_on_input needs one expert per token; set "
                        f"moe_router_topk to 1 instead of {self.config.moe_router_topk}"
                    )
                hidden_TH = (probs_T.unsqueeze(-1) * hidden_TH).to(hidden_TH.dtype)
                probs_T = torch.ones_like(probs_T)
            hidden, experts = self.config.hidden_size, self.num_local_experts
            fc1_EHO = self.weight1.view(experts, hidden, -1)
            fc2_EHO = self.weight2.view(experts, -1, hidden)
            fc1_TO = self._product("linear_fc1", hidden_TH, fc1_EHO, tokens_per_expert)
            scale = probs_T.unsqueeze(-1)
            if not self.activation_recompute:
                inner_TH = self.activation_func_with_probs(fc1_TO, scale)
                return self._product("linear_fc2", inner_TH, fc2_EHO, tokens_per_expert), None
            self.activation_checkpoint = tensor_parallel.CheckpointWithoutOutput()
            inner_TH = self.activation_checkpoint.checkpoint(
                self.activation_func_with_probs, fc1_TO, scale
            )
            output_TO = self._product("linear_fc2", inner_TH, fc2_EHO, tokens_per_expert)
            self.activation_checkpoint.discard_output_and_register_recompute(output_TO)
            return output_TO, None

        def _product(self, name, input_TH, weight_EHO, tokens_per_expert):
            """Multiply each expert's tokens by the weight of the expert's layer `name`."""
            layers = [getattr(expert, name) for expert in self.local_experts]
            parts = torch.split(input_TH, tokens_per_expert.tolist())
            operands = [
                layer.watch(x_TH, w_HO.t())
                for layer, x_TH, w_HO in zip(layers, parts, weight_EHO, strict=True)
            ]
            products = _plain_products(operands) if HAVE_GROUPED_GEMM else {}
            return torch.cat(
                [
                    layer(x, products.get(number))
                    for number, (layer, x) in enumerate(zip(layers, operands, strict=True))
                ]
            )


def _plain_products(operands):
    """Return the products of the experts that have no format, keyed by expert number.

    Experts without tokens are left out, because grouped_gemm refuses an empty input.
    """
    numbers = [
        number
        for number, operand in enumerate(operands)
        if operand.formats is None and len(operand.input_TH)
    ]
    if not numbers:
        return {}
    inputs = [operands[number].input_TH for number in numbers]
    products = _upstream.gg.ops.gmm(
        torch.cat(inputs),
        torch.stack([operands[number].weight_OH.t() for number in numbers]),
        torch.tensor([len(x_TH) for x_TH in inputs], dtype=torch.int64, device="cpu"),
        trans_b=False,
    )
    return dict(zip(numbers, torch.split(products, [len(x_TH) for x_TH in inputs]), strict=True))
