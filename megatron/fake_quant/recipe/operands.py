"""Parse the configs of a recipe, which set the Hadamard transform and format of each operand.

The value of an operation (`linear`, `qk`, `pv`) is a format for all six operands, or a mapping with

    format         default format of all operands
    backward       default format in the backward pass; bf16 makes it straight-through
    accumulate     accumulator of all three GEMMs; see `accumulate/names.py`
    probabilities  for pv: normalized (default) or unnormalized, as in a flash-attention kernel
    tile, order, scale, row_sum
                   for pv: compute attention in tiles; see `tiles/tiling.py`
    a GEMM's name  a format, or a mapping with its two operands, `format`, `hadamard` and
                   `accumulate` as keys

The value of an operand is a format, or a mapping with

    format         format of the operand
    source         original (default), or dequantized: the values that the forward pass multiplied
    split          none (default), or mean: the mean over tokens is multiplied separately

`GEMMS` lists the GEMMs and their operands in the order of `GemmFormats`.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from megatron.fake_quant.accumulate.accumulator import Accumulator
from megatron.fake_quant.accumulate.names import get_accumulator
from megatron.fake_quant.formats import Format
from megatron.fake_quant.matmul.gemm_formats import (
    ACCUMULATOR_FIELDS,
    GEMM_SLOTS,
    SLOTS,
    GemmFormats,
)
from megatron.fake_quant.matmul.hadamard import Hadamard
from megatron.fake_quant.matmul.operand import AS_IT_IS, SOURCES, SPLITS, Operand
from megatron.fake_quant.quant_type import (
    OPERATIONS,
    gemm_formats,
    parse_format,
    parse_type,
    weight_format,
)
from megatron.fake_quant.recipe.yaml_nodes import Node
from megatron.fake_quant.tiles.checks import misfits
from megatron.fake_quant.tiles.tiling import Tiling

#: Formats of a layer's matmuls, by operation; the value None means high precision.
Config = Mapping[str, GemmFormats | None]

GEMMS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "linear": {
        "fprop": ("input", "weight"),
        "dgrad": ("grad_output", "weight"),
        "wgrad": ("grad_output", "input"),
    },
    "qk": {
        "fprop": ("query", "key"),
        "grad_query": ("grad_scores", "key"),
        "grad_key": ("grad_scores", "query"),
    },
    "pv": {
        "fprop": ("probs", "value"),
        "grad_probs": ("grad_output", "value"),
        "grad_value": ("grad_output", "probs"),
    },
}
#: Operands whose rows are not tokens: a weight, and V, which enters the matmul as V^T.
_NO_TOKENS = ("weight", "value")
_PROBABILITIES = ("normalized", "unnormalized")
_TILING = tuple(field.name for field in fields(Tiling))
_Text = TypeVar("_Text", bound=str)


def parse_config(node: Node, what: str) -> Config:
    """Parse a recipe's config, which may be a quantization type; return the formats by operation.

    Raises:
        RecipeError: if a key or a format is unknown; the message names the line and the accepted
            values.
    """
    if node.value is None or node.value in ("", [], {}):
        raise node.error(
            f"{what} is empty; give {', '.join(OPERATIONS)}, or a quantization type (bf16 for none)"
        )
    if not isinstance(node.value, dict):
        text = node.format_text(what)
        try:
            of_type = parse_type(text)
        except ValueError as error:
            raise node.error(f"{what}: {error}") from None
        return {
            operation: None if fmt is None else gemm_formats(operation, fmt)
            for operation, fmt in of_type.items()
        }
    node.only_keys(what, OPERATIONS)
    config = {
        operation: (
            _operation(node.value[operation], operation, f"{operation} of {what}")
            if operation in node
            else None
        )
        for operation in OPERATIONS
    }
    _check_tiles(config, node, what)
    return config


def _check_tiles(config: Config, node: Node, what: str) -> None:
    """Raise RecipeError if the config computes attention in tiles that cut the blocks of formats.

    Raises:
        RecipeError: if there is such a format; the message names its operand.
    """
    pv = config["pv"]
    if pv is None or pv.tiling is None:
        return
    for operation in ("qk", "pv"):
        formats = config[operation]
        if formats is None:
            continue
        operands = {slot: getattr(formats, slot) for slot in SLOTS}
        for message in misfits(operation, operands, pv.tiling.tile):
            named = _with_names(message, GEMMS[operation])
            raise node.value[operation].error(f"{operation} of {what}: {named}")


def _format(node: Node, what: str) -> Format | None:
    if node.value is None:
        raise node.error(f"{what} is empty; give a format, such as mxfp8, or bf16 for none")
    text = node.format_text(what)
    try:
        return parse_format(text)
    except ValueError as error:
        raise node.error(f"{what}: {error}") from None


def _operation(node: Node, operation: str, what: str) -> GemmFormats | None:
    if not isinstance(node.value, dict):
        fmt = _format(node, what)
        return None if fmt is None else gemm_formats(operation, fmt)
    if not node.value:
        raise node.error(f"{what} is empty; give a format, such as mxfp8, or its GEMMs")
    gemms = GEMMS[operation]
    own = ("probabilities", *_TILING) if operation == "pv" else ()
    node.only_keys(what, ("format", "backward", *own, *gemms, "accumulate"))
    default = _format(node.value["format"], f"format of {what}") if "format" in node else None
    backward, straight_through = default, False
    if "backward" in node:
        backward = _format(node.value["backward"], f"backward of {what}")
        straight_through = backward is None
    operands: dict[str, Operand] = {}
    for index, (gemm, names) in enumerate(gemms.items()):
        fallback = default if index == 0 else backward
        pair = _gemm(node.value.get(gemm), names, fallback, f"{gemm} of {what}")
        operands.update(zip(SLOTS[2 * index : 2 * index + 2], pair, strict=True))
    unnormalized = _choice(node, "probabilities", what, _PROBABILITIES) == "unnormalized"
    tiling = _tiling(node, what)
    if tiling is not None and "probabilities" not in node:
        unnormalized = True  # as in the kernels that run in tiles
    elif unnormalized and operands["fprop_a"] == AS_IT_IS:
        raise node.value["probabilities"].error(
            f"`probabilities: unnormalized` of {what} needs a format for P; set `format` or "
            "`fprop`, or remove `probabilities`"
        )
    accumulators = _accumulators(node, gemms, what)
    simulated = any(accumulator.simulated for accumulator in accumulators.values())
    plain = tiling is None and not simulated
    if plain and all(operand == AS_IT_IS for operand in operands.values()):
        return None
    settings: dict[str, Any] = {**operands, **accumulators}
    try:
        return GemmFormats(
            **settings,
            straight_through=straight_through,
            unnormalized=unnormalized,
            tiling=tiling,
        )
    except ValueError as error:
        raise node.error(f"{what}: {_with_names(str(error), gemms)}") from None


def _tiling(node: Node, what: str) -> Tiling | None:
    """Return the tiles in which attention is computed; None if no key of the node sets any."""
    settings = {key: node.scalar(key, what) for key in _TILING if key in node}
    tiling = Tiling()
    for key, value in settings.items():  # one by one, so that an error names the line
        try:
            tiling = replace(tiling, **{key: value})
        except ValueError as error:
            raise node.value[key].error(f"{what}: {error}") from None
    return tiling if settings else None


def _accumulators(
    node: Node, gemms: Mapping[str, tuple[str, str]], what: str
) -> dict[str, Accumulator]:
    """Return the accumulators that an operation sets for its GEMMs, by field of `GemmFormats`."""
    accumulators = {}
    for field, gemm in zip(ACCUMULATOR_FIELDS, gemms, strict=True):
        own = node.value.get(gemm)
        for place, name in ((own, f"{gemm} of {what}"), (node, what)):
            if place is None or not isinstance(place.value, dict) or "accumulate" not in place:
                continue
            try:
                accumulators[field] = get_accumulator(place.text_of("accumulate", name))
            except ValueError as error:
                raise place.value["accumulate"].error(f"{name}: {error}") from None
            break
    return accumulators


def accumulated_operations(config: Node) -> frozenset[str]:
    """Return the operations for which a valid config has the key `accumulate`."""
    if not isinstance(config.value, dict):
        return frozenset()
    return frozenset(
        operation
        for operation, node in config.items()
        if isinstance(node.value, dict)
        and ("accumulate" in node or any("accumulate" in gemm for _, gemm in node.items()))
    )


def _with_names(message: str, gemms: Mapping[str, tuple[str, str]]) -> str:
    """Return an error message of `GemmFormats` with the recipe's names of operands and GEMMs."""
    names = [f"{name} of {gemm}" for gemm, pair in gemms.items() for name in pair]
    for slot, name in zip(SLOTS, names, strict=True):
        message = message.replace(slot, name)
    for gemm, name in zip(GEMM_SLOTS, gemms, strict=True):
        message = re.sub(rf"\b{gemm}\b", name, message)
    return message


