"""Check the types of the settings and counts in a checkpoint before anything uses them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from megatron.bounded_files import printable
from megatron.training.checkpointing.optimizer_state import NUMERIC

_LARGEST = (1 << 53) - 1  #: largest accepted count: the last integer that a float64 counts to
_COUNTS = ("iteration", "consumed_train_samples", "consumed_valid_samples", "skipped_iterations")
_DEPTH = 4  #: levels of nested lists in a setting


def check_common(common: Any) -> dict[str, Any]:
    """Return the content of `common.pt` once its parts have the types that training expects.

    Content without `progress` comes from another program and is left to the caller.

    Raises:
        ValueError: if a part has another type; the message names the part and its value.
    """
    _require(common, "its content", _is_settings, "a dictionary")
    if "progress" not in common:
        return common
    _require(common["progress"], "progress", _is_progress, "a dictionary of counts")
    _require(common.get("args"), "args", _is_plain, "a dictionary of flags")
    for name in ("has_optim", "has_rng"):
        _require(common.get(name), name, lambda value: type(value) is bool, "True or False")
    if "run" in common:
        _require(common["run"], "run", _is_texts, "a dictionary of texts")
    if common["has_optim"]:
        _require(
            common.get("opt_param_scheduler"),
            "opt_param_scheduler",
            _is_schedule,
            "a dictionary of numbers",
        )
        _require(common.get("optimizer", {}), "optimizer", _is_settings_or_parts, "a dictionary")
    return common


def check_groups(groups: list[dict[str, Any]]) -> None:
    """Refuse optimizer settings that are not finite numbers: the first step would fail on them.

    Raises:
        ValueError: if a setting is not a number; the message names it and its value.
    """
    for group in groups:
        for name in NUMERIC:
            if name in group and group[name] is not None:
                _require(group[name], f"the optimizer's {name}", _is_numeric, "a finite number")


def _require(value: Any, name: str, fits: Callable[[Any], bool], wanted: str) -> None:
    if not fits(value):
        shown = f"of type {type(value).__name__}"
        if isinstance(value, (bool, float, str)) or _is_count(value):
            shown = printable(repr(value), limit=60)
        raise ValueError(f"{name} is {shown}, not {wanted}")


def _is_settings(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_settings_or_parts(value: Any) -> bool:
    """Return whether `value` is a dictionary; chained optimizers number their states."""
    return isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value)


def _is_texts(value: Any) -> bool:
    return _is_settings(value) and all(isinstance(text, str) for text in value.values())


def _is_progress(value: Any) -> bool:
    """Return whether the counts are valid; `checked_levels` checks the levels of the losses."""
    return _is_settings(value) and all(_is_count(value.get(name, 0)) for name in _COUNTS)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_schedule(value: Any) -> bool:
    if not _is_settings(value) or not _is_count(value.get("num_steps")):
        return False
    return all(v is None or isinstance(v, str) or _is_number(v) for v in value.values())


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) <= _LARGEST
    return isinstance(value, float) and math.isfinite(value)


def _is_numeric(value: Any) -> bool:
    """Return whether `value` is a number or a short list of numbers, such as Adam's betas."""
    if isinstance(value, (list, tuple)):
        return len(value) <= _DEPTH and all(map(_is_number, value))
    return _is_number(value)


def _is_plain(value: Any) -> bool:
    return _is_settings(value) and all(_is_setting(v, _DEPTH) for v in value.values())


def _is_setting(value: Any, depth: int) -> bool:
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_setting(item, depth - 1) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
