"""YAML with line numbers, so that an error in a recipe says where it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


class RecipeError(ValueError):
    """Something in a recipe that is not as it must be; says the line."""


@dataclass(frozen=True, slots=True)
class Node:
    """A scalar, or a mapping whose values are nodes; and the line that it begins on, from 1."""

    value: Any
    line: int

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def items(self) -> Iterator[tuple[str, "Node"]]:
        """Keys and nodes of a mapping."""
        assert isinstance(self.value, dict)
        yield from self.value.items()

    def error(self, message: str) -> RecipeError:
        """To be raised for what is wrong here."""
        return RecipeError(f"line {self.line}: {message}")

    def only_keys(self, what: str, accepted: Sequence[str]) -> None:
        """Refuse anything but a mapping with these keys."""
        if not isinstance(self.value, dict):
            raise self.error(f"{what} is {self.value!r}; it takes {', '.join(accepted)}")
        for key, node in self.items():
            if key not in accepted:
                raise node.error(f"{what} has the key {key!r}; it takes {', '.join(accepted)}")

    def mapping(self, key: str, what: str) -> "Node":
        """The mapping under `key`; an empty one where there is none."""
        node: Node = self.value.get(key, Node({}, self.line))
        if node.value is None:
            return Node({}, node.line)
        if not isinstance(node.value, dict):
            raise node.error(
                f"{key} of {what} is {node.value!r}; it takes names and their settings"
            )
        return node

    def scalar(self, key: str, what: str) -> Any:
        """The scalar under `key`, which must be there."""
        if key not in self:
            raise self.error(f"{what} has no {key}; add it")
        node: Node = self.value[key]
        if isinstance(node.value, dict):
            raise node.error(f"{key} of {what} is a mapping; it takes one value")
        if node.value is None:
            raise node.error(f"{key} of {what} is empty; give a value, or remove it")
        return node.value


def load_yaml(path: Path) -> Node:
    """Read a YAML file whose root is a mapping.

    Raises:
        RecipeError: it cannot be read, is no YAML, or has a key twice.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise RecipeError(f"it cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"it is not YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise RecipeError("line 1: it takes configs: and matchers:")
    return _node(root, root.start_mark.line + 1)


def _node(node: yaml.Node, line: int) -> Node:
    if not isinstance(node, yaml.MappingNode):
        value = yaml.SafeLoader("").construct_object(node, deep=True)
        return Node(value, line)
    found: dict[str, Node] = {}
    for key, value in node.value:
        key_line = key.start_mark.line + 1
        if key.value in found:
            raise RecipeError(f"line {key_line}: the key {key.value!r} is there twice")
        found[key.value] = _node(value, key_line)
    return Node(found, line)
