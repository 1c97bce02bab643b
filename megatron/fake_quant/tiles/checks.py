"""Refuse formats that attention in tiles cannot compute in the way that a kernel would.

A block of values that share a scale must lie in one tile. A kernel quantizes P and dS when it has
computed a tile of them, and it multiplies whole blocks of K and V. Queries are not cut.
"""

import math
from collections.abc import Iterable, Iterator, Mapping

from megatron.fake_quant import scalings
from megatron.fake_quant.accumulate.accumulator import Accumulator
from megatron.fake_quant.block_scaling import WHOLE_AXIS
from megatron.fake_quant.formats import Format
from megatron.fake_quant.matmul.operand import Operand
from megatron.fake_quant.rounding_modes import EDEN_GROUP
from megatron.fake_quant.tiles.tiling import Tiling

#: Slots whose blocks run along the keys (`_ALONG`), and slots with one row per key, in which a
#: square block spans several keys (`_ACROSS`), by matmul. The other slots have no axis of keys.
_ALONG = {"qk": ("dgrad_c", "dgrad_b"), "pv": ("fprop_a", "fprop_b")}
_ACROSS = {"qk": ("fprop_b", "wgrad_c"), "pv": ("dgrad_b", "wgrad_a")}


def misfits(operation: str, operands: Mapping[str, Operand], tile: int) -> Iterator[str]:
    """Yield a message for each operand whose format does not fit tiles of `tile` keys.

    Args:
        operation: "qk" or "pv".
        operands: operands by slot.
        tile: number of keys per tile.
    """
    for slot, operand in operands.items():
        fmt = operand.format
        if fmt is not None and fmt.amax_source != "own":
            yield (
                f"{slot} has the format {fmt.name}, whose scale comes from a {fmt.amax_source} "
                "amax of whole matrices, and attention in tiles has none; choose the format "
                "without this variant"
            )
        lengths: dict[str, int] = {}
        if slot in _ALONG[operation]:
            lengths = _lengths_along(operand)
        elif slot in _ACROSS[operation] and fmt is not None:
            lengths = {f"blocks of {fmt.height} rows of {fmt.name}": fmt.height}
        for name, length in lengths.items():
            if tile % length:
                yield (
                    f"{slot} has {name} along the keys, which tiles of {tile} keys cut; choose a "
                    f"multiple of {length} keys per tile"
                )


def query_step(
    qk: Mapping[str, Operand], pv: Mapping[str, Operand], units: Iterable[Accumulator] = ()
) -> int | None:
    """Return the smallest common multiple of the block sizes of P and dS along the queries.

    It is also a multiple of the steps, promotion intervals and scale blocks of the accumulators
    that sum over queries.

    The result is None if P or dS depends on all queries, because the mean over the queries is split
    off.

    Args:
        qk: operands of QK^T by slot.
        pv: operands of PV by slot.
        units: simulated accumulators of the gradients of K and V.
    """
    across, along = (qk["dgrad_c"], pv["fprop_a"]), (qk["wgrad_c"], pv["wgrad_a"])
    if any(operand.split != "none" for operand in (*across, *along)):
        return None
    lengths = [operand.format.height for operand in across if operand.format is not None]
    for operand in along:
        lengths += _lengths_along(operand).values()
    for unit in units:
        lengths += [unit.step, unit.promote_every or 1, unit.scale_block or 1]
    return math.lcm(*lengths)


def _lengths_along(operand: Operand) -> dict[str, int]:
    """Return the lengths of blocks and similar groups along the reduction axis, by description."""
    lengths: dict[str, int] = {}
    if operand.hadamard is not None:
        lengths[f"a Hadamard transform of {operand.hadamard.size} values"] = operand.hadamard.size
    fmt = operand.format
    if fmt is None:
        return lengths
    if fmt.block_size not in (None, WHOLE_AXIS):
        lengths[f"blocks of {fmt.block_size} values of {fmt.name}"] = fmt.block_size
    if fmt.outer_size not in (None, WHOLE_AXIS):
        lengths[f"outer scales per {fmt.outer_size} values of {fmt.name}"] = fmt.outer_size
    if fmt.corrects_scales:
        lengths[f"groups of {EDEN_GROUP} values of {fmt.name}"] = EDEN_GROUP
    return lengths


def check_probabilities(tiling: Tiling, probs: Operand, *, unnormalized: bool) -> None:
    """Raise ValueError if the settings of P in the tiles do not fit P's format.

    Args:
        tiling: the settings.
        probs: transform and format of P in the forward pass.
        unnormalized: True if P is quantized before its rows are divided by their sums.
    """
    settings = []
    if tiling.scale is not None:
        settings.append(f"the scale {tiling.scale:g}")
    if tiling.row_sum == "quantized":
        settings.append("the row sum quantized")
    if not settings:
        return
    what = f"{' and '.join(settings)} of probabilities in tiles"
    if not unnormalized:
        raise ValueError(
            f"{what}: for unnormalized probabilities only; make P unnormalized, or remove this "
            "setting"
        )
    if probs.format is None:
        raise ValueError(f"{what} without a format for P; give fprop_a a format")
    if probs.hadamard is not None:
        raise ValueError(
            f"{what} with a Hadamard transform, which changes the signs and sums of values; "
            "remove the transform or this setting"
        )
    largest = _largest(probs.format)
    if tiling.scale is not None and largest is not None and tiling.scale > largest:
        raise ValueError(
            f"the scale {tiling.scale:g} of probabilities takes their largest value, 1, beyond "
            f"the largest number of {probs.format.name}; choose at most {largest:g}"
        )


def _largest(fmt: Format) -> float | None:
    """Return the largest number to which P may be scaled; None if block scales adapt to P."""
    if fmt.has_tensor_scale:
        return scalings.target(fmt)
    return fmt.element.max if fmt.scaling is None else None
