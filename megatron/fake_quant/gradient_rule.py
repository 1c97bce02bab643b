"""Compare a gradient with its quantization noise: the √3 rule of "FP4 All the Way".

The paper (arXiv 2505.19115) analyzes training with noisy gradients and confirms the result in FP4
runs: once the norm of the gradient falls below about √3 times the quantization noise, quantized
training becomes less effective, and the rest of the training needs higher precision.

This definition is our reading of the paper's abstract. G is a gradient in high precision, and E is
the error that quantization causes in it:

    ratio = rms(G) / rms(E) = ||G|| / ||E||        the rule flags G if ratio < √3

That is an SQNR below 10 log10(3) = 4.77 dB. E contains the bias of the rounding, too. With
stochastic rounding it is the noise of one draw. The rule does not concern forward results. It is
applied to the gradient of one micro-batch; the sum over a batch averages independent noise out, but
the gradients of its samples also partly cancel.
"""

import math

THRESHOLD = math.sqrt(3)  #: smallest accepted ratio of a gradient to its noise
#: operands that are gradients, by operation
GRADIENTS = {"linear": "grad_output", "qk": "grad_scores", "pv": "grad_output"}


def gradient_to_noise(relative_error: float) -> float:
    """Return the ratio of a gradient to its quantization noise; infinite if the error is zero."""
    return 1 / relative_error if relative_error else math.inf


def ratio_of_sqnr(sqnr_db: float) -> float:
    """Return the ratio of a gradient to its quantization noise, from its SQNR in dB."""
    return 10 ** (sqnr_db / 20)
