"""Format a collection plan as text.

The report lists the tensors and bytes by layer, tensor, iteration and rank, and states whether the
disk space, the memory and the limits suffice.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from itertools import pairwise

from megatron.collection.limits import OVERHEAD, gib
from megatron.collection.plan import CollectionPlan, Segment, Share


def report(plan: CollectionPlan) -> list[str]:
    """Return the lines of the plan's report, which rank 0 prints."""
    lines = []
    of_layer, of_tensor, of_rank = (defaultdict(Counter) for _ in range(3))
    for share, segment in _all(plan):
        times = segment.stop - segment.start
        for key, tensors in segment.tensors.items():
            layer, layer_type, name = key
            amount = Counter(tensors=tensors * times, bytes=segment.bytes[key] * times)
            of_layer[layer] += amount
            of_tensor[f"{layer_type} {name}"] += amount
            of_rank[share.rank] += amount
    lines += _table("layer", sorted(of_layer.items()))
    lines += _table("tensor", sorted(of_tensor.items()))
    lines += _table("iteration", _by_iteration(plan))
    lines += _table("rank", sorted(of_rank.items()))
    total = sum(of_rank.values(), Counter())
    lines += _table("total", [("", total)])[1:]
    return [*lines, *_when(plan), *_disks(plan, of_rank), *_memory(plan), *_limits(plan)]


def _all(plan: CollectionPlan) -> Iterable[tuple[Share, Segment]]:
    return ((share, segment) for share in plan.shares for segment in share.segments)


def _table(title: str, rows: Iterable[tuple[Hashable, Counter[str]]]) -> list[str]:
    lines = [f"  {title:<28} {'tensors':>12} {'bytes':>18}"]
    for name, amount in rows:
        label = {-1: "outside of the layers", "": title}.get(name, name)
        tensors, size = amount["tensors"], amount["bytes"]
        lines.append(f"    {label!s:<26} {tensors:>12} {size:>18}  {gib(size)}")
    return lines


def _by_iteration(plan: CollectionPlan) -> list[tuple[str, Counter[str]]]:
    """Return one row per group of iterations of equal size: the tensors and bytes of all ranks.

    The iterations of a group are consecutive.
    """
    cuts = sorted({end for _, segment in _all(plan) for end in (segment.start, segment.stop)})
    rows: list[tuple[int, int, Counter[str]]] = []
    for start, stop in pairwise(cuts):
        amount: Counter[str] = Counter()
        for _, segment in _all(plan):
            if segment.start <= start < segment.stop:
                amount["tensors"] += segment.tensors.total()
                amount["bytes"] += segment.bytes.total()
        if rows and rows[-1][2] == amount:
            start = rows.pop()[0]
        rows.append((start, stop, amount))
    return [(_named(plan.iterations[start:stop]), amount) for start, stop, amount in rows]


def _named(iterations: Iterable[int]) -> str:
    iterations = list(iterations)
    if len(iterations) == 1:
        return str(iterations[0])
    return f"{iterations[0]}-{iterations[-1]}, each of {len(iterations)}"


def _disks(plan: CollectionPlan, of_rank: dict[int, Counter[str]]) -> list[str]:
    """Return a line that names the output folder, and one line per machine about its disk space."""
    events = 1 if plan.settings.ring is None else plan.settings.ring.events
    lines = [
        f"  folder {plan.settings.directory}; the indexes take about 1 KiB more per tensor",
    ]
    for host in dict.fromkeys(share.host for share in plan.shares):
        here = [share for share in plan.shares if share.host == host]
        size = events * sum(of_rank[share.rank]["bytes"] for share in here)
        free, kept = min(share.free for share in here), here[0].kept
        verdict = "holds" if size + OVERHEAD * len(here) <= free - kept else "DOES NOT HOLD"
        needed = f"{gib(size)} needed" + (f" for {events} events" if events > 1 else "")
        lines.append(
            f"  disk of {host}: {gib(free)} free, {gib(kept)} of it kept, {needed}: {verdict}"
        )
    return lines


def _when(plan: CollectionPlan) -> list[str]:
    """Return lines about how the ring buffer and the flag file change the amount written."""
    ring, flag_file = plan.settings.ring, plan.settings.flag_file
    lines = []
    if ring is not None:
        lines.append(
            f"  ring: these numbers are for one event of {ring.iterations} iteration(s); at most "
            f"{ring.events} event(s) are written (--collect-ring-events)"
        )
    if flag_file is not None:
        lines.append(f"  flag file: these numbers are valid if {flag_file.path} always exists")
    return lines


def _memory(plan: CollectionPlan) -> list[str]:
    """Return a line about whether an iteration or the ring buffer fits into host memory."""
    limit, ring = plan.settings.limits.host_bytes, plan.settings.ring
    assert limit is not None, "the limits are shares of one rank"
    iterations = 1 if ring is None else ring.iterations
    most = max((segment.held for _, segment in _all(plan)), default=0)
    largest = max((segment.largest for _, segment in _all(plan)), default=0)
    held = f"{gib(most * iterations)} for {iterations} iteration(s)"
    line = f"  memory of a rank: {gib(limit)} (--collect-max-host-gib), {held}: "
    if most * iterations <= limit:
        return [line + "holds"]
    if largest > limit:
        return [f"{line}DOES NOT HOLD, one tensor takes {gib(largest)}"]
    if ring is None:
        return [line + "training will wait for the disk"]
    return [f"{line}DOES NOT HOLD, the ring will have {limit // most or 'the first part of one'}"]


def _limits(plan: CollectionPlan) -> list[str]:
    """Return one line for each rank that would reach a limit, or a single line if none would."""
    limits = plan.settings.limits
    if limits.max_files is None and limits.max_bytes is None:
        return ["  limits: none is set (--collect-max-gib, --collect-max-files)"]
    ends = (_stop(plan, share) for share in plan.shares)
    return [line for line in ends if line] or ["  limits: hold"]


def _stop(plan: CollectionPlan, share: Share) -> str | None:
    """Return a line with the iteration in which a rank reaches a limit; None if it reaches none."""
    tensors = size = 0
    for segment in share.segments:
        for iteration in plan.iterations[segment.start : segment.stop]:
            tensors += segment.tensors.total()
            size += segment.bytes.total()
            why = plan.settings.limits.exceeded_by_files(tensors, size + OVERHEAD)
            if why is not None:
                return (
                    f"  limits: {why}: DOES NOT HOLD, rank {share.rank} would stop in iteration "
                    f"{iteration}"
                )
    return None
