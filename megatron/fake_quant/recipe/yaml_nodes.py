"""Read YAML with line numbers, so that an error in a recipe can name its line."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron.bounded_files import UnusableFileError, printable, read_text

SIZE_LIMIT = 256 << 10  #: maximum size of a file, in bytes; parsing such a file takes about 2 s
DEPTH_LIMIT = 32
NODE_LIMIT = 100_000
_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
SCALAR_LIMIT = 10_000  #: maximum length of a value, in characters; the longest are descriptions
_DECIMAL = re.compile("[-+]?(0|[1-9][0-9]*)")
MESSAGE_LIMIT = 500  #: maximum length of an error message, in characters


class RecipeError(ValueError):
    """Error in a recipe; the message names the line."""


@dataclass(frozen=True, slots=True, repr=False)
class Node:
    """Scalar, list or mapping in a YAML file, with the number of its first line, from 1."""

    value: Any
    line: int
    text: str | None = None  #: scalar as it is written in the file; None for a list or a mapping

    def __repr__(self) -> str:
        return repr(self.value)

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def items(self) -> Iterator[tuple[str, "Node"]]:
        """Yield each key of this node, which must be a mapping, and the node under the key."""
        assert isinstance(self.value, dict)
        yield from self.value.items()

    def error(self, message: str) -> RecipeError:
        """Return an error whose message names the line of this node."""
        return RecipeError(f"line {self.line}: {printable(message, limit=MESSAGE_LIMIT)}")

    def only_keys(self, what: str, accepted: Sequence[str]) -> None:
        """Raise RecipeError unless the node is a mapping whose keys are all in `accepted`."""
        if not isinstance(self.value, dict):
            raise self.error(f"{what} is {self.value!r}; it takes {', '.join(accepted)}")
        for key, node in self.items():
            if key not in accepted:
                raise node.error(f"{what} has the key {key!r}; it takes {', '.join(accepted)}")

    def mapping(self, key: str, what: str) -> "Node":
        """Return the mapping under `key`, or an empty mapping if there is none."""
        node: Node = self.value.get(key, Node({}, self.line))
        if node.value is None:
            return Node({}, node.line)
        if not isinstance(node.value, dict):
            raise node.error(
                f"{key} of {what} is {node.value!r}; it takes names and their settings"
            )
        return node

    def scalar(self, key: str, what: str) -> Any:
        """Return the value under `key`; raise an error if it is missing, empty or a mapping."""
        if key not in self:
            raise self.error(f"{what} has no {key}; add it")
        node: Node = self.value[key]
        if isinstance(node.value, dict):
            raise node.error(f"{key} of {what} is a mapping; it takes one value")
        if node.value is None:
            raise node.error(f"{key} of {what} is empty; give a value, or remove it")
        return node.value

    def text_of(self, key: str, what: str) -> str:
        """Return the text under `key` as it is written; YAML would read `yes` as a truth value.

        Raises:
            RecipeError: if there is no value under `key`, or if it is a mapping.
        """
        value, node = self.scalar(key, what), self.value[key]
        return str(value) if node.text is None else str(node.text)

    def format_text(self, what: str) -> str:
        """Return the text of this node as it is written; it must be a scalar that names a format.

        Raises:
            RecipeError: if the node is a list or a mapping.
        """
        if self.text is None:
            kind = "a mapping" if isinstance(self.value, dict) else "a list"
            raise self.error(f"{what} is {kind}; give one format, such as mxfp8")
        return self.text


def load_yaml(path: Path) -> Node:
    """Read a YAML file whose root is a mapping; tags that create Python objects are errors.

    Raises:
        RecipeError: if the file cannot be read, is not plain YAML, is too large, is nested too
            deeply, or has a duplicate key.
    """
    try:
        text = read_text(path, limit=SIZE_LIMIT)
        _check_depth(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except FileNotFoundError as error:
        raise RecipeError(f"it cannot be read: {error.strerror}") from None
    except UnusableFileError as error:
        raise RecipeError(f"it cannot be read: {error.why}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"it is not YAML: {_reason(error)}") from None
    if not isinstance(root, yaml.MappingNode):
        raise RecipeError("line 1: it takes configs: and matchers:")
    return _Builder().node(root, root.start_mark.line + 1)


def _check_depth(text: str) -> None:
    """Raise RecipeError if YAML text is nested too deeply for PyYAML's recursive composer."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEPTH_LIMIT:
            line = event.start_mark.line + 1
            raise RecipeError(f"line {line}: it is nested deeper than {DEPTH_LIMIT} levels")


def _reason(error: yaml.YAMLError) -> str:
    """Return the message of a YAML error as one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = "" if mark is None else f"line {mark.line + 1}: "
    return place + printable(problem or error, limit=MESSAGE_LIMIT)


class _Builder:
    """Converter of PyYAML nodes to `Node`; it limits the number of values after alias expansion."""

    def __init__(self) -> None:
        self._nodes = 0
        self._open: set[int] = set()  # `id` of each PyYAML node that contains the current node

    def node(self, node: yaml.Node, line: int) -> Node:
        self._nodes += 1
        if self._nodes > NODE_LIMIT:
            raise RecipeError(
                f"line {line}: it has more than {NODE_LIMIT:,} values once its aliases are followed"
            )
        if isinstance(node, yaml.ScalarNode):
            return Node(self._scalar(node, line), line, node.value)
        if node.tag not in _PLAIN_TAGS:
            raise RecipeError(
                f"line {line}: the tag {printable(node.tag)} is not allowed; remove it"
            )
        if id(node) in self._open:
            raise RecipeError(f"line {line}: an alias refers to a value that contains it")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return Node(self._mapping(node), line)
            return Node([self.node(item, line).value for item in node.value], line)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        nodes: dict[str, Node] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise RecipeError(f"line {line}: a key is a {key.id}; it takes a name")
            if not key.value.isprintable():
                raise RecipeError(f"line {line}: the key {printable(key.value)} is not printable")
            if key.value in nodes:
                raise RecipeError(f"line {line}: the key {printable(repr(key.value))} occurs twice")
            nodes[key.value] = self.node(value, line)
        return nodes

    def _scalar(self, node: yaml.ScalarNode, line: int) -> Any:
        if len(node.value) > SCALAR_LIMIT:
            raise RecipeError(
                f"line {line}: a value has {len(node.value):,} characters; at most "
                f"{SCALAR_LIMIT:,} are allowed"
            )
        try:
            value = yaml.SafeLoader("").construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            why = printable(getattr(error, "problem", None) or error, limit=MESSAGE_LIMIT)
            raise RecipeError(f"line {line}: {why}; give plain text or numbers") from None
        if type(value) is int and not _DECIMAL.fullmatch(node.value):
            raise RecipeError(
                f"line {line}: YAML reads {printable(node.value)} as the number {value}; write "
                "decimal digits without a leading zero, or put the text in quotes"
            )
        return value
