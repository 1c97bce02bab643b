"""Compare the speed of `python -m megatron.analysis study` with that of plain torch and torchao.

    python benchmarks/study_speed.py                        # three sizes of two layers (minutes)
    python benchmarks/study_speed.py --hidden-sizes 512 --formats mxfp8 nvfp4 --rounds 9
    python benchmarks/study_speed.py --quick                # tiny layers; write no file

For each size, the benchmark writes a dump with the operands of two transformer layers, each with
four linear layers and attention, in bfloat16. Two sides study it, alternating in one process:

    ours    `megatron.analysis.study.study`, which the command `study` calls
    plain   the same study written with torchao's quantizers and torch.matmul (study_plain.py)

Both load the tensors, recompute P and dS of attention, multiply the operands in float32 for the
reference, quantize them in each format along the reduction axis of each GEMM, and compute fprop,
dgrad and wgrad from the quantized operands. They return the relative error, gain, cosine and mean
error of each result. Two studies are measured at each size: with error budgets, as the command
computes them by default, and without them (`--no-budget`). For the budgets, both sides multiply
each GEMM twice more, with only one operand quantized.

The plain study quantizes each operand once per format and axis. It uses all threads for one pass
after the other (intra), or one thread for each of several passes (inter); the faster of the two is
compared. Both sides run each study once before the measured rounds. Neither side starts a process,
imports modules, compiles kernels or writes files in the measured time.

A quantized operand counts once per format and GEMM: six per matmul. The errors of both sides must
agree within 1%; torchao rounds some values once more, and torch adds in a different order.

The other packages have their own environment, .venv-peers; `python benchmarks/formats.py --help`
describes it. Writes a Markdown file. benchmarks/study.py is a link to this file.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import formats
import peer_process
import peers_env
import results_page

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from megatron.console import ArgumentParser  # noqa: E402

WORKER = Path(__file__).with_name("study_worker.py")
#: Formats that the command `study` compares by default, except hifp8, which torchao does not have.
FORMATS = ("mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4")
TOLERANCE = 0.01  #: largest accepted relative difference between the errors of both sides
GOAL = 5  #: factor by which our study should be faster
READING = (
    "Operands/s: quantized operands per second, six per matmul and format, in the median round. "
    "Times as fast: the operands per second of our study divided by those of the faster plain "
    "study, as the median of the rounds' ratios, with their range. At most: the time of the faster "
    "plain study divided by that of the matmuls alone, which every study has to compute. The goal "
    "is out of reach if this bound is below the goal. Error budgets need two of every three "
    "products."
)
#: Names of the two studies on the page; the key is True for the study with error budgets.
STUDIES = {True: "with error budgets", False: "without error budgets"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        advice="see --help",
    )
    add = parser.add_argument
    add("--hidden-sizes", nargs="+", type=formats.positive, metavar="N", help="multiples of 64")
    add("--tokens", type=formats.positive, metavar="N", help="default: 512")
    add("--formats", nargs="+", metavar="FORMAT", help=f"default: {' '.join(FORMATS)}")
    add("--rounds", type=formats.positive, metavar="N", help="default: 5")
    add("--threads", type=formats.positive, metavar="N", default=formats.cores())
    add("--scratch", type=Path, metavar="FOLDER", help="folder for temporary files")
    add("--quick", action="store_true", help="64 tokens, 1 round, no default file")
    add("--output", type=Path, metavar="FILE.md", help="default: docs/results/study_speed.md")
    add("--peers-python", type=Path, metavar="PATH", help="default: .venv-peers/bin/python")
    options = parser.parse_args(arguments)
    options.hidden_sizes = options.hidden_sizes or ([64] if options.quick else [256, 512, 1024])
    options.tokens = options.tokens or (64 if options.quick else 512)
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.formats = options.formats or list(FORMATS)
    if any(size % 64 for size in options.hidden_sizes):
        parser.error("--hidden-sizes: give multiples of 64, the size of a head")
    if options.tokens % 32:
        parser.error("--tokens: give a multiple of 32, the size of a block")
    if options.output is None and not options.quick:
        options.output = REPO / "docs" / "results" / "study_speed.md"
    return options


def measure(python: Path, options: argparse.Namespace) -> list[peer_process.Event]:
    """Run the worker, and return the events that it reports."""
    peers_env.say(f"measuring with {python}")
    names = ("hidden_sizes", "tokens", "formats", "rounds", "threads")
    request = {name: getattr(options, name) for name in names}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(options.threads))
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="study_") as folder:
        request["folder"] = folder
        return peer_process.run_worker([python, WORKER, json.dumps(request)], threads, show)


def show(event: peer_process.Event) -> None:
    """Show an event of the worker; end the program if the worker refused a format."""
    match event["kind"]:
        case "refused":
            raise SystemExit(f"[ERROR] --formats: {event['reason']}")
        case "peer" if event["missing"]:
            peers_env.say(f"without {event['name']}: {event['missing']}")
        case "case":
            peers_env.say(f"hidden size {event['hidden_size']}, {STUDIES[event['budget']]}: done")


def speeds(cases: list[peer_process.Event]) -> str:
    """Return the table of speeds, with one row per study and hidden size."""
    rows = []
    for case in sorted(cases, key=lambda case: not case["budget"]):
        times, count = case["times"], case["operands"]
        cells = [STUDIES[case["budget"]]]
        cells += [str(case["hidden_size"]), str(case["tokens"]), str(count)]
        rates = {name: count / statistics.median(seconds) for name, seconds in times.items()}
        cells += [f"{rates[n]:.4g}" if n in rates else "-" for n in ("ours", "intra", "inter")]
        ratios = ratios_of(case)
        cells.append(
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            if ratios
            else "-"
        )
        cells.append(f"{bound:.2f}" if (bound := bound_of(case)) else "-")
        rows.append(cells)
    head = ("study", "hidden size", "tokens", "operands", "ours, operands/s", "plain, intra")
    return results_page.table((*head, "plain, inter", "times as fast", "at most"), rows)


def ratios_of(case: peer_process.Event) -> list[float]:
    """Return our study's speed relative to the faster plain study, by round; [] without torchao."""
    if (plain := faster(case, "")) is None:
        return []
    return [b / a for a, b in zip(case["times"]["ours"], plain, strict=True)]


