"""What is collected: which iterations, micro-batches, layers, modules, tensors, operations and
ranks, and which part of a tensor. The flags are added up: a tensor must be in all of them.

Whether a layer shows its tensors at all (`wants`) is the same on every rank of a parallel group:
a matmul that is observed communicates otherwise than one that is not, and ranks that differ would
wait for each other for ever. Which ranks write is decided behind that.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from megatron.collection.iteration_windows import Iterations
from megatron.collection.module_identity import ModuleIdentity
from megatron.collection.number_selection import NumberSelection
from megatron.collection.tensor_slice import Slices
from megatron.tensor_record import CODES, ON_REQUEST, TENSOR_NAMES, operation_of

OPERATIONS = ("forward", "backward")
NAMES = tuple(dict.fromkeys(name for names in TENSOR_NAMES.values() for name in names))
DEFAULT_NAMES = frozenset(NAMES) - frozenset(ON_REQUEST)
ALL_CODES = tuple(name for names in CODES.values() for name in names)
#: Words that stand for several names.
GROUPS = {"all": tuple(name for name in NAMES if name in DEFAULT_NAMES), "codes": ALL_CODES}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The flags, read and checked."""

    iterations: Iterations = field(default_factory=Iterations)
    micro_batches: int = 1  #: the first so many of each iteration, 0 for all
    layers: NumberSelection = field(default_factory=NumberSelection)
    ranks: NumberSelection = field(default_factory=NumberSelection)
    modules: tuple[str, ...] = ()  #: globs; none: all
    names: frozenset[str] = DEFAULT_NAMES
    named: frozenset[str] = frozenset()  #: those of `names` that the user spelled out
    slices: Slices = field(default_factory=Slices)

    def wants(self, identity: ModuleIdentity, layer_type: str) -> bool:
        """Whether anything of a layer is collected; see the module's docstring."""
        return (
            not identity.is_lm_head
            and identity.layer_idx in self.layers
            and self._includes(identity.name)
            and not self.names.isdisjoint(TENSOR_NAMES[layer_type])
        )

    def _includes(self, module: str) -> bool:
        return not self.modules or any(matches(module, glob) for glob in self.modules)

    def check_reached(self, modules: Iterable[tuple[ModuleIdentity, Collection[str]]]) -> None:
        """Refuse a glob or a tensor that no module of the model has.

        Args:
            modules: those of the whole model, each with the names of its tensors.

        Raises:
            ValueError: names what is never collected.
        """
        there = [
            (identity.name, names)
            for identity, names in modules
            if not identity.is_lm_head and identity.layer_idx in self.layers
        ]
        for glob in self.modules:
            if not any(matches(name, glob) for name, _ in there):
                some = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name, _ in there))
                raise ValueError(
                    f"--collect-modules: {glob!r} matches none of the {len(there)} modules that "
                    f"can be collected; the first is {there[0][0] if there else 'missing'}, their "
                    f"last names are {some}"
                )
        reached = {name for module, names in there if self._includes(module) for name in names}
        lost = [
            word for word in sorted(self.named) if reached.isdisjoint(GROUPS.get(word, (word,)))
        ]
        if lost:
            hint = ""
            if any(word == "codes" or word in ALL_CODES for word in lost):
                hint = " (codes are of operands that this run quantizes)"
            raise ValueError(
                f"--collect-tensors {' '.join(lost)}: the selected modules have no such tensor"
                f"{hint}; theirs are {_listed(reached) or 'none'}"
            )

    @classmethod
    def parse(
        cls,
        *,
        num_layers: int | None = None,
        world_size: int | None = None,
        collect_start: int | None = None,
        collect_every: int | None = None,
        collect_iterations: str | None = None,
        collect_micro_batches: int = 1,
        collect_layers: str = "all",
        collect_modules: Sequence[str] | None = None,
        collect_tensors: Sequence[str] | None = None,
        collect_operations: Sequence[str] | None = None,
        collect_ranks: str = "all",
        collect_slice: Sequence[str] | None = None,
    ) -> "Selection":
        """Read the flags of the same names.

        Args:
            num_layers: bounds `collect_layers`.
            world_size: bounds `collect_ranks`.
            collect_start, collect_every, collect_iterations: see `iteration_windows`.
            collect_micro_batches: the first so many of each iteration, 0 for all.
            collect_layers, collect_ranks: see `number_selection`.
            collect_modules: globs for a module's dotted name, or for the end of it after a dot.
            collect_tensors: names of `TENSOR_NAMES`; `all` stands for those not on request,
                `codes` for all codes.
            collect_operations: forward, backward.
            collect_slice: see `tensor_slice`.

        Raises:
            ValueError: a value that is not understood, or two that exclude each other.
        """
        if collect_micro_batches < 0:
            raise ValueError(
                f"--collect-micro-batches is {collect_micro_batches}; give 0 for no limit or a "
                "positive number"
            )
        number = NumberSelection.parse
        tensors = words("--collect-tensors", collect_tensors)
        names = _names(tensors, words("--collect-operations", collect_operations))
        slices = Slices.parse(words("--collect-slice", collect_slice))
        if slices.by_letter and not names.isdisjoint(ALL_CODES):
            raise ValueError(
                "--collect-slice cuts tensors, and codes stand for whole blocks of one; leave it "
                "out, or take no codes"
            )
        return cls(
            iterations=Iterations.parse(collect_iterations, collect_start, collect_every),
            micro_batches=collect_micro_batches,
            layers=number(collect_layers, num_layers, flag="--collect-layers", what="layers"),
            ranks=number(collect_ranks, world_size, flag="--collect-ranks", what="ranks"),
            modules=tuple(words("--collect-modules", collect_modules)),
            names=names,
            named=frozenset(tensors) - {"all"},
            slices=slices,
        )


