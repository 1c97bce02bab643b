"""Define what a study of loss gaps trains: quantization types and recipes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.analysis.study.candidates import candidates_of
from megatron.fake_quant.names import get_format
from megatron.fake_quant.quant_type import DEFAULT_TYPE, UNQUANTIZED, parse_type, split_type

BASELINE = DEFAULT_TYPE  #: configuration from which all gaps are measured


@dataclass(frozen=True)
class Configuration:
    """Formats of all matmuls of a run, as a quantization type or as a recipe."""

    name: str
    #: recipe file, which only the offline study uses if `is_type`; None for a type without a prefix
    recipe: Path | None = None
    is_type: bool = True  #: True if `name` is a quantization type

    @property
    def flags(self) -> list[str]:
        """Flags of `pretrain_gpt.py` that set the formats."""
        if self.is_type:
            return ["--custom-quant-type", self.name]
        return ["--quant-recipe", str(self.recipe)]

    @property
    def digest(self) -> str:
        """Hash of the content of the recipe to train with; empty if training uses no recipe."""
        if self.is_type or self.recipe is None:
            return ""
        return hashlib.sha256(self.recipe.read_bytes()).hexdigest()[:12]

    @property
    def file_name(self) -> str:
        """Name in a form that is safe in file names."""
        return self.name.replace(":", "-").replace("/", "-")


def configurations_of(
    formats: Sequence[str], recipes: Sequence[Path], folder: Path
) -> list[Configuration]:
    """Return the configurations to train besides the baseline, without duplicates.

    A type with a prefix, such as `linear_mxfp4`, also gets a recipe, because the offline study
    supports only formats and recipes.

    Args:
        formats: quantization types.
        recipes: recipe files.
        folder: folder in which to write recipes for types with a prefix.

    Raises:
        ValueError: if a type is unknown, a recipe is invalid or in `folder`, two configurations
            share a name, or none is left.
    """
    configurations: dict[str, Configuration] = {}
    for given in formats:
        parse_type(given)
        prefix, name = split_type(given)
        if name.lower() in UNQUANTIZED:
            continue
        name = prefix + get_format(name).name
        configuration = Configuration(name)
        if prefix:
            configuration = Configuration(name, folder / f"{configuration.file_name}.yaml")
        configurations[name] = configuration
    plain = [each.name for each in configurations.values() if each.recipe is None]
    if plain or recipes:
        candidates_of(plain, recipes)
    for path in dict.fromkeys(recipe.resolve() for recipe in recipes):
        if path.parent == folder.resolve():
            raise ValueError(
                f"the study writes its own recipes to {folder} and would overwrite {path.name}; "
                "copy this recipe to another folder under another name"
            )
        if Configuration(path.stem).file_name in {
            BASELINE,
            *(each.file_name for each in configurations.values()),
        }:
            raise ValueError(
                f"two configurations are named {path.stem!r}; a recipe has the name of its file, "
                f"so rename {path}"
            )
        configurations[path.stem] = Configuration(path.stem, path, is_type=False)
    if not configurations:
        raise ValueError(
            f"nothing to compare, because every study trains {BASELINE}; give other --formats, "
            "--recipes or both"
        )
    for each in configurations.values():
        if each.recipe is not None and each.is_type:
            write_recipe(each.recipe, type_recipe(each.name))
    return list(configurations.values())


def type_recipe(quant_type: str) -> str:
    """Return a recipe that applies a quantization type to all modules."""
    return (
        f"description: {json.dumps(f'The quantization type {quant_type} in all modules')}\n"
        "configs: {}\n"
        f'matchers:\n  all: {{config: "{quant_type}", type: glob, pattern: "*", enabled: true}}\n'
    )


def write_recipe(path: Path, text: str) -> None:
    """Write a recipe, unless the file has this content already."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