def bound_of(case: peer_process.Event) -> float | None:
    """Return how long the plain study takes relative to its matmuls alone; None without torchao."""
    plain, products = faster(case, ""), faster(case, "products, ")
    if plain is None or products is None:
        return None
    return statistics.median(a / b for a, b in zip(plain, products, strict=True))


def faster(case: peer_process.Event, prefix: str) -> list[float] | None:
    """Return the plain times with the faster threading (intra or inter); None without torchao."""
    times = case["times"]
    ways = [times[name] for name in (f"{prefix}intra", f"{prefix}inter") if name in times]
    return min(ways, key=statistics.median) if ways else None


def agreement(cases: list[peer_process.Event]) -> tuple[str, bool]:
    """Return a table of the largest difference per format, and whether all are small enough."""
    names = list(dict.fromkeys(name for case in cases for name in case["differences"]))
    rows, good = [], True
    for name in names:
        measured = [case["differences"][name] for case in cases if name in case["differences"]]
        largest = max(value for value, _ in measured)
        good &= largest <= TOLERANCE
        rows.append([f"`{name}`", str(sum(count for _, count in measured)), f"{largest:.2g}"])
    head = ("format", "results", "largest relative difference of the relative errors")
    return results_page.table(head, rows), good


def result_of(cases: list[peer_process.Event], *, budget: bool) -> str:
    """Return a sentence that compares the speeds of one kind of study; "" without torchao."""
    measured = [case for case in cases if case["budget"] == budget]
    ratios = [statistics.median(ratios) for case in measured if (ratios := ratios_of(case))]
    bounds = [bound for case in measured if (bound := bound_of(case))]
    if not ratios:
        return ""
    unreachable = sum(bound < GOAL for bound in bounds)
    return (
        f"{STUDIES[budget].capitalize()}, our study is {min(ratios):.2f} to {max(ratios):.2f} "
        f"times as fast as the faster plain study: the goal, {GOAL} times as fast, is met at "
        f"{sum(r >= GOAL for r in ratios)} of {len(ratios)} sizes"
        + (f" and out of reach at {unreachable}." if unreachable else ".")
    )


def page(events: list[peer_process.Event], options: argparse.Namespace) -> tuple[str, bool]:
    """Return the text of the page, and whether the errors of both sides agree."""
    cases = [event for event in events if event["kind"] == "case"]
    [plan] = (event for event in events if event["kind"] == "plan")
    releases = ", ".join(f"{name} {release or '-'}" for name, release in plan["releases"].items())
    table, good = agreement(cases)
    results = [result for budget in STUDIES if (result := result_of(cases, budget=budget))]
    result = " ".join(results) or "torchao is not installed, so only our side was measured."
    parts = [
        "# Speed of a study",
        f"`{results_page.quoted('study_speed.py')}`",
        f"{formats.processor()}, {options.threads} threads, {releases}, on {formats.tree()}; "
        f"formats {' '.join(options.formats)}; {options.rounds} rounds.",
        result,
        speeds(cases),
        READING,
        f"Both sides must find the same errors, within {TOLERANCE:.0%}:",
        table,
    ]
    return "\n\n".join(parts) + "\n", good


def main() -> int:
    options = parse()
    python = options.peers_python
    python = peers_env.made() if python is None else peers_env.given(python)
    text, good = page(measure(python, options), options)
    results_page.publish(text, options.output)
    if not good:
        peers_env.say(f"[ERROR] errors of both sides differ by more than {TOLERANCE:.0%}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