def _gemm(
    node: Node | None, names: tuple[str, str], default: Format | None, what: str
) -> tuple[Operand, Operand]:
    if node is None:
        return _pair(default, names)
    if not isinstance(node.value, dict):
        return _pair(_format(node, what), names)
    if not node.value:
        raise node.error(f"{what} is empty; give a format, or its operands {' and '.join(names)}")
    accepted = (*names, "format", "hadamard", "accumulate")
    for key, child in node.items():
        if key not in accepted:
            near = difflib.get_close_matches(key, accepted, n=1)
            meant = f", did you mean {near[0]}?" if near else ";"
            raise child.error(
                f"{what} has no operand {key!r}{meant} it takes {', '.join(accepted)}"
            )
    if "format" in node:
        default = _format(node.value["format"], f"format of {what}")
    hadamard = _hadamard(node.value["hadamard"], what) if "hadamard" in node else None
    first, second = (
        _operand(node.value.get(name), operand.format, hadamard, f"{name} of {what}")
        for name, operand in zip(names, _pair(default, names), strict=True)
    )
    return first, second


def _pair(fmt: Format | None, names: tuple[str, str]) -> tuple[Operand, Operand]:
    """Return the two operands of a GEMM, given one format that is set for both."""
    first, second = (Operand(weight_format(fmt) if name == "weight" else fmt) for name in names)
    return first, second


