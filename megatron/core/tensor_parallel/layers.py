"""Fake-quantize and collect the GEMM operands of parallel linear layers.

The file is overlaid because the local layer specification, MLA, MoE and the output layer name these
classes directly. The seam is `_forward_impl`, which the wheel calls with the operands and the
communication flags of one matmul.

With no format and nothing to collect, that call goes to the wheel unchanged. Otherwise the
communication, a gather (sequence parallel) or a copy (tensor parallel), runs before the matmul.
Blocks along the token axis are then formed from the operands that the GEMM multiplies, and these
operands are collected. A matmul that is collected but not quantized still runs the wheel's code.

The cost is memory: under sequence parallelism, the gathered input is kept for the backward pass,
where the wheel keeps this rank's slice and gathers it again.

Letters of the recorded dims: s sequence, b batch, t tokens, h input features, o output features.
"""

from megatron.core import tensor_saver
from megatron.core._overlay import shadowed
from megatron.core.low_precision.quantized_module import Quantized, operand_names
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.fake_quant.matmul.gemm import quantized_matmul

_upstream = shadowed(__name__)


class QuantizedLinear(Quantized):
    """The common base class of column-parallel, row-parallel and grouped-expert linear layers."""

    operations = ("linear",)
    layer_type = "linear"
    #: `dims` in the records of the local GEMM's input, weight, output and input gradient
    dims: tuple[str, str, str, str]

    def _forward_impl(self, input, weight, *args, **kwargs):
        # `megatron.fake_quant.policy` resolves the formats from flags, recipe and environment.
        formats = self.formats_of("linear")
        capture = tensor_saver.capture(self.identity, self.layer_type, training=self.training)
        if formats is None and capture is None:
            return super()._forward_impl(input, weight, *args, **kwargs)
        return self._observed_matmul(input, weight, formats, capture, *args, **kwargs)

    def _observed_matmul(
        self,
        input,
        weight,
        formats,
        capture,
        bias,
        gradient_accumulation_fusion,
        allreduce_dgrad,
        sequence_parallel,
        grad_output_buffer=None,
        wgrad_deferral_limit=None,
        tp_group=None,
        gtp_remat_size=1,
    ):
        """Gather the input if necessary, multiply shards, and pass all tensors to `capture`."""
        if gradient_accumulation_fusion or grad_output_buffer is not None:
            raise ValueError(
                "gradient-accumulation fusion and deferred embedding weight gradients compute the "
                "weight gradient outside of the quantized and collected matmul; give "
                "--no-gradient-accumulation-fusion and leave out --defer-embedding-wgrad-compute"
            )
        if gtp_remat_size > 1:
            raise ValueError(
                f"this layer keeps 1/{gtp_remat_size} of its weight per rank and gathers it inside "
                "of the matmul, so the weight can be neither quantized nor collected; set "
                "gtp_weight_remat_size and expert_gtp_weight_remat_size to 1"
            )
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        if capture is not None:
            capture.note_accumulators(linear=formats)
            input, weight = self._watch_operands(capture, input, weight, formats)
        if formats is None:
            output = super()._forward_impl(
                input=input,
                weight=weight,
                bias=None,
                gradient_accumulation_fusion=False,
                allreduce_dgrad=False,
                sequence_parallel=False,
                tp_group=tp_group,
            )
        else:
            output = self._quantized_matmul(input, weight, formats, capture)
        if capture is not None:
            self._watch_output(capture, output, formats)
        return output if bias is None else self._add_bias(output, bias)

    @staticmethod
    def _add_bias(output_sbo, bias_O):
        """Add the bias of the linear layer to its output.

        This happens after the output was collected, so the collected tensor does not contain the
        bias. The tokens are one axis, so that the gradient is summed over it in the wheel's order.
        """
        return (output_sbo.flatten(0, -2) + bias_O).view(output_sbo.shape)

    def _quantized_matmul(self, input_sbh, weight_OH, formats, capture):
        """Flatten the tokens to one axis, [s, b, h] -> [s * b, h], and run the quantized matmul."""
        input_TH = input_sbh.reshape(-1, input_sbh.shape[-1])
        of_input, of_weight, of_output, _ = self._dims_of(input_sbh)
        output_TO = quantized_matmul(
            input_TH,
            weight_OH,
            formats,
            seed=self.rounding_seed(formats),
            observe=None if capture is None else capture.observer("linear"),
            amax_of=self.amax_of(formats, (of_input, of_weight, without_sums(of_output))),
        )
        return output_TO.view(*input_sbh.shape[:-1], output_TO.shape[-1])

    def _watch_operands(self, capture, input, weight, formats):
        of_input, of_weight, _, of_grad_input = self._dims_of(input)
        format_names = operand_names(formats, "fprop_a", "wgrad_a")
        capture.save("input", input, dims=of_input, format=format_names)
        format_names = operand_names(formats, "fprop_b", "dgrad_b")
        capture.save("weight", weight, dims=of_weight, format=format_names)
        return (
            capture.watch_operand(input, "grad_input", dims=of_grad_input, phase="post"),
            capture.watch_operand(
                weight, "grad_weight", dims=self._over_tokens(of_weight), phase="post"
            ),
        )

    def _over_tokens(self, of_weight):
        """Return the `dims` (dimension letters and sharding) of a weight gradient.

        The gradient is a sum over tokens, and each context-parallel rank has a part of it. An
        expert's gradient covers the tokens that were sent to this rank.
        """
        if self.is_expert or self.config.context_parallel_size == 1:
            return of_weight
        return f"{of_weight} | partial[cp]"

    def _watch_output(self, capture, output, formats):
        of_output = self._dims_of(output)[2]
        capture.save("output", output, dims=of_output, phase="post")
        of_grad = without_sums(of_output)
        format_names = operand_names(formats, "dgrad_c", "wgrad_c")
        capture.watch_result(output, "grad_output", dims=of_grad, format=format_names)

    def _dims_of(self, activation):
        """Return this layer's `dims` (dimension letters and sharding) for `activation`.

        Experts have activations [tokens, h] and a tensor-parallel group of their own.
        """
        dims = self.dims
        if activation.dim() == 2:
            dims = [part.replace("s b ", "t ") for part in dims]
        if self.is_expert:
            dims = [part.replace("[tp]", "[etp]") for part in dims]
        return dims


def without_sums(of_output: str) -> str:
    """Return the `dims` of an output gradient, given those of the output.

    If the output is a partial sum, each rank still has the whole output gradient.
    """
    return of_output.partition(" |")[0]


class ColumnParallelLinear(QuantizedLinear, _upstream.ColumnParallelLinear):
    """The `ColumnParallelLinear` of megatron-core with quantization; ranks split the weight's rows.

    megatron-core names the class after the columns of the transposed weight.
    """

    dims = ("s b h", "o[tp] h", "s b o[tp]", "s b h | partial[tp]")


class RowParallelLinear(QuantizedLinear, _upstream.RowParallelLinear):
    """The `RowParallelLinear` of megatron-core with quantization; ranks split the weight's columns.

    megatron-core names the class after the rows of the transposed weight.
    """

    dims = ("s b h[tp]", "o h[tp]", "s b o | partial[tp]", "s b h[tp]")
