"""Choose a format for each matmul of each layer under a bit budget, and write it as a recipe.

The choice minimizes the sum of the squared relative errors of all GEMM results. The bits per value
are a mean over the values of all operands that the GEMMs read, block scales included. The search
starts from the cheapest format of each matmul, and repeatedly makes the exchange that saves the
most error per bit; exchanges come from the lower convex hull of each matmul's errors against bits.
The result may miss the optimum by one exchange. If a single format within the budget has a smaller
error, it is chosen for all matmuls.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from megatron.analysis.text_table import shown
from megatron.fake_quant.quant_type import DEFAULT_TYPE

RECIPE_FILE = "recipe.yaml"  #: name of the file with the proposal
_LAYER = re.compile(r"\blayers\.\d+\b")


@dataclass(frozen=True, slots=True)
class Option:
    """Format that a matmul could have, with the bits and the error that it causes."""

    format: str
    bits: float  #: mean bits per value of the matmul's operands
    error: float  #: sum of the squared relative errors of its GEMMs


@dataclass(frozen=True, slots=True)
class Place:
    """Matmul of a layer, with the formats that were studied."""

    layer: int
    module: str
    operation: str
    values: float  #: number of values that its GEMMs read, forward and backward
    options: tuple[Option, ...]
    forward_only: bool = False  #: whether its gradient GEMMs were not studied


@dataclass(frozen=True)
class Proposal:
    """Choice of a format for each matmul under a bit budget."""

    budget: float
    choices: tuple[tuple[Place, Option], ...]
    uniform: Option | None  #: best single format within the budget; None if there is none
    without: tuple[Place, ...] = ()  #: matmuls without an option, which stay in high precision

    @property
    def bits(self) -> float:
        """Mean bits per value of the operands of all matmuls in `choices`."""
        return _mean_bits(self.choices)

    @property
    def error(self) -> float:
        """Sum of the squared relative errors of the GEMM results of all matmuls in `choices`."""
        return sum(option.error for _, option in self.choices)


def places_of(rows: pd.DataFrame) -> list[Place]:
    """Return the matmuls of all layers, each with the formats that it could have.

    Rows with a simulated accumulator are left out. Bits and values are those of all three GEMMs,
    because a recipe quantizes them all, even if only fprop could be studied. Errors are means over
    iterations, micro-batches and ranks, without the results that are zero in high precision. A
    format with NaN or Inf in a result of a matmul is not an option for it.
    """
    table = rows[rows["recipe"].isna() & (rows["layer_idx"] >= 0)]
    if "accumulator" in table:
        table = table[table["accumulator"].isna()]
    table = table.assign(
        squared=table["relative_error"] ** 2,
        weighted=table["matmul_bits"] * table["matmul_values"],
    )
    table.loc[table["nonfinite"] > 0, "squared"] = math.inf
    places = []
    keys = ["layer_idx", "module", "operation"]
    for (layer, module, operation), part in table.groupby(keys, sort=False):
        of_gemms = part.groupby(["format", "gemm"], sort=False)["squared"].mean()
        by_format = part.groupby("format", sort=False).agg(
            weighted=("weighted", "mean"), values=("matmul_values", "mean")
        )
        by_format["squared"] = of_gemms.groupby("format", sort=False).sum()
        options = tuple(
            Option(str(row.Index), row.weighted / row.values, row.squared)
            for row in by_format.itertuples()
            if math.isfinite(row.squared)
        )
        values = float(by_format["values"].iloc[0])
        place = (int(layer), str(module), str(operation))
        places.append(Place(*place, values, options, part["gemm"].nunique() == 1))
    return places


def propose(places: Sequence[Place], budget: float) -> Proposal:
    """Choose a format for each matmul so that the mean bits per value stay within the budget.

    Raises:
        ValueError: if there is nothing to choose, or the cheapest formats exceed the budget.
    """
    without = tuple(place for place in places if not place.options)
    places = [place for place in places if place.options]
    if not places:
        raise ValueError("--bits needs formats whose results are finite; give --formats")
    chosen = {place: _hull(place.options)[0] for place in places}
    lowest = _mean_bits(list(chosen.items()))
    if lowest > budget + 1e-9:
        raise ValueError(
            f"--bits is {budget:g}, but the cheapest of the formats take {lowest:.4g} bits per "
            "value; give more bits or a smaller format"
        )
    total = sum(place.values for place in places)
    free = (budget + 1e-9) * total - lowest * total
    exchanges = sorted(
        (exchange for place in places for exchange in _exchanges(place)),
        key=lambda exchange: -exchange[0],
    )
    closed: set[Place] = set()
    for _, place, option in exchanges:
        cost = (option.bits - chosen[place].bits) * place.values
        if place not in closed and cost <= free:
            chosen[place], free = option, free - cost
        else:
            closed.add(place)
    uniform = _uniform(places, budget)
    proposal = Proposal(budget, tuple(chosen.items()), uniform, without)
    if uniform is not None and uniform.error < proposal.error:
        same = tuple((place, _named(place, uniform.format)) for place in places)
        return Proposal(budget, same, uniform, without)
    return proposal


def rows_of(proposal: Proposal, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a study in which the matmul has the format that a proposal chose for it.

    The column `recipe` has the name of the proposal's file. Each row has the bits of the whole
    matmul and an equal share of its values, so that the mean is `proposal.bits` even if only some
    GEMMs were studied.
    """
    columns = ["layer_idx", "module", "operation", "format"]
    chosen = pd.DataFrame(
        [(place.layer, place.module, place.operation, o.format) for place, o in proposal.choices],
        columns=columns,
    )
    plain = rows[rows["recipe"].isna()]
    if "accumulator" in plain:
        plain = plain[plain["accumulator"].isna()]
    own = plain.merge(chosen, on=columns)
    gemms = own.groupby(columns)["gemm"].transform("nunique")
    values = own["matmul_values"] / gemms
    return own.assign(recipe=RECIPE_FILE, bits=own["matmul_bits"], values=values)


