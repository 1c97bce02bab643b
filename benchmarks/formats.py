"""Time every number format, and compare times and values with other public packages.

    python benchmarks/formats.py                     # all formats, 4096 x 4096: many minutes
    python benchmarks/formats.py --quick             # a small matrix; write no file
    python benchmarks/formats.py --formats mxfp8 mxfp4 --dtypes bf16 --axes last
    python benchmarks/formats.py --device cuda --output /tmp/formats.md

For each format, input dtype and block axis, the benchmark times a copy of the matrix (`clone`), our
`fake_quantize`, and each other package (peer) that has the format. A peer quantizes the matrix and
dequantizes it to the input's dtype. All calls run in one process with the same number of threads,
except peers based on numpy (ml_dtypes, en_dtypes), which use one thread. In each round, every call
has one turn; a peer that is very slow takes part in the first rounds only.

On the CPU, the C library obtains memory for each result from the system, as it does by default for
32 MiB and more. Page faults then take most of a copy's time. Our function asks Linux for huge
pages, which have fewer page faults, and keeps up to 128 MiB of freed results for its next ones. A
copy to new huge pages is timed, too. In a second pass, the C library keeps all freed memory, so
that copies, our function and the fastest peer of each case reuse memory alike. Before each call,
memory is obtained, written and freed, so that no call waits until the host of a virtual machine
returns memory that was idle.

Peers work along the last axis. For the first axis, they get the transposed matrix, and both
transpositions are part of their time. The values of each peer are compared with ours element by
element, on normally distributed data and on wide data (rows multiplied by 2^-16 to 2^16); zeros of
either sign are equal.

The peers have their own environment, .venv-peers in the repository root. The first run creates it
with pip from the releases in benchmarks/peers_requirements.txt and script/constraints.txt; pip's
own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) apply. A peer that cannot be installed or imported
is left out, and the table gives the reason. With `--peers-python PATH`, that Python is used and
nothing is installed.

Writes a Markdown file and a CSV file next to it.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

import formats_report
import peer_process
import peers_env
import results_page

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from megatron.console import ArgumentParser  # noqa: E402

WORKER = Path(__file__).with_name("formats_worker.py")
FORMATS = (
    "bf16",
    "fp16",
    "mxfp8",
    "mxfp8_e5m2",
    "mxfp6_e3m2",
    "mxfp6_e2m3",
    "mxfp4",
    "mxint8",
    "mx:e4m3:b32:rceil",
    "mx:e2m1:b32:rceil",
    "nvfp4",
    "hifp8",
    "hifp4",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_rowwise",
    "fp8_block",
    "fp8_block:2d",
    "nvfp4:2d",
    "nvfp4:outer-row",
    "nvfp4:head16/17",
    "nvfp4:4over6-mae",
    "nvfp4:4over6-mse",
    "nvint4",
    "if4",
    "if4_mae",
    "mixfp4",
    "amdfp4",
    "mxint6",
    "mxint4",
    "mxfp4:top7.25",
    "mxfp4_macro",
    "mxfp4_macro_oas",
    "mx9",
    "mx6",
    "nf4",
)
SEED = 1234
#: Environment variables of glibc's malloc, with values in bytes. Allocations of at least
#: MMAP_THRESHOLD come directly from the operating system. Free memory above TRIM_THRESHOLD is
#: returned to the operating system.
MEMORY = {
    "new": {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
    "reused": {"MALLOC_MMAP_THRESHOLD_": str(1 << 40), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)},
}
GOALS = (
    "The project limits the time of our function divided by that of a copy: the limit is 4 if two "
    "candidates are computed for each block (4/6, IF4, MixFP4), 2.5 for HiFloat4, and 2 for all "
    "other formats. The columns with a dtype and an axis contain this ratio. The second goal is "
    "that the fastest peer takes at least 4 times as long as our function; the smallest and the "
    "largest of these ratios are shown, with the name of the peer that comes closest. Peers get "
    "new memory from the operating system for their results, and our function reuses up to "
    "128 MiB of freed results. The last column contains the ratios if both sides reuse all freed "
    "memory. The second goal is out of reach if even a copy to reused memory is not 4 times as "
    "fast as the peer."
)
READING = (
    "Ours / reused: our time divided by that of clone if both reuse freed memory. Speed-up: the "
    "fastest peer's time divided by ours; reused: the same if both reuse freed memory. Differ: "
    "number of elements of the peer's result that differ from ours; in brackets, if smaller, the "
    "number of elements that differ by more than 4 units in the last place of the input's dtype. "
    "The reasons are given below. If a format has no peer, no package that pip can install "
    "implements it."
)


def positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        advice="see --help",
    )
    add = parser.add_argument
    add("--shape", nargs=2, type=positive, metavar=("ROWS", "COLUMNS"), help="default: 4096 4096")
    add("--formats", nargs="+", metavar="FORMAT", help=f"default: {' '.join(FORMATS)}")
    add("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    add("--axes", nargs="+", choices=("last", "first"), default=["last", "first"])
    add("--repeats", type=positive, metavar="N", help="rounds; default: 10")
    add("--threads", type=positive, metavar="N", help="default: all cores", default=cores())
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--quick", action="store_true", help="shape 128 256, 2 rounds, no default file")
    add("--output", type=Path, metavar="FILE.md", help="default: docs/results/formats.md")
    add("--csv", type=Path, metavar="FILE.csv", help="default: next to --output")
    add("--peers-python", type=Path, metavar="PATH", help="default: .venv-peers/bin/python")
    options = parser.parse_args(arguments)
    options.shape = options.shape or ([128, 256] if options.quick else [4096, 4096])
    options.repeats = options.repeats or (2 if options.quick else 10)
    if options.output is None and not options.quick:
        options.output = REPO / "docs" / "results" / "formats.md"
    if options.csv is None and options.output is not None:
        options.csv = options.output.with_suffix(".csv")
    return options


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(python: Path, options: argparse.Namespace) -> list[peer_process.Event]:
    """Measure all cases in a worker process, and return the events that the worker reports.

    On the CPU, a second run with reused memory adds its times to each case. Of the peers, only the
    fastest one of each case takes part in it.
    """
    peers_env.say(f"measuring with {python}")
    events = run_worker(python, options, MEMORY["new"])
    if options.device == "cpu":
        cases = [event for event in events if event["kind"] == "case"]
        fastest = [formats_report.peers_of(case)[:1] for case in cases]
        peers_env.say("measuring again with reused memory")
        again = run_worker(python, options, MEMORY["reused"], peers=fastest)
        repeated = [event for event in again if event["kind"] == "case"]
        for case, reused in zip(cases, repeated, strict=True):
            case["reused"] = reused["times"]
    return events


def run_worker(
    python: Path,
    options: argparse.Namespace,
    memory: dict[str, str],
    *,
    peers: list[list[str]] | None = None,
) -> list[peer_process.Event]:
    """Run a worker process, show its progress, and return all events that it reports.

    Args:
        memory: environment variables for the C library's memory.
        peers: names of the peers in each case; None for all peers.
    """
    names = ("shape", "dtypes", "axes", "repeats", "threads", "device")
    request: dict[str, Any] = {name: getattr(options, name) for name in names} | {
        "seed": SEED,
        "peers": peers,
    }
    request |= {"formats": options.formats or FORMATS, "required": options.formats is not None}
    threads = str(options.threads)
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    environment = dict.fromkeys(pools, threads) | memory
    command = [python, WORKER, json.dumps(request)]
    with tqdm(unit="case", disable=None, dynamic_ncols=True) as bar:
        return peer_process.run_worker(command, environment, lambda event: show(event, bar))


def show(event: peer_process.Event, bar: tqdm) -> None:
    """Show an event of the worker to the user; end the program if the worker refused a request."""
    match event["kind"]:
        case "refused" if event["format"] is None:
            raise SystemExit(f"[ERROR] {event['reason']}; choose --device cpu or another Python")
        case "refused":
            raise SystemExit(f"[ERROR] --formats: {event['reason']}")
        case "skipped":
            bar.write(f"skipped {event['format']}: not a format of this library", sys.stderr)
        case "peer" if event["missing"]:
            bar.write(f"without {event['name']}: {event['missing']}", sys.stderr)
        case "plan":
            bar.reset(event["cases"])
        case "case":
            bar.set_postfix_str(f"{event['format']} {event['dtype']} {event['axis']}", False)
            bar.update()


def processor() -> str:
    """Return the name of the processor."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""
    named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return named.group(1) if named else platform.processor() or platform.machine()


