"""The meaning of the matrix's quantizations, written by hand.

For each name: the formats of the linear layers, of Q K^T and of P V.
"""

MEANING = {
    "bf16": ("bf16", "bf16", "bf16"),
    "FA_mxfp8": ("bf16", "mxfp8", "bf16"),
    "linear_mxfp8": ("mxfp8", "bf16", "bf16"),
    "FA_linear_mxfp8": ("mxfp8", "mxfp8", "bf16"),
    "FA_mxfp4": ("bf16", "mxfp4", "bf16"),
    "linear_mxfp4": ("mxfp4", "bf16", "bf16"),
    "FA_linear_mxfp4": ("mxfp4", "mxfp4", "bf16"),
    "FA_hifp8": ("bf16", "hifp8", "bf16"),
    "linear_hifp8": ("hifp8", "bf16", "bf16"),
    "FA_linear_hifp8": ("hifp8", "hifp8", "bf16"),
}
