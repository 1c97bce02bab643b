"""Resolve the number format of every matmul and record where it was set.

A quantization type (see `quant_type.py`) sets the same formats for all layers. A recipe (see
`recipe/`) sets the formats layer by layer and operand by operand. The function `resolve` combines
all settings into a policy, which also records the source of each value; `current` returns the
policy of this process.

The format of an operation comes from the first of these sources that sets it:

1. the flag for the operation, then the flag for all operations
2. the recipe file
3. the environment variable for the operation, then `CUSTOM_QUANT_TYPE`
4. the local settings file
5. the default, `bf16`

A quantization type sets all three operations: `FA_mxfp8` on the command line also overrides the
environment's choice for the linear layers. The flag for all operations would therefore override a
recipe in every layer. It overrides a recipe that an environment variable sets, and it is refused
together with `--quant-recipe`.

The LM head stays in high precision unless a recipe quantizes it.

`accumulators.py` sets one accumulator for all matmuls. It comes from a flag or from an environment
variable. A recipe with accumulators of its own takes precedence over the variable, and excludes the
flag.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from megatron.bounded_files import printable
from megatron.fake_quant.formats import Format
from megatron.fake_quant.matmul.gemm_formats import GemmFormats
from megatron.fake_quant.policy.accumulators import (
    ACCUMULATE_FLAG,
    ACCUMULATE_VARIABLE,
    AccumulatorChoice,
    chosen,
    with_accumulator,
)
from megatron.fake_quant.policy.settings import SETTINGS_FILE, SETTINGS_VARIABLE, read_settings
from megatron.fake_quant.policy.variables import check_names
from megatron.fake_quant.quant_type import (
    DEFAULT_TYPE,
    OPERATIONS,
    PREFIXES,
    gemm_formats,
    parse_format,
    parse_type,
)
from megatron.fake_quant.recipe import Recipe, Rule, load_recipe

_Parsed = TypeVar("_Parsed")

TYPE_VARIABLE = "CUSTOM_QUANT_TYPE"
TYPE_FLAG = "--custom-quant-type"  #: flag of the trainer that sets the quantization type
OPERATION_VARIABLES = {op: f"{op.upper()}_QUANT_TYPE" for op in OPERATIONS}
RECIPE_VARIABLE = "QUANT_RECIPE"
#: all environment variables that set formats or accumulators, directly or through a file
VARIABLES = (
    TYPE_VARIABLE,
    *OPERATION_VARIABLES.values(),
    RECIPE_VARIABLE,
    ACCUMULATE_VARIABLE,
    SETTINGS_VARIABLE,
)
DEFAULT_SOURCE = "default"  #: source name if no flag, variable or file sets a format


@dataclass(frozen=True, slots=True)
class Choice:
    """Number format of one operation (linear, qk or pv), and the source that set the format."""

    format: Format | None  #: number format; None if the operands stay in high precision
    source: str  #: source of the format, such as "environment variable CUSTOM_QUANT_TYPE"

    @property
    def name(self) -> str:
        """Name of the format, or `bf16` if the operands are not quantized."""
        return DEFAULT_TYPE if self.format is None else self.format.name


@dataclass(frozen=True, slots=True)
class OperationPolicy:
    """Formats of one operation (linear, qk or pv) in one module, for all iterations of a run."""

    operation: str
    fixed: GemmFormats | None  #: formats of all iterations; unused if there are rules
    source: str
    rules: tuple[Rule, ...] | None = None  #: rules of a recipe, in order of precedence
    accumulator: AccumulatorChoice | None = None  #: accumulator that is set for all matmuls
    is_lm_head: bool = False  #: True for the LM head; it has an accumulator only with a format

    def _accumulated(self, formats: GemmFormats | None) -> GemmFormats | None:
        if self.accumulator is None or (self.is_lm_head and formats is None):
            return formats
        return with_accumulator(formats, self.accumulator.accumulator)

    def _rule(self, iteration: float) -> Rule | None:
        return next((rule for rule in self.rules or () if rule.holds_at(iteration)), None)

    def at(self, iteration: int) -> GemmFormats | None:
        """Return the formats for `iteration`, counted from 1; None means high precision."""
        if self.rules is None:
            return self.fixed
        rule = self._rule(iteration)
        return self._accumulated(None if rule is None else rule.config[self.operation])

    @property
    def changes(self) -> bool:
        """True if the formats may differ between iterations."""
        return any(rule.iterations != (1, math.inf) for rule in self.rules or ())

    def of_all_times(self) -> list[tuple[GemmFormats, str]]:
        """Return all formats that the operation may use during the run, with their sources.

        Iterations in which the operation stays in high precision are left out.
        """
        if self.rules is None:
            return [] if self.fixed is None else [(self.fixed, self.source)]
        # A range of iterations without a rule begins at iteration 1 or after the end of a rule.
        starts = [1.0, *(rule.iterations[1] + 1 for rule in self.rules)]
        uncovered = any(start < math.inf and self._rule(start) is None for start in starts)
        formats_of = [
            (self._accumulated(None if rule is None else rule.config[self.operation]), rule)
            for rule in (*self.rules, *[None] * uncovered)
        ]
        return [(f, self._source_of(rule)) for f, rule in formats_of if f is not None]

    def source_at(self, iteration: int) -> str:
        """Return the source of the formats in an iteration, such as a flag or a recipe's line."""
        if self.rules is None:
            return self.source
        return self._source_of(self._rule(iteration))

    def _source_of(self, rule: Rule | None) -> str:
        formats = None if rule is None else rule.config[self.operation]
        if formats is None and self._accumulated(None) is not None:
            assert self.accumulator is not None
            return self.accumulator.source
        if rule is None:
            return f"{self.source}, no matcher"
        return f"{self.source}, matcher {rule.name!r} (line {rule.line})"