def machine(options: argparse.Namespace, plan: peer_process.Event) -> str:
    """Describe the machine, the software releases and the settings that affect the results."""
    cpu = processor()
    device = f"{plan['device_name']}, with a {cpu}" if plan["device_name"] else cpu
    releases = ", ".join(f"{name} {release or '-'}" for name, release in plan["releases"].items())
    rows, columns = options.shape
    command = results_page.quoted("formats.py")
    return (
        f"{device}; {options.threads} threads; {releases}. "
        f"Matrix {rows} x {columns}, median of {options.repeats} rounds, in milliseconds; a ratio "
        "is the median of the rounds' ratios. "
        f"Made by `{command}` on {tree()}."
    )


def tree() -> str:
    """Return "commit HASH" for the repository, or "a tree without history" if it has none."""
    command = ["git", "-C", REPO, "describe", "--always", "--dirty"]
    try:
        description = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "a tree without history"
    return f"commit {description.stdout.strip()}"


def main() -> int:
    options = parse()
    python = options.peers_python
    python = peers_env.made() if python is None else peers_env.given(python)
    events = measure(python, options)
    of_kind = {kind: [e for e in events if e["kind"] == kind] for kind in ("peer", "plan", "case")}
    cases, cuda = of_kind["case"], options.device == "cuda"
    elements = options.shape[0] * options.shape[1]
    parts = ["# Formats compared with their peers", machine(options, of_kind["plan"][0])]
    parts += ["## Goals", GOALS, formats_report.goals(cases), "## Every case"]
    parts += [formats_report.summary(cases, elements, cuda), READING, "## Every peer"]
    parts += [formats_report.packages(of_kind["peer"]), formats_report.every_peer(cases)]
    text = "\n\n".join(parts) + "\n"
    results_page.publish(text, options.output)
    if options.csv is not None:
        formats_report.write_csv(options.csv, cases, elements)
    unlike = [case for case in cases if case["unlike_cpu"]]
    for case in unlike:
        where = f"{case['format']} {case['dtype']} {case['axis']}"
        peers_env.say(f"[ERROR] {where}: {case['unlike_cpu']} elements differ from the CPU's")
    return 1 if unlike else 0


if __name__ == "__main__":
    sys.exit(main())
