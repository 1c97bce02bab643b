"""Create the tables of benchmarks/formats.py from the events that its worker reports."""

import csv
import itertools
import statistics
from pathlib import Path

import results_page
from peer_process import Event

COLUMNS = (
    "format",
    "dtype",
    "axis",
    "implementation",
    "best_ms",
    "median_ms",
    "elements",
    "differ_randn",
    "far_randn",
    "differ_wide",
    "far_wide",
    "note",
)
#: goal of the project: the fastest peer takes at least this many times as long as our kernels
PEER_GOAL = 4
HUGE = "copy to huge pages"  #: name of a copy to memory in huge pages, timed on the CPU only
DATA = {"randn": "normal data", "wide": "wide data"}


def count(elements: int) -> str:
    """Format a number of elements in short form: 16777216 becomes 16.8M."""
    return f"{elements / 1e6:.1f}M" if elements >= 1e6 else f"{elements:,}"


def typical(case: Event, name: str) -> float:
    """Return the median time, in milliseconds, that the implementation `name` takes in a case."""
    return statistics.median(case["times"][name])


def ratio(case: Event, name: str, other: str, memory: str = "times") -> float:
    """Return the time of the implementation `name` divided by that of the implementation `other`.

    The result is the median ratio over the rounds in which both took part; slow peers take part in
    the first rounds only. Other load on the machine affects both times of a round alike.
    """
    pairs = zip(case[memory][name], case[memory][other], strict=False)
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


def goals(cases: list[Event]) -> str:
    """Return a table with each format's times, relative to a copy's, and the goals that it meets.

    The first goal is the limit of each ratio to a copy. The second one is that the fastest peer
    takes at least `PEER_GOAL` times as long.
    """
    axes = [axis for axis in ("last", "first") if axis in map(_axis, cases)]
    columns = list(itertools.product(dict.fromkeys(case["dtype"] for case in cases), axes))
    formats: dict[str, list[Event]] = {}
    for case in cases:
        formats.setdefault(case["format"], []).append(case)
    rows = []
    for name, of_format in formats.items():
        ratios = {(c["dtype"], _axis(c)): ratio(c, "ours", "clone") for c in of_format}
        limit = of_format[0]["limit"]
        above = sum(value > limit for value in ratios.values())
        row = [f"`{name}`", f"{limit:g}"]
        row += [f"{ratios[column]:.2f}" if column in ratios else "" for column in columns]
        row.append(f"no, {above} of {len(ratios)} above" if above else "yes")
        rows.append(row + _beside_peers(of_format))
    header = ["format", "limit", *map(" ".join, columns), "within the limit"]
    header += ["closest peer", "its time over ours", f"at least {PEER_GOAL}", "reused memory"]
    within = sum(row[-5] == "yes" for row in rows)
    with_peers = [row for row in rows if row[-4]]
    ahead = sum(row[-2] == "yes" for row in with_peers)
    text = (
        f"{within} of {len(rows)} formats are within their limit in every case. Of the "
        f"{len(with_peers)} with a peer, {ahead} are at least {PEER_GOAL} times as fast as the "
        "fastest peer in every case."
    )
    return f"{text}\n\n{results_page.table(header, rows)}"


def _axis(case: Event) -> str:
    """Return the axis of a case; formats without blocks count as measured along the last one."""
    return "last" if case["axis"] == "-" else case["axis"]


def _beside_peers(cases: list[Event]) -> list[str]:
    """Return the cells of a table row that compare our code with the fastest peer of each case.

    The cells contain the closest peer, the range of our speed-ups, whether the goal is met, and the
    range of our speed-ups if freed memory is reused. The goal is out of reach in a case in which a
    copy to reused memory is not `PEER_GOAL` times as fast as the peer either.
    """
    fastest = [(case, peers_of(case)[0]) for case in cases if peers_of(case)]
    if not fastest:
        return ["", "", "no peer", ""]
    speeds = sorted((ratio(case, name, "ours"), name) for case, name in fastest)
    below = [(case, name) for case, name in fastest if ratio(case, name, "ours") < PEER_GOAL]
    copies = sum(_bound(case, name) < PEER_GOAL for case, name in below)
    verdict = f"no, {len(below)} of {len(speeds)} below ({copies} out of reach)" if below else "yes"
    reused = [_reused(case, name) for case, name in fastest]
    known = sorted(speed for speed in reused if speed is not None)
    return [
        *(speeds[0][1], f"{speeds[0][0]:.1f} to {speeds[-1][0]:.1f}", verdict),
        f"{known[0]:.1f} to {known[-1]:.1f}" if known else "",
    ]


def _bound(case: Event, peer: str) -> float:
    """Return the median time of a peer divided by that of the fastest copy."""
    copies = [typical(case, name) for name in ("clone", HUGE) if name in case["times"]]
    if "reused" in case:
        copies.append(statistics.median(case["reused"]["clone"]))
    return typical(case, peer) / min(copies)


def _reused(case: Event, peer: str) -> float | None:
    """Return our speed-up over a peer in reused memory, or None if it was not measured."""
    return ratio(case, peer, "ours", "reused") if peer in case.get("reused", {}) else None


def summary(cases: list[Event], elements: int, cuda: bool) -> str:
    """Return a table that compares, in each case, a plain copy, our code and the fastest peer."""
    header = ["format", "input", "axis", "clone ms", "ours ms", "ours / clone"]
    header += ["of copy bandwidth", "bits unlike the CPU's"] if cuda else ["ours / reused"]
    header += ["fastest peer", "its ms", "speed-up", *([] if cuda else ["reused"])]
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
            if not cuda:
                reused = _reused(case, names[0])
                row.append("-" if reused is None else f"{reused:.1f}")
        else:
            row += ["-"] * (3 if cuda else 4)
        rows.append(row + [agreement(case, data, elements) for data in DATA])
    return results_page.table(header, rows)


def every_peer(cases: list[Event]) -> str:
    """Return a table of all peers, followed by notes on why results differ or peers fail."""
    header = ["format", "input", "axis", "peer", "best ms", "median ms", "times ours"]
    header += [f"differ, {data}" for data in DATA.values()] + ["note"]
    rows = []
    notes: dict[str, int] = {}

    def note(text: str) -> str:
        return f"({notes.setdefault(text, len(notes) + 1)})"

    for case in cases:
        where = [f"`{case['format']}`", case["dtype"], case["axis"]]
        for name in peers_of(case):
            times = case["times"][name]
            row = [name, f"{min(times):.4g}", f"{statistics.median(times):.4g}"]
            row.append(f"{ratio(case, name, 'ours'):.2f}")
            row += [apart(*case["differ"][name][data]) for data in DATA]
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
                row = same | {"implementation": name, "note": case["why"].get(name, "")}
                row["best_ms"] = f"{min(times):.4f}"
                row["median_ms"] = f"{statistics.median(times):.4f}"
                for data, numbers in case["differ"].get(name, {}).items():
                    row[f"differ_{data}"], row[f"far_{data}"] = numbers
                writer.writerow(row)
            for name, reason in case["failed"].items():
                writer.writerow(same | {"implementation": name, "note": f"failed: {reason}"})
