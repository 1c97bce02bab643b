"""Select the tensors to collect according to the command-line flags.

The flags select iterations, micro-batches, layers, modules, tensor names, operations, ranks and the
part of each tensor. A tensor is collected if all flags select it.

`Selection.wants` returns the same result on every rank of a parallel group. A collected matmul runs
different collective operations from one that is not collected, so ranks that disagreed would wait
for each other forever. `Selection.ranks` only determines afterward which ranks write.
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
#: Values of --collect-tensors that each stand for several tensor names.
GROUPS = {"all": tuple(name for name in NAMES if name in DEFAULT_NAMES), "codes": ALL_CODES}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Selection of the tensors to collect, parsed from the command-line flags."""

    iterations: Iterations = field(default_factory=Iterations)
    micro_batches: int = 1  #: how many of an iteration's first micro-batches to collect; 0 for all
    layers: NumberSelection = field(default_factory=NumberSelection)
    ranks: NumberSelection = field(default_factory=NumberSelection)
    modules: tuple[str, ...] = ()  #: globs for module names; empty for all modules
    names: frozenset[str] = DEFAULT_NAMES
    named: frozenset[str] = frozenset()  #: values of --collect-tensors except `all`
    slices: Slices = field(default_factory=Slices)

    def wants(self, identity: ModuleIdentity, layer_type: str) -> bool:
        """Return whether any tensor of a module is collected. All ranks return the same value."""
        return (
            not identity.is_lm_head
            and identity.layer_idx in self.layers
            and self._includes(identity.name)
            and not self.names.isdisjoint(TENSOR_NAMES[layer_type])
        )

    def _includes(self, module: str) -> bool:
        return not self.modules or any(matches(module, glob) for glob in self.modules)

    def check_reached(self, modules: Iterable[tuple[ModuleIdentity, Collection[str]]]) -> None:
        """Raise an error if a selected layer, glob or tensor name matches nothing in the model.

        Args:
            modules: all modules of the model, each with the names of its tensors.

        Raises:
            ValueError: if a selected layer does not exist, a glob matches no module, or no selected
                module has a requested tensor; the message names the layers, glob or tensors.
        """
        modules = list(modules)
        self._check_layers({identity.layer_idx for identity, _ in modules} - {-1})
        available = [
            (identity.name, names)
            for identity, names in modules
            if not identity.is_lm_head and identity.layer_idx in self.layers
        ]
        for glob in self.modules:
            if not any(matches(name, glob) for name, _ in available):
                first = available[0][0] if available else "missing"
                endings = dict.fromkeys(name.rpartition(".")[2] for name, _ in available)
                raise ValueError(
                    f"--collect-modules: {glob!r} matches none of the {len(available)} modules "
                    f"that can be collected; the first is {first}, and their names end with "
                    f"{', '.join(endings)}"
                )
        reached = {name for module, names in available if self._includes(module) for name in names}
        lost = [
            word for word in sorted(self.named) if reached.isdisjoint(GROUPS.get(word, (word,)))
        ]
        if lost:
            hint = ""
            if any(word == "codes" or word in ALL_CODES for word in lost):
                hint = " (only operands that this run quantizes have codes)"
            raise ValueError(
                f"--collect-tensors {' '.join(lost)}: the selected modules have no such tensor"
                f"{hint}; their tensors are {_listed(reached) or 'none'}"
            )

    def _check_layers(self, existing: set[int]) -> None:
        """Raise ValueError if a selected layer is not one of the model's layers."""
        missing = sorted((self.layers.numbers or frozenset()) - existing)
        if missing:
            known = ", ".join(map(str, sorted(existing))) or "none"
            raise ValueError(
                f"--collect-layers: the model has no layer {', '.join(map(str, missing[:8]))}; its "
                f"layers are {known}"
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
        """Create the selection from command-line flags; each parameter is named after its flag.

        Args:
            num_layers: number of layers of the model, to check `collect_layers`.
            world_size: number of ranks, to check `collect_ranks`.
            collect_start, collect_every, collect_iterations: see `iteration_windows`.
            collect_micro_batches: number of micro-batches per iteration; 0 for all.
            collect_layers, collect_ranks: see `number_selection`.
            collect_modules: globs that match a module's dotted name or the part after one of its
                dots.
            collect_tensors: names from `TENSOR_NAMES`; `all` stands for the default names and
                `codes` for the names of all codes.
            collect_operations: "forward", "backward" or both.
            collect_slice: see `tensor_slice`.

        Raises:
            ValueError: if a value is invalid, or two values exclude each other.
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
                "--collect-slice selects parts of tensors, but codes represent whole blocks; leave "
                "--collect-slice out, or collect no codes"
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
    """Split the values of a flag at spaces and commas.

    Raises:
        ValueError: if `values` contains only separators; an empty list would select everything.
    """
    split = [word for value in values or () for word in re.split(r"[,\s]+", value) if word]
    if values and not split:
        raise ValueError(f"{flag} has no value; give some, or leave it out for all")
    return split


def matches(module: str, glob: str) -> bool:
    """Return whether `glob` matches a module's dotted name or the part after one of its dots."""
    return fnmatchcase(module, glob) or fnmatchcase(module, f"*.{glob}")


def _names(tensors: list[str], operations: list[str]) -> frozenset[str]:
    _check_known("--collect-tensors", tensors, (*NAMES, *GROUPS))
    _check_known("--collect-operations", operations, OPERATIONS)
    named = {name for word in tensors or ["all"] for name in GROUPS.get(word, (word,))}
    selected = {name for name in named if not operations or operation_of(name) in operations}
    if lost := [name for name in tensors if name not in GROUPS and name not in selected]:
        raise ValueError(
            f"--collect-operations {' '.join(operations)} leaves out {' '.join(lost)} of "
            "--collect-tensors; name tensors of that operation, or leave one of the flags out"
        )
    return frozenset(selected)


def _check_known(flag: str, given: Iterable[str], known: Sequence[str]) -> None:
    for word in given:
        if word not in known:
            raise ValueError(f"{flag}: unknown {word!r}; choose from {_listed(known)}")


def _listed(names: Collection[str]) -> str:
    """Format tensor names for a message; the names of quantized codes are replaced by `codes`."""
    few = [name for name in (*GROUPS, *NAMES) if name in names and name not in ALL_CODES]
    few += ["codes"] if "codes" not in few and not set(names).isdisjoint(ALL_CODES) else []
    return " ".join(few or names)


def describe(selection: Selection) -> dict[str, Any]:
    """Return the selection as plain values for the run card.

    Settings that select everything are left out.
    """
    described: dict[str, Any] = {"micro_batches": selection.micro_batches}
    if selection.iterations.source:
        described["iterations"] = selection.iterations.source
    for name in ("layers", "ranks"):
        if (numbers := getattr(selection, name).numbers) is not None:
            described[name] = sorted(numbers)
    if selection.modules:
        described["modules"] = list(selection.modules)
    described["tensors"] = sorted(selection.names)
    if selection.slices.by_letter:
        parts = selection.slices.by_letter.items()
        described["slice"] = {letter: [part.start, part.stop, part.step] for letter, part in parts}
    return described
