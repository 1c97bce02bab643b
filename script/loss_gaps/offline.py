"""Measure the offline errors of configurations, and propose a recipe under a bit budget.

The operands of all matmuls of one iteration are collected from a bf16 run, and the command `study`
of `megatron.analysis` recomputes the matmuls under each configuration. The offline error of a
configuration is the root mean square of the relative errors of all GEMM results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from configs.lookup import last_value
from loss_gaps.configurations import BASELINE, Configuration, write_recipe
from loss_gaps.launcher import Launcher
from loss_gaps.run_heads import state_of
from megatron.analysis.dump.scan import kind_of
from megatron.analysis.store import TensorStore
from megatron.analysis.study.kept_results import source_version
from megatron.analysis.study.proposal import (
    Option,
    Place,
    Proposal,
    places_of,
    propose,
    recipe_text,
)
from megatron.analysis.study.verdict import candidate_names
from megatron.bounded_files import printable
from megatron.fake_quant.inspect.format_properties import bits_a_value
from megatron.fake_quant.names import get_format

#: Arguments that must be equal in the run that wrote a dump and in the training runs.
SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("num_experts", "moe_ffn_hidden_size"),
)
SAME_BITS = 0.01  #: largest difference in bits per value that counts as equal
#: Modules that a quantization type leaves in high precision; a recipe can quantize them.
ALWAYS_HIGH = r"output_layer|.*\.router"
HIGH_BITS = 16.0  #: bits per value of an operand in high precision
#: columns with the offline errors of all GEMMs, of the forward GEMMs and of the backward GEMMs
ERRORS = ("offline_error", "offline_error_forward", "offline_error_backward")


@dataclass(frozen=True)
class Pair:
    """Recipe under a bit budget, and the uniform format with which it is compared."""

    budget: float
    proposed: Configuration
    bits: float  #: mean bits per value of the proposed recipe
    uniform: Configuration
    uniform_bits: float
    same: bool  #: True if the recipe has the uniform format everywhere

    @property
    def equal_bits(self) -> bool:
        """True if the recipe and the uniform format have about the same mean bits per value."""
        return abs(self.bits - self.uniform_bits) <= SAME_BITS


def study_dump(
    launcher: Launcher, dump: Path, configurations: Sequence[Configuration], folder: Path
) -> pd.DataFrame:
    """Run the offline study of a dump, and return its results for `configurations` and bf16.

    Results of earlier calls are reused.

    Raises:
        RuntimeError: if the study fails; its log has the reason.
    """
    log, table = folder / "study.log", folder / "study.csv"
    contents = {
        each.name: "" if each.recipe is None else each.recipe.read_text(encoding="utf-8")
        for each in configurations
    }
    files = [path for path in dump.rglob("*") if kind_of(path.name) and path.is_file()]
    studied = {
        "dump": [str(dump.resolve()), state_of(files)],
        "code": source_version(),
        "configurations": contents,
    }
    if not (table.is_file() and _covers(log, studied)):
        formats = [each.name for each in configurations if each.recipe is None]
        recipes = [str(each.recipe) for each in configurations if each.recipe is not None]
        words = ["study", str(dump), "--formats", BASELINE, *formats, "--output-dir", str(folder)]
        words += ["--no-budget", *(["--recipes", *recipes] if recipes else [])]
        if (status := launcher.analyze(words, log, f"{json.dumps(studied)}\n")) != 0:
            raise RuntimeError(f"the offline study ended with status {status}; see {log}")
    rows = pd.read_csv(table, dtype={"accumulator": str, "recipe": str})
    return rows[candidate_names(rows).isin([BASELINE, *contents])]


def check_dump(dump: Path, arguments: Sequence[str]) -> None:
    """Raise ValueError unless a dump holds the operands of a bf16 run of the trained model.

    Args:
        dump: folder of the dump.
        arguments: arguments of `pretrain_gpt.py` for the training runs.

    Raises:
        ValueError: if a record has a quantization type, or a run card lists different model sizes.
    """
    store = TensorStore(dump)
    for kind in store.records["quant_type"].unique():
        if kind != BASELINE:
            raise ValueError(
                f"--dump {dump} has operands of a run in {printable(kind)}; collect them in bf16"
            )
    for run in store.runs():
        sizes = store.run_card(run).get("arguments")
        for name in SIZES if isinstance(sizes, dict) else ():
            own = last_value(f"--{name.replace('_', '-')}", arguments)
            if own is not None and sizes.get(name) is not None and sizes[name] != int(own):
                raise ValueError(
                    f"--dump {dump} is of another model: its run had {name} = "
                    f"{printable(sizes[name])}, and this study trains with {own}; collect the "
                    "operands from the model that is trained, or leave --dump out"
                )


def _covers(log: Path, studied: dict[str, Any]) -> bool:
    """Return whether the study with this log is complete and covers what `studied` describes."""
    if not log.is_file():
        return False
    head, _, text = log.read_text(encoding="utf-8", errors="replace").partition("\n")
    if not text.rpartition("[STUDY] ")[2].startswith("exit status 0 "):
        return False
    earlier = json.loads(head)
    return bool(
        earlier["dump"] == studied["dump"]
        and earlier.get("code") == studied["code"]
        and studied["configurations"].items() <= earlier["configurations"].items()
    )


def errors_of(table: pd.DataFrame, recipes: Collection[str] = ()) -> pd.DataFrame:
    """Return the offline errors and the bits of each configuration, by name.

    Squared relative errors are averaged over iterations, micro-batches and ranks, and then over all
    GEMM results. Results that are zero in high precision have no relative error. An error is NaN if
    a result is not finite, or if some of the GEMMs could not be studied under the configuration.

    Args:
        table: table of the offline study.
        recipes: names of configurations that are recipes. The others are quantization types, which
            leave the LM head and the routers of experts in high precision.
    """
    table = table.assign(
        configuration=candidate_names(table),
        squared=(table["relative_error"] ** 2).where(table["nonfinite"] == 0),
    )
    high = table["module"].str.fullmatch(ALWAYS_HIGH) & ~table["configuration"].isin([*recipes])
    table.loc[high, "squared"] = 0.0
    table.loc[high, "bits"] = HIGH_BITS
    table = table.assign(weighted=table["bits"] * table["values"])
    keys = ["layer_idx", "module", "operation", "gemm"]
    known = table[table["relative_error"].notna() | (table["nonfinite"] > 0)]
    grouped = known.groupby(["configuration", *keys], sort=False)
    results = grouped["squared"].agg(lambda values: values.mean(skipna=False)).reset_index()
    everything = len(results[keys].drop_duplicates())
    rows = {}
    for name, part in results.groupby("configuration", sort=False):
        forward = part["gemm"] == "fprop"
        own = table[table["configuration"] == name]
        rows[name] = {
            column: _root_mean(part.loc[chosen, "squared"]) if len(part) == everything else math.nan
            for column, chosen in zip(ERRORS, (forward | ~forward, forward, ~forward), strict=True)
        } | {"bits": own["weighted"].sum() / own["values"].sum()}
    return pd.DataFrame.from_dict(rows, orient="index")


def _root_mean(squares: pd.Series) -> float:
    return math.sqrt(squares.mean(skipna=False)) if len(squares) else math.nan


def check_names(
    configurations: Iterable[Configuration], budgets: Collection[float], *, whole: bool
) -> None:
    """Refuse bit budgets that no format meets, and recipes with the name of a proposed recipe.

    Anything that this function finds would otherwise be found after the first training runs.

    Args:
        configurations: types and recipes that the user compares.
        budgets: mean bits per value.
        whole: as in `pairs_of`.

    Raises:
        ValueError: if the check fails.
    """
    if not budgets:
        return
    formats = [each for each in configurations if each.recipe is None]
    if not formats:
        raise ValueError(
            "--bits chooses among formats, and --formats has only bf16 or types with a prefix; "
            "give formats such as mxfp4"
        )
    bits, name = min((bits_a_value(get_format(each.name)), each.name) for each in formats)
    if (budget := min(budgets)) + SAME_BITS < bits:
        raise ValueError(
            f"--bits is {budget:g}, but the smallest format of --formats, {name}, has {bits:g} "
            "bits per value; give more bits or a smaller format"
        )
    own = {_proposed(budget) for budget in budgets}
    if not whole:
        own |= {_layers(each) for each in formats}
    for each in configurations:
        if not each.is_type and each.name in own:
            raise ValueError(
                f"with --bits, the study proposes a recipe with the same name {each.name!r}; "
                f"rename {each.recipe}"
            )


def _proposed(budget: float) -> str:
    """Return the name of the recipe that is proposed for a bit budget."""
    return f"proposed_{budget:g}_bits"


def _layers(uniform: Configuration) -> str:
    """Return the name of the recipe that sets the uniform format for the studied matmuls only."""
    return f"layers_{uniform.file_name}"


def pairs_of(
    table: pd.DataFrame, budgets: Iterable[float], folder: Path, *, dump: str, whole: bool
) -> list[Pair]:
    """Propose and write a recipe for each bit budget, and return it with its uniform counterpart.

    The counterpart of a recipe has the format with the smallest offline error among those with the
    most bits within the budget. Both set formats for the same matmuls, so that their mean bits can
    be compared: if only a part of the matmuls was studied, the counterpart is a recipe, too.

    Args:
        table: table of the offline study.
        budgets: mean bits per value.
        folder: folder for the recipes.
        dump: name of the studied dump, for the descriptions.
        whole: whether all matmuls were studied that a quantization type quantizes.

    Raises:
        ValueError: if the cheapest formats exceed a budget.
    """
    places = places_of(table[table["format"] != BASELINE])
    pairs = []
    for budget in budgets:
        proposal = propose(places, budget)
        name, bits = _uniform(places, budget)
        choices = tuple((place, option_of(place, name)) for place in places)
        proposed = _recipe(_proposed(budget), proposal, folder, dump)
        uniform = Configuration(name)
        if not whole:
            uniform = _recipe(_layers(uniform), Proposal(budget, choices, None), folder, dump)
        same = [option.format for _, option in proposal.choices] == [name] * len(places)
        pairs.append(Pair(budget, proposed, proposal.bits, uniform, bits, same))
    return pairs


def _recipe(name: str, proposal: Proposal, folder: Path, dump: str) -> Configuration:
    """Write a proposal as a recipe, and return its configuration."""
    path = folder / f"{name}.yaml"
    write_recipe(path, recipe_text(proposal, dump))
    return Configuration(name, path, is_type=False)


def option_of(place: Place, name: str) -> Option:
    """Return the option that gives a matmul the format `name`."""
    return next(option for option in place.options if option.format == name)


def _uniform(places: Sequence[Place], budget: float) -> tuple[str, float]:
    """Return the uniform format for a bit budget, and its mean bits per value.

    Raises:
        ValueError: if no format has finite results within the budget in all matmuls.
    """
    names = set.intersection(*({option.format for option in place.options} for place in places))
    total = sum(place.values for place in places)
    choices = []
    for name in sorted(names):
        options = [(place.values, option_of(place, name)) for place in places]
        bits = sum(values * option.bits for values, option in options) / total
        if bits <= budget + SAME_BITS:
            choices.append((-round(bits, 2), sum(option.error for _, option in options), name))
    if not choices:
        raise ValueError(
            f"--bits is {budget:g}, but no format of --formats has finite results within it; give "
            "more bits or a smaller format"
        )
    bits, _, name = min(choices)
    return name, -bits