@dataclass(frozen=True, slots=True)
class Policy:
    """Quantization policy: the formats for the operands of linear layers, QK^T and PV."""

    choices: Mapping[str, Choice]  #: format by operation; unused for operations in `by_recipe`
    recipe: Recipe | None = None
    by_recipe: frozenset[str] = frozenset()  #: operations whose formats the recipe sets
    accumulator: AccumulatorChoice | None = None  #: accumulator that is set for all matmuls

    @property
    def recipe_accumulates(self) -> bool:
        """True if the recipe sets accumulators, so that none can be set for all matmuls."""
        return self.recipe is not None and bool(self.by_recipe & self.recipe.accumulated)

    @property
    def changes_matmuls(self) -> bool:
        """True if a matmul may have a format or a simulated accumulator."""
        simulated = self.accumulator is not None and self.accumulator.accumulator.simulated
        return simulated or self.quant_type != DEFAULT_TYPE

    @property
    def request(self) -> str:
        """Description of what is set, for messages: a format, or an accumulator alone."""
        if self.quant_type == DEFAULT_TYPE and self.accumulator is not None:
            return f"accumulator {self.accumulator.accumulator.name}"
        return f"format {self.quant_type}"

    @property
    def quant_type(self) -> str:
        """Shortest quantization type that is equivalent to this policy; `recipe_NAME` for a recipe.

        If no quantization type describes the choices, the operations are listed one by one. The
        name of a recipe is followed by the operations that flags set.
        """
        if self.recipe is not None:
            by_flag = [op for op in OPERATIONS if op not in self.by_recipe]
            flags = [f"{op}-{self.choices[op].name}" for op in by_flag]
            return "_".join([f"recipe_{self.recipe.name}", *flags])
        used = {choice.name for choice in self.choices.values() if choice.format is not None}
        if not used:
            return DEFAULT_TYPE
        where = tuple(op for op, choice in self.choices.items() if choice.format is not None)
        for prefix, operations in PREFIXES.items():
            if len(used) == 1 and where == operations:
                return prefix + used.pop()
        return "_".join(f"{op}-{choice.name}" for op, choice in self.choices.items())

    @property
    def common(self) -> str:
        """Text that must be the same on all ranks: formats, recipe digest and accumulator."""
        text = self.quant_type
        if self.recipe is not None:
            text += f" (SHA-256 {self.recipe.digest})"
        if self.accumulator is not None and self.accumulator.accumulator.simulated:
            text += f" with accumulator {self.accumulator.accumulator.name}"
        return text

    def describe(self) -> list[str]:
        """Return lines of text: each operation's format and its source, and any accumulator."""
        lines = []
        for op, choice in self.choices.items():
            if op in self.by_recipe:
                assert self.recipe is not None
                lines.append(f"{op}: layer by layer (recipe {self.recipe.path})")
            else:
                lines.append(f"{op}: {choice.name} ({choice.source})")
        if self.accumulator is not None:
            name, source = self.accumulator.accumulator.name, self.accumulator.source
            lines.append(f"accumulator: {name} ({source})")
        elif self.recipe_accumulates:
            assert self.recipe is not None
            lines.append(f"accumulator: layer by layer (recipe {self.recipe.path})")
        return lines

    def plan(
        self, operation: str, module: str, layer: int, num_layers: int, *, is_lm_head: bool = False
    ) -> OperationPolicy:
        """Return the formats of one operation (linear, qk or pv) in one module.

        Args:
            operation: one of `OPERATIONS`.
            module: name of the module in the whole model.
            layer: index of the module's transformer layer, from 0; -1 outside the layers.
            num_layers: number of layers in the whole model.
            is_lm_head: True for the LM head, which is quantized only by a recipe.
        """
        if operation in self.by_recipe:
            assert self.recipe is not None
            rules = self.recipe.rules_for(module, layer, num_layers)
            source = f"recipe {self.recipe.path.name}"
            return OperationPolicy(operation, None, source, rules, self.accumulator, is_lm_head)
        choice = self.choices[operation]
        if is_lm_head:
            return OperationPolicy(operation, None, "the LM head stays in high precision")
        fixed, source = self._fixed(operation), choice.source
        if fixed is not None and choice.format is None:
            assert self.accumulator is not None
            source = self.accumulator.source
        return OperationPolicy(operation, fixed, source)

    def _fixed(self, operation: str) -> GemmFormats | None:
        """Return the formats of an operation that no recipe sets, including any accumulator."""
        fmt = self.choices[operation].format
        fixed = None if fmt is None else gemm_formats(operation, fmt)
        if self.accumulator is None:
            return fixed
        return with_accumulator(fixed, self.accumulator.accumulator)

    def _check_accumulator(self) -> None:
        """Raise ValueError if the accumulator for all matmuls does not fit their formats."""
        if self.accumulator is None:
            return
        formats: list[GemmFormats | None] = []
        for operation, choice in self.choices.items():
            if operation in self.by_recipe:
                assert self.recipe is not None
                formats += [rule.config[operation] for rule in self.recipe.rules]
            else:
                fmt = choice.format
                formats.append(None if fmt is None else gemm_formats(operation, fmt))
        self.accumulator.check(formats)