def _mean_bits(choices: Sequence[tuple[Place, Option]]) -> float:
    total = sum(place.values for place, _ in choices)
    return sum(option.bits * place.values for place, option in choices) / total


def _named(place: Place, name: str) -> Option:
    return next(option for option in place.options if option.format == name)


def _hull(options: Sequence[Option]) -> list[Option]:
    """Return the options on the lower convex hull of error against bits, by decreasing error."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda option: (option.bits, option.error)):
        if hull and option.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _saving(hull[-2], hull[-1]) <= _saving(hull[-2], option):
            hull.pop()
        if hull and option.bits == hull[-1].bits:
            hull.pop()
        hull.append(option)
    return hull


def _saving(first: Option, second: Option) -> float:
    """Return the decrease in error from `first` to `second`, divided by the increase in bits."""
    more = second.bits - first.bits
    return (first.error - second.error) / more if more > 0 else math.inf


def _exchanges(place: Place) -> Iterator[tuple[float, Place, Option]]:
    """Yield each exchange along the hull as the error saved per bit, the place and the option."""
    hull = _hull(place.options)
    for first, second in itertools.pairwise(hull):
        yield _saving(first, second) / place.values, place, second


def _uniform(places: Sequence[Place], budget: float) -> Option | None:
    """Return the best single format within the budget, with its bits and total error."""
    names = set.intersection(*({option.format for option in place.options} for place in places))
    uniform = []
    for name in sorted(names):
        choices = [(place, _named(place, name)) for place in places]
        bits = _mean_bits(choices)
        if bits <= budget + 1e-9:
            uniform.append(Option(name, bits, sum(option.error for _, option in choices)))
    return min(uniform, key=lambda option: option.error, default=None)


def recipe_text(proposal: Proposal, origin: str) -> str:
    """Return a proposal as a recipe in YAML.

    Args:
        origin: the studied folder, for the description.
    """
    of_module: dict[tuple[str, int], dict[str, str]] = {}
    for place, option in proposal.choices:
        pattern = _LAYER.sub("layers.*", place.module)
        of_module.setdefault((pattern, place.layer), {})[place.operation] = option.format
    layers: dict[tuple[str, tuple[tuple[str, str], ...]], list[int]] = {}
    for (pattern, layer), formats in of_module.items():
        layers.setdefault((pattern, tuple(formats.items())), []).append(layer)
    configs: dict[str, str] = {}
    matchers: list[str] = []
    for (pattern, pairs), numbers in layers.items():
        used = {op: fmt for op, fmt in pairs if fmt != DEFAULT_TYPE}
        name = re.sub(r"\W", "_", "_".join(f"{op}_{fmt}" for op, fmt in used.items()))
        if used:
            configs[name] = ", ".join(f"{op}: {json.dumps(fmt)}" for op, fmt in used.items())
        matchers.append(
            f"  {_matcher_name(pattern)}_{len(matchers)}: {{config: {name or DEFAULT_TYPE}, "
            f"type: glob, pattern: {json.dumps(pattern)}, layers: {json.dumps(ranges(numbers))}, "
            "enabled: true}"
        )
    text = (
        f"Chosen by megatron.analysis study from {shown(origin)}: {proposal.bits:.4g} bits per "
        f"value, within {proposal.budget:g}"
    )
    lines = [f"description: {json.dumps(text)}", "configs:" if configs else "configs: {}"]
    lines += [f"  {name}: {{{formats}}}" for name, formats in configs.items()]
    return "\n".join([*lines, "matchers:", *matchers]) + "\n"


def _matcher_name(pattern: str) -> str:
    return re.sub(r"\W", "_", pattern.rpartition(".")[2]).strip("_") or "module"


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges, such as `0-3,8`."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def layers_text(numbers: Iterable[int]) -> str:
    """Return layer numbers as text, such as `layers 0 to 3, 8`."""
    distinct = sorted({int(number) for number in numbers})
    text = ranges(distinct).replace("-", " to ").replace(",", ", ")
    return f"layer{'s' * (len(distinct) > 1)} {text}"