def words(flag: str, values: Sequence[str] | None) -> list[str]:
    """The values of a flag that takes several, with spaces or commas between them.

    Raises:
        ValueError: it was given, and without a value: all would be collected.
    """
    found = [word for value in values or () for word in re.split(r"[,\s]+", value) if word]
    if values and not found:
        raise ValueError(f"{flag} has no value; give some, or leave it out for all")
    return found


def matches(module: str, glob: str) -> bool:
    """Whether a glob stands for a module's whole dotted name, or for the end of it after a dot."""
    return fnmatchcase(module, glob) or fnmatchcase(module, f"*.{glob}")


def _names(tensors: list[str], operations: list[str]) -> frozenset[str]:
    _check_known("--collect-tensors", tensors, (*NAMES, *GROUPS))
    _check_known("--collect-operations", operations, OPERATIONS)
    named = {name for word in tensors or ["all"] for name in GROUPS.get(word, (word,))}
    kept = {name for name in named if not operations or operation_of(name) in operations}
    if lost := [name for name in tensors if name not in GROUPS and name not in kept]:
        raise ValueError(
            f"--collect-operations {' '.join(operations)} leaves out {' '.join(lost)} of "
            "--collect-tensors; name tensors of that operation, or leave one of the flags out"
        )
    return frozenset(kept)


def _check_known(flag: str, given: Iterable[str], known: Sequence[str]) -> None:
    for each in given:
        if each not in known:
            raise ValueError(f"{flag}: unknown {each!r}; choose from {_listed(known)}")


def _listed(names: Collection[str]) -> str:
    """For a message: the many names of codes are one word."""
    few = [name for name in (*GROUPS, *NAMES) if name in names and name not in ALL_CODES]
    few += ["codes"] if "codes" not in few and not set(names).isdisjoint(ALL_CODES) else []
    return " ".join(few or names)


def describe(selection: Selection) -> dict[str, Any]:
    """The selection as plain values, for the run card: only what is not everything."""
    found: dict[str, Any] = {"micro_batches": selection.micro_batches}
    if selection.iterations.source:
        found["iterations"] = selection.iterations.source
    for name in ("layers", "ranks"):
        if (numbers := getattr(selection, name).numbers) is not None:
            found[name] = sorted(numbers)
    if selection.modules:
        found["modules"] = list(selection.modules)
    found["tensors"] = sorted(selection.names)
    if selection.slices.by_letter:
        parts = selection.slices.by_letter.items()
        found["slice"] = {k: [kept.start, kept.stop, kept.step] for k, kept in parts}
    return found