def _level(
    of_type: str | None,
    of_operation: Mapping[str, str | None],
    type_source: str,
    sources: Mapping[str, str],
) -> dict[str, Choice]:
    """Return the formats set at one level of precedence, such as flags or the environment.

    A value for a single operation takes precedence over the quantization type.
    """
    choices: dict[str, Choice] = {}
    if of_type:
        choices = {
            op: Choice(fmt, type_source)
            for op, fmt in _parsed(parse_type, of_type, type_source).items()
        }
    for op in OPERATIONS:
        if name := of_operation.get(op):
            choices[op] = Choice(_parsed(parse_format, name, sources[op]), sources[op])
    return choices


def _parsed(parse: Callable[[str], _Parsed], name: str, source: str) -> _Parsed:
    """Return `parse(name)`; if that raises ValueError, prefix the message with the source."""
    try:
        return parse(name)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def resolve(
    flags: Mapping[str, str | None] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    type_flag: str = TYPE_FLAG,
) -> Policy:
    """Resolve the formats of each operation from flags, recipe, environment and settings file.

    Args:
        flags: values of the flags, with the keys `custom_quant_type`, `linear`, `qk`, `pv`,
            `recipe` and `accumulate`; the value of a flag that was not given is None or missing.
        environ: environment variables; by default, the process's own.
        type_flag: flag that sets `custom_quant_type`, for messages.

    Raises:
        ValueError: if an environment variable is misspelled, if a value is not a quantization type,
            format or recipe (the message names its source), if a flag is empty, or if flags would
            override the given recipe in every layer.
    """
    flags = {} if flags is None else flags
    environ = os.environ if environ is None else environ
    check_names(environ, VARIABLES)
    _check_given(flags, type_flag)
    by_flags = _level(
        flags.get("custom_quant_type"),
        flags,
        f"flag {type_flag}",
        {op: f"flag --{op}-quant" for op in OPERATIONS},
    )
    recipe = _recipe(flags, environ)
    settings_file = _settings_file(environ)
    levels = [
        by_flags,
        _level(
            environ.get(TYPE_VARIABLE),
            {op: environ.get(variable) for op, variable in OPERATION_VARIABLES.items()},
            f"environment variable {TYPE_VARIABLE}",
            {op: f"environment variable {OPERATION_VARIABLES[op]}" for op in OPERATIONS},
        ),
        _level(
            None,
            read_settings(settings_file),
            "",
            dict.fromkeys(OPERATIONS, f"settings file {settings_file.name}"),
        ),
        _level(DEFAULT_TYPE, {}, DEFAULT_SOURCE, {}),
    ]
    choices = {op: next(level[op] for level in levels if op in level) for op in OPERATIONS}
    by_recipe = frozenset(op for op in OPERATIONS if recipe is not None and op not in by_flags)
    policy = Policy(choices, recipe=recipe, by_recipe=by_recipe)
    policy = replace(policy, accumulator=_accumulator(flags.get("accumulate"), environ, policy))
    policy._check_accumulator()
    return policy