def _operand(
    node: Node | None, default: Format | None, hadamard: Hadamard | None, what: str
) -> Operand:
    """Parse an operand, such as `mxfp8` or `{format: mxfp8, source: dequantized}`."""
    if node is None:
        return Operand(default, hadamard)
    if not isinstance(node.value, dict):
        return Operand(_format(node, what), hadamard)
    if not node.value:
        raise node.error(f"{what} is empty; give a format, or a mapping with format")
    node.only_keys(what, ("format", "source", "split"))
    if "format" in node:
        default = _format(node.value["format"], f"format of {what}")
    source = _choice(node, "source", what, SOURCES)
    split = _choice(node, "split", what, SPLITS)
    if split != "none" and what.startswith(_NO_TOKENS):
        raise node.value["split"].error(
            f"split of {what} is {split}, which is the mean over tokens, and the rows of this "
            "operand are not tokens; remove the split"
        )
    try:
        return Operand(default, hadamard, source, split)
    except ValueError as error:
        raise node.error(f"{what}: {error}") from None


def _choice(node: Node, key: str, what: str, choices: Sequence[_Text]) -> _Text:
    """Return the value under `key`, which must be one of `choices`; the first is the default."""
    if key not in node:
        return choices[0]
    chosen = node.scalar(key, what)
    for choice in choices:
        if chosen == choice:
            return choice
    raise node.value[key].error(f"{key} of {what} is {chosen!r}; choose {' or '.join(choices)}")


def _hadamard(node: Node, what: str) -> Hadamard:
    """Parse a Hadamard transform: `hadamard: 16` or `hadamard: {size: 16, signs: nvfp4}`."""
    what = f"hadamard of {what}"
    size, signs = node.value, "none"
    if isinstance(node.value, dict):
        node.only_keys(what, ("size", "signs"))
        size = node.scalar("size", what)
        signs = node.scalar("signs", what) if "signs" in node else "none"
    if not isinstance(size, int) or isinstance(size, bool):
        raise node.error(f"{what} has the size {size!r}; give a power of two, such as 16")
    try:
        return Hadamard(size, signs)  # type: ignore[arg-type]
    except ValueError as error:
        raise node.error(f"{what}: {error}") from None
