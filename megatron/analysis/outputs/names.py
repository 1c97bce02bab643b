"""The names of all outputs and what they hold; imports nothing that takes time."""

QUICK, REPORT = "quick", "report"
SAYS = {
    QUICK: "quick_analysis.png and tensor_stats.txt, the first look",
    "distributions": "exponents, histograms, boxes, Q-Q",
    "heatmaps": "layer by tensor, layer by iteration",
    "comparisons": "runs of different types against each other",
    "quantization_analysis": "formats on the same tensors",
    "statistics": "scale of each tensor; all numbers as CSV",
    "attention_maps": "probabilities, error of each head",
    "hifp8_analysis": "HiFloat8's precision regions, codes",
    "overflow_analysis": "underflow, saturation, NaN and Inf",
    "layer_analysis": "values by layer and iteration",
    "block_analysis": "scale maps, headroom, range, codes",
    "gradients": "gradients by layer and magnitude",
    "global_statistics": "everything in numbers, JSON and text",
    REPORT: "report.html, to click through",
}
#: The tensors by which formats are judged: the operands of matmuls, or their results.
OPERANDS, RESULTS = "operands", "results"
JUDGED = (OPERANDS, RESULTS)
IMAGES = ("png", "svg", "pdf")