def _check_given(flags: Mapping[str, str | None], type_flag: str) -> None:
    """Raise ValueError if a flag is given with an empty value, as from an unset shell variable."""
    names = {"custom_quant_type": type_flag, "recipe": "--quant-recipe"}
    names["accumulate"] = ACCUMULATE_FLAG
    for key, value in flags.items():
        if value is not None and not value.strip():
            flag = names.get(key, f"--{key}-quant")
            raise ValueError(f"flag {flag} is empty; give a value, or leave the flag out")


def _accumulator(
    flag: str | None, environ: Mapping[str, str], policy: Policy
) -> AccumulatorChoice | None:
    """Return the accumulator for all matmuls; None if none is set or the recipe sets its own.

    Raises:
        ValueError: if there is no such accumulator, or if a flag sets one and the recipe sets its
            own.
    """
    choice = chosen(flag, environ.get(ACCUMULATE_VARIABLE))
    if choice is None or not policy.recipe_accumulates:
        return choice
    if flag:
        assert policy.recipe is not None
        raise choice.refuse(
            f"the recipe {policy.recipe.path} sets accumulators of its own; remove the flag, or "
            "`accumulate` from the recipe"
        )
    return None


def _recipe(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> Recipe | None:
    """Load the recipe set by flag or variable; None if none is set or flags overrule the variable.

    Raises:
        ValueError: if flags would overrule a recipe that a flag sets, or if the recipe is invalid.
    """
    overruled = flags.get("custom_quant_type") or all(flags.get(op) for op in OPERATIONS)
    path = flags.get("recipe") or (None if overruled else environ.get(RECIPE_VARIABLE))
    if not path:
        return None
    if overruled:
        raise ValueError(
            f"the recipe {path} would be overruled by flags in every layer; give the recipe, or "
            "--custom-quant-type, or flags for some of the operations only"
        )
    return load_recipe(Path(path))


def canonical_type(name: str) -> str:
    """Return the canonical spelling of a quantization type, such as `FA_hifp8`, for file names.

    Raises:
        ValueError: if there is no such quantization type.
    """
    return Policy({op: Choice(fmt, "") for op, fmt in parse_type(name).items()}).quant_type


_current: Policy | None = None
_environment: dict[str, str | None] = {}  #: variables from which `_current` was resolved
_before_change: list[Callable[[], None]] = []  #: functions to call before formats change
_changes = 0  #: number of times that the formats changed


def configure(
    *,
    custom_quant_type: str | None = None,
    linear: str | None = None,
    qk: str | None = None,
    pv: str | None = None,
    recipe: str | None = None,
    accumulate: str | None = None,
    type_flag: str = TYPE_FLAG,
) -> Policy:
    """Set this process's quantization policy from the training flags, and return it.

    Call this function before the model is built. If it is called again with different formats, they
    apply to all models from the next forward pass on; all ranks must then call it. `type_flag` is
    the flag that sets `custom_quant_type`, for messages.

    Raises:
        ValueError: see `resolve`; also if the formats change while tensors are collected.
    """
    global _changes, _current, _environment
    flags = {"custom_quant_type": custom_quant_type, "linear": linear, "qk": qk, "pv": pv}
    given = {**flags, "recipe": recipe, "accumulate": accumulate}
    policy = resolve(given, type_flag=type_flag)
    if _current is not None and policy.common != _current.common:
        for function in _before_change:
            function()
        _changes += 1
    _current = policy
    _environment = {name: os.environ.get(name) for name in VARIABLES}
    return _current


def changes() -> int:
    """Return how many times `configure` has changed the formats."""
    return _changes


def call_before_change(function: Callable[[], None]) -> None:
    """Register a function that `configure` calls before it changes the formats.

    If the function raises ValueError, the formats do not change.
    """
    _before_change.append(function)


def _settings_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the settings file; the file may be missing only at the default path."""
    named = environ.get(SETTINGS_VARIABLE)
    if named and not Path(named).exists():
        raise ValueError(
            f"environment variable {SETTINGS_VARIABLE} names {printable(named)}, which does not "
            "exist; write it with script/quant_type_modifier.py, or unset the variable"
        )
    return Path(named or SETTINGS_FILE)


def check_environment() -> None:
    """Raise ValueError if an environment variable has changed since the formats were chosen.

    A program that sets the variable too late would otherwise train without the format.
    """
    for name, before in _environment.items():
        now = os.environ.get(name)
        if (now or None) != (before or None):
            raise ValueError(
                f"environment variable {name} was {before or 'not set'} when the formats of this "
                f"run were chosen, and is now {now or 'not set'}; set it before the program "
                "starts, or call megatron.fake_quant.policy.configure() afterward"
            )


def current() -> Policy:
    """Return this process's quantization policy.

    If none is configured, resolve one from the environment and the settings file.
    """
    return configure() if _current is None else _current
