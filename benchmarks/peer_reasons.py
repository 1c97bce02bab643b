"""Explain why values of other packages (peers) differ from ours.

benchmarks/formats.py and conformance.py show these reasons next to the numbers of differences.
"""

from collections.abc import Sequence

#: Vectors of the conformance kit whose results the definitions of most formats leave open.
SPECIAL = ("nan", "infinity")
SMALL = ("subnormal_block", "scale_ends", "scale_underflow", "tensor_small", "zero_block")
TINY = ("tensor_smallest", "tensor_subnormal")
LARGE = ("saturation", "scale_ends", "tensor_largest")
ODD = ("scale_edges", "scale_underflow", "error_ties")
#: Vectors that resemble the data of benchmarks/formats.py: rows of different magnitudes.
MEASURED = ("scale_underflow", "random")

HALFWAY = "a value or a block scale halfway between two codes can be rounded to the other one"
#: Reasons for differences, by package, beginning of the format's name, and vectors; the first entry
#: that matches is used. An empty string or an empty tuple matches everything.
WHY: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    (
        "en_dtypes",
        "hifp8",
        (),
        "values from 40960 on, and Inf, become Inf, which is one of the two options of the paper; "
        "here `hifp8` saturates to 32768, and `hifp8:inf` does the same as en_dtypes",
    ),
    (
        "",
        "",
        SPECIAL,
        "left open by the definition: here a NaN or an Inf makes its block NaN and does not affect "
        "an outer scale",
    ),
    (
        "torchao",
        "mx:e2m1:b32:rceil",
        ("scale_edges",),
        "the exponent is ceil(log2(amax / 6)) in float32; just above a power of two, log2 rounds "
        "to a whole number and the scale is one power of two too small",
    ),
    *(
        (
            "torchao",
            start,
            SMALL,
            "values are not divided by scales below 2^-126: floor, ceil and even divide by 2^-126, "
            "and rceil multiplies by 1 where the scale is 2^-127",
        )
        for start in ("mx", "fp8_block:ue8m0")
    ),
    (
        "torchao",
        "nvfp4",
        (),
        "block scales below 2^-6, the smallest normal E4M3, are raised to it, so that blocks of "
        "small values lose their range; zero tensors and outer scales that underflow give "
        f"0 / 0 = NaN; scales are multiplied in another order: last bits differ, and {HALFWAY}",
    ),
    (
        "torchao",
        "fp8_block",
        (),
        "maxima below 1e-12 are raised to it, so that small blocks lose bits or become 0",
    ),
    (
        "torchao",
        "fp8",
        (),
        "codes are divided by the scale where ours are multiplied by its reciprocal: last bits "
        "differ; maxima below 1e-12 are raised to it, so that small tensors or rows lose bits or "
        "become 0",
    ),
    (
        "modelopt",
        "nvfp4",
        (),
        "block scales below 2^-9 are raised to it; zero tensors and outer scales that underflow "
        f"give NaN; scales are multiplied in another order: last bits differ, and {HALFWAY}",
    ),
    (
        "modelopt",
        "mx:e2m1",
        (),
        "E2M1 ties at 0.75, 1.75 and 3.5 are rounded toward zero, not to even; the exponent is "
        "ceil(log2(amax / 6)) in float32, which is too small just above some powers of two",
    ),
    (
        "modelopt",
        "fp8",
        (),
        "values are divided by amax / 448, and both quotients are rounded to the input's dtype: "
        f"last bits differ in float32, many values in bfloat16 and float16, and {HALFWAY}; scales "
        "of 0 give 0 / 0 = NaN, and subnormal ones lose bits",
    ),
    (
        "quark",
        "mx:e2m1:b32:even",
        (),
        "rounding the largest maxima up gives 2^128, which is beyond float32",
    ),
    *(
        (
            "quark",
            start,
            (),
            "values below the smallest normal number of the input's dtype become 0, and scales are "
            f"not limited to 2^{lowest}, the smallest one here",
        )
        for start, lowest in (("mx6", -123), ("mx9", -120))
    ),
    (
        "quark",
        "mx",
        (),
        "log2 of a block's maximum is computed in the input's dtype: near a power of two it rounds "
        "to an integer, so the scale is wrong by a factor of two, and for the largest float32 "
        "numbers the scale is Inf; scales can be smaller than 2^-127, and a scale that underflows "
        "to 0 is replaced by 2^-23, the epsilon of float32",
    ),
    (
        "quark",
        "amdfp4",
        (),
        "a block scale that rounds to 0 becomes 2^-23, the epsilon of float32; here, as in AMD's "
        "ALTO, it becomes 2^-17, the smallest UE5M3 number",
    ),
    (
        "gfloat",
        "mxint8",
        (),
        "gfloat uses the code of -2, which OCP allows to leave unused",
    ),
    (
        "bitsandbytes",
        "nf4",
        ("odd_length", "first_axis"),
        "blocks run over the flattened tensor, and so across the ends of rows",
    ),
    (
        "bitsandbytes",
        "nf4",
        (),
        "maxima below 1e-38 are raised to it before values are divided by them",
    ),
    *(
        (
            "fouroversix",
            start,
            TINY,
            "the outer scale overflows: the quotient of target and maximum becomes Inf, so that "
            "values become 0 or NaN; here the quotient is clamped to the largest float32",
        )
        for start in ("nv", "if4")
    ),
    (
        "fouroversix",
        "nvint4",
        LARGE,
        "fouroversix counts in integers and this project in quarters of them, whose multiplier is "
        "subnormal for the largest float32 numbers; here it loses bits",
    ),
    (
        "fouroversix",
        "nvfp4",
        ODD,
        "E2M1 rounding does not clip: under a scale that was rounded down, a value above 7 becomes "
        "8 and is stored as the code of -0; block scales halfway between two numbers follow the "
        "order b / 6 * encode, where Transformer Engine has b * (encode / 6)",
    ),
    (
        "fouroversix",
        "if4",
        ODD,
        "E2M1 rounding does not clip: under a scale that was rounded down, a value above 7 becomes "
        "8, whose error decides between the element types; 8 is stored as the code of -0",
    ),
    (
        "fouroversix",
        "if4",
        ("random",),
        "integers are multiplied by 6/7 in another order: last bits differ",
    ),
    (
        "fouroversix",
        "nvfp4",
        ("random",),
        "errors are added in another order, so that the other one of two candidates is chosen "
        "where they are almost equal",
    ),
    (
        "fouroversix",
        "mx",
        SMALL,
        "a scale of 2^-127 (byte 0) is taken for 0, so that its block becomes zeros",
    ),
)


def why(peer: str, fmt: str, vectors: Sequence[str] = MEASURED) -> str:
    """Return the reason why a package differs from our code, or "not examined".

    Args:
        peer: name of the package.
        fmt: name of the format.
        vectors: vectors of the conformance kit that may show the difference, likeliest first.
    """
    package = peer.removesuffix(" compiled")
    for vector in vectors:
        for name, start, where, text in WHY:
            fits = name in ("", package) and fmt.startswith(start)
            if fits and (not where or vector in where):
                return text
    return "not examined"
