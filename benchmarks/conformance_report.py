"""Write the page of benchmarks/conformance.py: which packages differ from the kit, and why."""

import math
from collections.abc import Iterable

import results_page
from peer_process import Event
from peer_reasons import SPECIAL, why

INTRODUCTION = (
    "A vector is one input of the [conformance kit](../formats.md#conformance-kit): a tensor that "
    "tests one rule. *Agree*: all values are equal; zeros of either sign are equal, and so are all "
    "NaNs. *Last bits*: values differ by at most 4 units in the last place, as if products were "
    "rounded in a different order. *Differ*: values differ by more. *Refused*: the package raises "
    "an error. The numbers in these four columns are numbers of vectors. If a package differs, the "
    "table shows a small input, and the results of the package and of the kit for the first number "
    "of this input; all numbers that are not shown are zeros. NaN and Inf are shown only if there "
    "is no other difference."
)
SOURCES = (
    "A package whose release is *source* was loaded from a given folder. In the source of "
    "Transformer Engine, only the references in plain torch were used: NVFP4 of its custom "
    "recipes, and the scales and blocks of FP8 in its tests."
)
OPEN = (
    "The definitions of most formats do not specify what happens to NaN and Inf. In this project, "
    "a NaN or Inf makes its block NaN and does not affect an outer scale. These packages differ:"
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
    """Describe in words the smallest input for which a package differs from the kit."""
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


def total(results: list[Event]) -> str:
    """Return a sentence with the column totals of the table that `counts` returns."""
    agree, bits, differ, refused = (
        sum(len(event[key]) for event in results) for key in ("agree", "bits", "differ", "refused")
    )
    special = sum(vector in SPECIAL for event in results for vector in event["differ"])
    vectors = agree + bits + differ + refused
    return (
        f"{len(results)} pairs of a package and a format were compared on {vectors:,} vectors: "
        f"{agree:,} agree, {bits:,} differ in the last bits, {differ:,} differ (of these, "
        f"{special:,} have NaN or Inf), and {refused:,} are refused."
    )


def counts(results: list[Event]) -> str:
    """Return a table of how many vectors agree, differ or are refused, by package and format."""
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
    return results_page.table(
        [*header, "small input that differs", "package gives", "kit has"], rows
    )


def grouped(rows: Iterable[tuple[str, str, str, str]]) -> list[list[str]]:
    """Join the rows that differ only in the format.

    Args:
        rows: for each vector, the package, the format, the name of the vector, and a text.

    Returns:
        rows of the package, the formats, the vectors that these formats share, and the text.
    """
    vectors: dict[tuple[str, str, str], list[str]] = {}
    for package, fmt, vector, text in rows:
        vectors.setdefault((package, text, fmt), []).append(vector)
    formats: dict[tuple[str, str, str], list[str]] = {}
    for (package, text, fmt), names in vectors.items():
        formats.setdefault((package, text, ", ".join(names)), []).append(f"`{fmt}`")
    return [
        [package, ", ".join(names), joined, text.replace("|", "\\|")]
        for (package, text, joined), names in formats.items()
    ]


def differences(results: list[Event], *, special: bool) -> str:
    """Return a table of the vectors whose results differ, with the reasons.

    Args:
        results: events of the worker.
        special: True for the vectors with NaN and Inf, which have no reasons; False for all others.
    """
    rows = [
        (e["peer"], e["format"], vector, "" if special else why(e["peer"], e["format"], [vector]))
        for e in results
        for vector in e["differ"]
        if (vector in SPECIAL) == special
    ]
    head = ["package", "formats", "vectors that differ", "reason"]
    if special:
        return results_page.table(head[:-1], [row[:-1] for row in grouped(rows)])
    return results_page.table(head, grouped(rows))


def refusals(results: list[Event]) -> str:
    """Return a table of the vectors for which packages raise errors."""
    rows = [
        (event["peer"], event["format"], vector, text)
        for event in results
        for vector, text in event["refused"].items()
    ]
    return results_page.table(["package", "formats", "vectors", "error"], grouped(rows))


def page(events: list[Event], made_by: str) -> str:
    """Return the results page in Markdown."""
    results = [event for event in events if event["kind"] == "result"]
    parts = [
        "# Conformance of other packages",
        made_by,
        INTRODUCTION,
        packages(events),
        *([SOURCES] if any(event.get("release") == "source" for event in events) else []),
        total(results),
        counts(results),
        "## NaN and Inf",
        OPEN,
        differences(results, special=True),
        "## Other differences",
        differences(results, special=False),
        "## Refused vectors",
        refusals(results),
    ]
    return "\n\n".join(parts) + "\n"
