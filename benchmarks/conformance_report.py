"""Write the page of benchmarks/conformance.py: which packages differ from the kit, and why."""

import math

import results_page
from peer_process import Event

INTRODUCTION = (
    "A vector is one input of the [conformance kit](../formats.md#conformance-kit): a tensor that "
    "pins one rule. *Agree*: all values are equal; zeros of either sign are equal, and so are all "
    "NaNs. *Last bits*: values differ by at most 4 units in the last place, as if products were "
    "rounded in another order. *Differ*: other values. *Refused*: the package raises an error, for "
    "instance because the block size does not divide the length."
)
LONGEST = 3  #: maximum number of values of an input that the table shows


def number(x: float) -> str:
    """Return a number as a short decimal that identifies a float32, or as a power of two."""
    if math.isnan(x):
        return "NaN"
    if math.isinf(x):
        return "Inf" if x > 0 else "-Inf"
    mantissa, exponent = math.frexp(x)
    if abs(mantissa) == 0.5 and not -5 < exponent < 12:
        return f"{'-' if x < 0 else ''}2^{exponent - 1}"
    return f"{x:.9g}"


def shown_input(case: Event) -> str:
    """Return the smallest input of a difference in words."""
    others = list(case["values"])
    if len(others) > LONGEST:
        return f"{number(case['x'])} in `{case['vector']}`"
    if case["x"] in others:
        others.remove(case["x"])
    beside = f" beside {' and '.join(map(number, others))}" if others else " alone"
    return f"{number(case['x'])}{beside}"


def packages(events: list[Event]) -> str:
    """Return a table of the packages with their releases."""
    rows = [
        [event["name"], event["release"] or "-", event["missing"] or "compared"]
        for event in events
        if event["kind"] == "peer"
    ]
    return results_page.table(["package", "release", "state"], rows)


def counts(results: list[Event]) -> str:
    """Return a table with one row per package and format."""
    rows = []
    for event in results:
        cases = [c for c in event["cases"] if c["vector"] not in SPECIAL] or event["cases"]
        smallest = ["", "", ""]
        if cases:
            case = cases[0]
            smallest = [shown_input(case), number(case["theirs"]), number(case["ours"])]
        parts = [str(len(event[key])) for key in ("agree", "bits", "differ", "refused")]
        rows.append([event["peer"], f"`{event['format']}`", *parts, *smallest])
    header = ["package", "format", "agree", "last bits", "differ", "refused"]
    return results_page.table([*header, "smallest input that differs", "package", "kit"], rows)


def differences(results: list[Event]) -> str:
    """Return a table of the vectors that differ, with the reasons."""
    rows = []
    for event in results:
        reasons: dict[str, list[str]] = {}
        for vector in event["differ"]:
            reasons.setdefault(why(event["peer"], event["format"], vector), []).append(vector)
        for text, vectors in reasons.items():
            names = ", ".join(vectors)
            rows.append([event["peer"], f"`{event['format']}`", names, text])
    return results_page.table(["package", "format", "vectors that differ", "reason"], rows)


SPECIAL = ("nan", "infinity")  #: vectors that the definitions of most formats leave open
SMALL = ("subnormal_block", "scale_ends", "scale_underflow", "tensor_small", "zero_block")
TINY = ("tensor_smallest", "tensor_subnormal")
LARGE = ("saturation", "scale_ends", "tensor_largest")
ODD = ("scale_edges", "scale_underflow", "error_ties")
#: Reasons for differences, by package, beginning of the format's name, and vectors; the first entry
#: that fits is used. An empty string or no vectors fit everything.
WHY: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    (
        "en_dtypes",
        "hifp8",
        (),
        "values from 40960 on, and Inf, become Inf, which is one of the two options of the paper; "
        "`hifp8:inf` is the same",
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
    (
        "torchao",
        "mx",
        SMALL,
        "values are not divided by scales below 2^-126: floor, ceil and even divide by 2^-126, and "
        "rceil multiplies by 1 where the scale is 2^-127",
    ),
    (
        "torchao",
        "nvfp4",
        (),
        "block scales below 2^-6, the smallest normal E4M3, are raised to it; zero tensors and "
        "outer scales that underflow give 0 / 0 = NaN; scales halfway between two numbers follow "
        "another order of operations",
    ),
    (
        "torchao",
        "fp8",
        (),
        "maxima below 1e-12 are raised to it, so that small tensors or rows lose bits or become 0",
    ),
    (
        "modelopt",
        "nvfp4",
        (),
        "block scales below 2^-9 are raised to it; zero tensors and outer scales that underflow "
        "give NaN; scales halfway between two numbers follow another order of operations",
    ),
    (
        "modelopt",
        "mx:e2m1",
        (),
        "E2M1 ties at 0.75, 1.75 and 3.5 are rounded toward zero, not to even; the exponent is "
        "ceil(log2(amax / 6)) in float32, which is too small just above some powers of two",
    ),
    (
        "quark",
        "mx:e2m1:b32:even",
        (),
        "rounding the largest maxima up gives 2^128, which is beyond float32",
    ),
    (
        "quark",
        "mx",
        (),
        "log2 of a block's maximum is taken in the input's dtype: next to a power of two it rounds "
        "to a whole number, and the scale is a power of two off; scales are not limited to 2^-127, "
        "and one that underflows to 0 becomes the epsilon of float32",
    ),
    (
        "gfloat",
        "mxint8",
        (),
        "gfloat uses the code of -2, which OCP allows to leave unused",
    ),
    (
        "fouroversix",
        "nv",
        TINY,
        "the outer scale overflows: the quotient of target and maximum becomes Inf, so that values "
        "become 0 or NaN; here the quotient is clamped to the largest float32",
    ),
    (
        "fouroversix",
        "if4",
        TINY,
        "the outer scale overflows: the quotient of target and maximum becomes Inf, so that values "
        "become 0 or NaN; here the quotient is clamped to the largest float32",
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
        "mx",
        SMALL,
        "a scale of 2^-127 (byte 0) is taken for 0, so that its block becomes zeros",
    ),
)


def why(peer: str, fmt: str, vector: str) -> str:
    """Return why a package differs from the kit, or that the reason has not been examined."""
    for package, start, vectors, text in WHY:
        if package in ("", peer) and fmt.startswith(start) and (not vectors or vector in vectors):
            return text
    return "not examined"


def page(events: list[Event], made_by: str) -> str:
    """Return the whole page in Markdown."""
    results = [event for event in events if event["kind"] == "result"]
    parts = [
        "# Conformance of other packages",
        f"{made_by}",
        INTRODUCTION,
        packages(events),
        counts(results),
        "## Where they differ, and why",
        differences(results),
    ]
    return "\n\n".join(parts) + "\n"
