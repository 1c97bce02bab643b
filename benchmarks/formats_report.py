"""Create the tables of benchmarks/formats.py from the events that its worker reports."""

import csv
import statistics
from pathlib import Path

import results_page
from peer_process import Event

COLUMNS = (
    "format",
    "dtype",
    "axis",
    "who",
    "best_ms",
    "median_ms",
    "elements",
    "differ_randn",
    "far_randn",
    "differ_wide",
    "far_wide",
    "note",
)
DATA = {"randn": "normal data", "wide": "wide data"}


def count(elements: int) -> str:
    """Format a number of elements in short form: 16777216 becomes 16.8M."""
    return f"{elements / 1e6:.1f}M" if elements >= 1e6 else f"{elements:,}"


def typical(case: Event, who: str) -> float:
    """Return the median time, in milliseconds, that the implementation `who` takes in a case."""
    return statistics.median(case["times"][who])


def ratio(case: Event, who: str, other: str, memory: str = "times") -> float:
    """Return the time of the implementation `who` divided by that of the implementation `other`.

    The result is the median of the rounds' ratios. Other load on the machine affects both times of
    a round alike.
    """
    pairs = zip(case[memory][who], case[memory][other], strict=True)
    return statistics.median(time / base for time, base in pairs)


def peers_of(case: Event) -> list[str]:
    """Return the names of the peer packages that were measured in this case, fastest first."""
    return sorted(case["differ"], key=lambda name: typical(case, name))


def agreement(case: Event, data: str, elements: int) -> str:
    """Describe how many elements differ between our result and that of each peer package.

    Peers with equal counts are grouped.
    """
    counts = {name: case["differ"][name][data] for name in peers_of(case)}
    if not counts:
        return "-"
    if not any(differ for differ, _ in counts.values()):
        peers = "1 peer" if len(counts) == 1 else f"{len(counts)} peers"
        return f"= 0 of {count(elements)}, {peers}"
    alike: dict[str, list[str]] = {}
    for name, numbers in counts.items():
        alike.setdefault(apart(*numbers), []).append(name)
    return "; ".join(f"{', '.join(names)}: {numbers}" for numbers, names in alike.items())


def apart(differ: int, far: int) -> str:
    """Format two counts: elements that differ, and elements that differ by more than 4 ulp.

    The second number is left out if it equals the first.
    """
    if differ == 0 or differ == far:
        return f"{differ:,}"
    return f"{differ:,} ({far:,} by > 4 ulp)"


def summary(cases: list[Event], elements: int, cuda: bool) -> str:
    """Return a table that compares, in each case, a plain copy, our code and the fastest peer."""
    header = ["format", "input", "axis", "clone ms", "ours ms", "ours / clone"]
    header += ["of copy bandwidth", "bits unlike the CPU's"] if cuda else ["ours / reused"]
    header += ["fastest peer", "its ms", "speed-up"]
    header += [f"differ, {data}" for data in DATA.values()]
    rows = []
    for case in cases:
        clone, ours = typical(case, "clone"), typical(case, "ours")
        row = [f"`{case['format']}`", case["dtype"], case["axis"], f"{clone:.4g}", f"{ours:.4g}"]
        row.append(f"{ratio(case, 'ours', 'clone'):.2f}")
        if cuda:
            row += [f"{ratio(case, 'clone', 'ours'):.0%}", f"{case['unlike_cpu']:,}"]
        else:
            row.append(f"{ratio(case, 'ours', 'clone', 'reused'):.2f}")
        names = peers_of(case)
        if names:
            row += [names[0], f"{typical(case, names[0]):.4g}"]
            row.append(f"{ratio(case, names[0], 'ours'):.1f}")
        else:
            row += ["-"] * 3
        rows.append(row + [agreement(case, data, elements) for data in DATA])
    return results_page.table(header, rows)


def every_peer(cases: list[Event]) -> str:
    """Return a table of all measurements, followed by notes on why results differ or peers fail."""
    header = ["format", "input", "axis", "who", "best ms", "median ms", "times ours"]
    header += [f"differ, {data}" for data in DATA.values()] + ["note"]
    rows = []
    notes: dict[str, int] = {}

    def note(text: str) -> str:
        return f"({notes.setdefault(text, len(notes) + 1)})"

    for case in cases:
        where = [f"`{case['format']}`", case["dtype"], case["axis"]]
        for name in ["clone", "ours", *peers_of(case)]:
            times = case["times"][name]
            row = [name, f"{min(times):.4g}", f"{statistics.median(times):.4g}"]
            row.append(f"{ratio(case, name, 'ours'):.2f}")
            differ = case["differ"].get(name)
            row += [apart(*differ[data]) if differ else "" for data in DATA]
            why = case["why"].get(name)
            rows.append([*where, *row, note(why) if why else ""])
        for name, reason in case["failed"].items():
            rows.append([*where, name, *[""] * 5, "failed " + note(f"{name}: {reason}")])
    explained = [f"({number}) {text}." for text, number in notes.items()]
    return "\n\n".join([results_page.table(header, rows), *explained])


def packages(peers: list[Event]) -> str:
    """Return a table of the peer packages with their releases and whether they can be imported."""
    rows = []
    for peer in peers:
        missing = peer["missing"]
        state = f"not installed: {missing}" if missing else "measured"
        rows.append([peer["name"], peer["release"] or "-", state.replace("|", "\\|")])
    return results_page.table(["peer", "release", "state"], rows)


def write_csv(path: Path, cases: list[Event], elements: int) -> None:
    """Write the measurements behind the tables to a CSV file, one line per measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for case in cases:
            same = {key: case[key] for key in ("format", "dtype", "axis")} | {"elements": elements}
            reused = {f"{name}, reused memory": t for name, t in case.get("reused", {}).items()}
            for name, times in (case["times"] | reused).items():
                row = same | {"who": name, "note": case["why"].get(name, "")}
                row["best_ms"] = f"{min(times):.4f}"
                row["median_ms"] = f"{statistics.median(times):.4f}"
                for data, numbers in case["differ"].get(name, {}).items():
                    row[f"differ_{data}"], row[f"far_{data}"] = numbers
                writer.writerow(row)
            for name, reason in case["failed"].items():
                writer.writerow(same | {"who": name, "note": f"failed: {reason}"})
