"""Run NVIDIA's unit tests on the plain megatron-core and under the overlay, and compare them.

    python tests/overlay/nvidia_unit_tests.py CHECKOUT --results DIR [PATH...]

CHECKOUT is a checkout of Megatron-LM, and the optional paths in it select tests (default: all in
tests/unit_tests). The tests run in one process on the CPU, once with the checkout's own
megatron-core and once with the overlay on top of it. No format is set and nothing is collected.
Many tests need GPUs, several ranks or packages that are not installed; these fail both times. At
least `six` and `pytest-mock` should be installed, or in a folder in PYTHONPATH.

DIR gets the outcome of each test. If the command is interrupted and started again, it continues
with the next test file. At the end, it prints the numbers and, as "lost", all tests that pass on
the plain megatron-core only. The exit status is 1 if there is such a test.
"""

import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("unit_test_worker.py")
PLAIN = Path(__file__).with_name("plain_worker.py")
#: Python arguments that start the worker, by the variant of megatron-core.
LAUNCHERS = {"plain": [str(PLAIN)], "overlay": ["-m", "megatron.overlay"]}


def main(words: list[str]) -> int:
    """Run the tests, print the comparison, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("paths", nargs="*", default=["tests/unit_tests"])
    parser.add_argument("--results", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--core",
        choices=[*LAUNCHERS, "both", "none"],
        default="both",
        help="megatron-core to run; none: only compare the outcomes in DIR",
    )
    options = parser.parse_intermixed_args(words)
    options.results.mkdir(parents=True, exist_ok=True)
    for core in LAUNCHERS:
        if options.core in (core, "both"):
            run_tests(core, options.checkout.resolve(), options.results.resolve(), options.paths)
    return compare(options.results)


def run_tests(core: str, checkout: Path, results: Path, paths: list[str]) -> None:
    """Run tests that have no outcome yet; the output of pytest goes to a log file."""
    places = [str(checkout)] if core == "plain" else [str(REPO), str(checkout)]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([*places, *os.environ.get("PYTHONPATH", "").split(":")]),
        "PYTHONDONTWRITEBYTECODE": "1",  # so that nothing is written into the checkout
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": tempfile.mkdtemp(dir=results),
    }
    command = [
        sys.executable,
        *LAUNCHERS[core],
        str(WORKER),
        str(results / f"{core}.jsonl"),
        *paths,
    ]
    with (results / f"{core}.log").open("a") as log:
        subprocess.run(command, cwd=checkout, env=env, stdout=log, stderr=log, check=False)
    shutil.rmtree(env["TMPDIR"])


def compare(results: Path) -> int:
    """Print how the outcomes of both runs differ.

    Return 1 if the overlay breaks a test, or if a run has no outcome.
    """
    outcomes = {core: read_outcomes(results / f"{core}.jsonl") for core in LAUNCHERS}
    for core, tests in outcomes.items():
        counts = collections.Counter(outcome for outcome, _ in tests.values())
        print(f"{core}: {', '.join(f'{n} {outcome}' for outcome, n in counts.most_common())}")
    if not all(outcomes.values()):
        print(f"[ERROR] a run has no outcome; see the end of its log in {results}", file=sys.stderr)
        return 1
    plain, overlay = (passed(tests) for tests in outcomes.values())
    for name in sorted(plain - overlay):
        print(f"lost: {name}: {' '.join(outcomes['overlay'].get(name, ['not run']))}")
    print(
        f"{len(overlay - plain)} tests pass under the overlay only, {len(plain - overlay)} are lost"
    )
    return 1 if plain - overlay else 0


def read_outcomes(path: Path) -> dict[str, list[str]]:
    """Return the outcome and the reason of each test."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {
        name: outcome for line in lines for name, outcome in json.loads(line)["outcomes"].items()
    }


def passed(outcomes: dict[str, list[str]]) -> set[str]:
    """Return the names of the tests that passed."""
    return {name for name, (outcome, _) in outcomes.items() if outcome == "passed"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
