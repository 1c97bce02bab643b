"""Read quantization recipes, which set the format of each operand by matmul, layer and iteration.

A recipe is a YAML file with `configs` and `matchers`, as in megatron-core. The contents of a config
are defined here:

    configs:
      nvfp4:
        linear:
          fprop: {input: nvfp4, weight: "nvfp4:2d"}
          dgrad: {grad_output: "nvfp4:sr", weight: "nvfp4:2d"}
          wgrad: {grad_output: "nvfp4:sr", input: nvfp4, hadamard: {size: 16, signs: nvfp4}}
      attention:
        qk: mxfp8                                       # all six operands
        pv: {format: mxfp8, backward: bf16, probabilities: unnormalized}
    matchers:                                           # the first match applies
      head: {config: bf16, type: glob, pattern: "output_layer", enabled: true}
      end: {config: bf16, type: glob, pattern: "*", layers: last 1, enabled: true}
      warm: {config: bf16, type: glob, pattern: "*", iterations: 1-10, enabled: true}
      mlp: {config: nvfp4, type: glob, pattern: "*.mlp.*", enabled: true}
      core: {config: attention, type: glob, pattern: "*.core_attention", enabled: true}

A pattern is matched against a module's name in the whole model (`decoder.layers.5.mlp.linear_fc1`).
`config` names one of the configs, or a quantization type (`mxfp8`, `linear_mxfp4`, `bf16`).
`layers` takes numbers and ranges counted from 0 (`0-3,8`), `first 2` or `last 4`; `iterations`
takes a range counted from 1 (`1-100`, `101-`). Modules that no matcher selects stay in high
precision.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from megatron.bounded_files import printable
from megatron.fake_quant.recipe.operands import Config, accumulated_operations, parse_config
from megatron.fake_quant.recipe.yaml_nodes import Node, RecipeError, load_yaml

_MATCHER_KEYS = ("config", "type", "pattern", "enabled", "layers", "iterations")
Interval = tuple[float, float]  #: first and last iteration, from 1; the last may be math.inf
# Numbers of more than 12 digits are mistakes, and Python refuses to parse thousands of digits.
_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")
_ENDS = re.compile(r"(first|last) ([1-9][0-9]{0,11})")
_SPACES = re.compile(r" *([-,]|^|$) *")  # spaces that have no effect: not those between digits
_ITERATIONS = re.compile(r"([0-9]{1,12})(-([0-9]{0,12}))?")


@dataclass(frozen=True, slots=True)
class Layers:
    """Selection of transformer layers by their global numbers, counted from 0."""

    text: str
    ranges: tuple[tuple[int, int], ...] = ()
    first: int = 0
    last: int = 0

    def __contains__(self, place: tuple[int, int]) -> bool:
        """Return whether a layer is selected; `place` is (layer number, number of layers).

        The number -1 is never selected.
        """
        layer, count = place
        if any(low <= layer <= high for low, high in self.ranges):
            return True
        # Layers for multi-token prediction are numbered after the last transformer layer.
        return 0 <= layer < count and (layer < self.first or layer >= count - self.last)


@dataclass(frozen=True, slots=True)
class Rule:
    """Parsed matcher of a recipe: the modules, layers and iterations to which a config applies."""

    name: str
    line: int
    pattern: str
    config_name: str
    config: Config
    layers: Layers | None
    iterations: Interval

    def fits(self, module: str, layer: int, num_layers: int) -> bool:
        """Return whether the rule applies to this module, regardless of the iteration."""
        chosen = self.layers is None or (layer, num_layers) in self.layers
        return chosen and fnmatchcase(module, self.pattern)

    def holds_at(self, iteration: float) -> bool:
        """Return whether the rule applies to this iteration, counted from 1."""
        first, last = self.iterations
        return first <= iteration <= last


@dataclass(frozen=True, slots=True)
class Recipe:
    """Quantization recipe that was read from a file."""

    path: Path
    rules: tuple[Rule, ...]
    #: operations for which a config has the key `accumulate`, even with fp32, which changes nothing
    accumulated: frozenset[str] = frozenset()
    digest: str = ""  #: first digits of the SHA-256 of the file

    @property
    def name(self) -> str:
        """Name of the recipe: the name of its file without the suffix."""
        return self.path.stem

    def rules_for(self, module: str, layer: int, num_layers: int) -> tuple[Rule, ...]:
        """Return the rules that apply to a module in at least one iteration, by precedence."""
        applicable = []
        free: list[Interval] = [(1, math.inf)]  # iterations that no earlier rule covers
        for rule in self.rules:
            if rule.fits(module, layer, num_layers):
                first, last = rule.iterations
                if any(low <= last and first <= high for low, high in free):
                    applicable.append(rule)
                pieces = [(low, min(high, first - 1)) for low, high in free]
                pieces += [(max(low, last + 1), high) for low, high in free]
                free = [(low, high) for low, high in pieces if low <= high and low < math.inf]
        return tuple(applicable)

    @property
    def first_iteration(self) -> float:
        """First iteration in which a rule sets a format; infinite if no rule does."""
        starts = [rule.iterations[0] for rule in self.rules if any(rule.config.values())]
        return min(starts, default=math.inf)

    def check_in_run(self, train_iters: int | None) -> None:
        """Raise ValueError if the recipe sets its first format only after the run ends.

        Args:
            train_iters: last iteration of the run, if known.
        """
        if train_iters and train_iters < self.first_iteration < math.inf:
            raise ValueError(
                f"recipe {self.path} sets its first format in iteration {self.first_iteration:.0f},"
                f" and the run ends at iteration {train_iters}; raise --train-iters, or change the "
                "recipe"
            )

    def changes(self) -> list[int]:
        """Return the iterations, from 2 on, at which a rule starts to apply or stops applying."""
        ends = {
            edge for rule in self.rules for edge in (rule.iterations[0], rule.iterations[1] + 1)
        }
        return sorted(int(edge) for edge in ends if 1 < edge < math.inf)


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe file.

    Raises:
        ValueError: if the recipe is invalid; the message names the file, the line and the accepted
            values.
    """
    try:
        root = load_yaml(path)
        root.only_keys("recipe", ("configs", "matchers", "description"))
        configs = {
            name: parse_config(node, f"config {name!r}")
            for name, node in root.mapping("configs", "recipe").items()
        }
        matchers = root.mapping("matchers", "recipe").items()
        rules = [_rule(name, node, configs) for name, node in matchers]
        used = {rule.config_name for rule in rules if rule is not None}
        accumulated: frozenset[str] = frozenset()
        for name, node in root.mapping("configs", "recipe").items():
            if name not in used:
                raise node.error(f"config {name!r} is used by no enabled matcher; remove it")
            accumulated |= accumulated_operations(node)
        if not any(rules):
            raise root.error("recipe has no enabled matcher, so it has no effect; add one")
    except RecipeError as error:
        raise ValueError(f"recipe {printable(path, limit=1000)}: {error}") from None
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return Recipe(path, tuple(rule for rule in rules if rule is not None), accumulated, digest)


