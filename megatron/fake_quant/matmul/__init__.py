"""Quantize the operands of a matmul and of its gradients, and multiply them.

A matmul and its two gradients are three GEMMs with two operands each. `gemm_formats` names these
six operands, and `operand` describes how one of them is quantized. `gemm` quantizes and multiplies
them in an autograd function, for which `products` computes each product.

    hadamard         rotates both operands of a GEMM
    mean_split       multiplies the mean of the rows of an operand separately
    unrounded        keeps quantized values that the dtype of the tensors would round
    delayed_scaling  computes the scales from the maxima of earlier iterations
    autocast         switches off autocast, which would round the operands
"""
