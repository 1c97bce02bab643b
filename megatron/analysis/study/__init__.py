"""Study the error that number formats cause in the results of a dump's matmuls.

    from megatron.analysis.study import candidates_of, study
    table = study(TensorStore("dump"), candidates_of(["mxfp8", "mxfp4"], [])).rows

The statistics of `megatron.analysis.stats` compare tensors with their quantized values. This
package goes one step further: it multiplies the quantized operands, forward and backward, and
compares the products with those of the saved operands.

    candidates     what is studied: number formats and recipes
    passes         find the operands of each matmul in a dump
    operands       load them, and recompute the operands of attention that are not saved
    gemm_results   quantize and multiply them, as a run does
    gemm_errors    compare the products with those of the saved operands
    engine         run the study on threads, and keep the results of an interrupted one
    accumulator_errors  measure the errors of the sums of simulated matrix units
    proposal       choose a format per layer under a bit budget, and write it as a recipe
    gradients      find the gradients that are small beside their quantization noise
    verdict        summarize the numbers in a few sentences
    pictures, page draw the results, and put them on an HTML page
    first_look     study a part of a dump for `quick_analysis.png`
    outputs        write all files
"""

from megatron.analysis.study.candidates import Candidate, candidates_of
from megatron.analysis.study.engine import Study, study

__all__ = ["Candidate", "Study", "candidates_of", "study"]