def _rule(name: str, node: Node, configs: Mapping[str, Config]) -> Rule | None:
    """Parse one matcher of a recipe and return its rule, or None if the matcher is disabled."""
    what = f"matcher {name!r}"
    node.only_keys(what, _MATCHER_KEYS)
    enabled = node.scalar("enabled", what)
    if not isinstance(enabled, bool):
        raise node.error(
            f"{what} has enabled: {enabled!r}; give true or false (megatron-core reads a missing "
            "value as false)"
        )
    kind = node.scalar("type", what)
    if kind != "glob":
        raise node.error(f"{what} has type {kind!r}; the only accepted type is glob")
    config_name, pattern = node.text_of("config", what), node.scalar("pattern", what)
    if not isinstance(pattern, str) or not pattern or not pattern.isprintable():
        raise node.error(f"{what} has the pattern {pattern!r}; give a glob, as in '*.linear_fc1'")
    config = configs.get(config_name)
    if config is None:
        try:
            config = parse_config(Node(config_name, node.line, config_name), what)
        except RecipeError:
            known = ", ".join(configs) or "none"
            raise node.error(
                f"{what} names the config {config_name!r}; the configs are {known}, and a "
                "quantization type such as mxfp8, linear_mxfp4 or bf16 is accepted too"
            ) from None
    layers = _layers(node, what) if "layers" in node else None
    iterations = _iterations(node, what) if "iterations" in node else (1, math.inf)
    if not enabled:
        return None
    return Rule(name, node.line, pattern, config_name, config, layers, iterations)


def _layers(node: Node, what: str) -> Layers:
    text = node.text_of("layers", what)
    if ends := _ENDS.fullmatch(text):
        count = int(ends[2])
        return Layers(text, first=count) if ends[1] == "first" else Layers(text, last=count)
    ranges = []
    for part in _SPACES.sub(r"\1", text).split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise node.error(
                f"{what} has layers: {text}; give numbers or ranges, counted from 0, such "
                "as '0-3,8', or give 'first 2' or 'last 4'"
            )
        ranges.append((int(match[1]), int(match[2] or match[1])))
    return Layers(text, tuple(ranges))


def _iterations(node: Node, what: str) -> Interval:
    text = node.text_of("iterations", what)
    match = _ITERATIONS.fullmatch(_SPACES.sub(r"\1", text))
    first = int(match[1]) if match else 0
    last = first if match and not match[2] else int(match[3]) if match and match[3] else math.inf
    if first < 1 or last < first:
        raise node.error(
            f"{what} has iterations: {text}; iterations count from 1; give one number or "
            "range, as in '5', '1-100' or '101-', and add a matcher for each further one"
        )
    return first, last
