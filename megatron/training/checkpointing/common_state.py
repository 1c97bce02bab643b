"""Read and check `common.pt`, which holds the state that a checkpoint stores once for all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.bounded_files import MEBIBYTE, UnusableFileError, printable, read_bytes
from megatron.training.checkpointing import checked_archive
from megatron.training.checkpointing.files import COMMON
from megatron.training.checkpointing.index import DamagedError
from megatron.training.checkpointing.optimizer_state import NUMERIC

COMMON_LIMIT = (
    256 * MEBIBYTE
)  #: maximum size of `common.pt`, in bytes; its usual size is a few kilobytes
#: largest accepted integer; float64 can represent every integer up to this value
_LARGEST = (1 << 53) - 1
_COUNTS = ("iteration", "consumed_train_samples", "consumed_valid_samples", "skipped_iterations")
_DEPTH = 4  #: maximum nesting depth of lists in a setting, and maximum length of a list of numbers


def read_common(folder: str | Path) -> Any:
    """Return the content of `common.pt`, without checking the types of its entries.

    Raises:
        DamagedError: if the file cannot be used; the message names the file and the reason.
    """
    path = Path(folder, COMMON)
    try:
        return checked_archive.load(read_bytes(path, limit=COMMON_LIMIT))
    except FileNotFoundError:
        raise DamagedError(f"{path} does not exist") from None
    except UnusableFileError as error:
        raise DamagedError(str(error)) from None
    except ValueError as error:
        raise DamagedError(f"{path}: {printable(error, limit=300)}") from None


def check_common(common: Any) -> dict[str, Any]:
    """Check the types of the entries of `common.pt`, and return them unchanged.

    Content without `progress` was written by another program. It is returned without further
    checks, and the caller raises an error.

    Raises:
        ValueError: if an entry has the wrong type; the message names the entry and its value.
    """
    _require(common, "its content", _is_settings, "a dictionary")
    if "progress" not in common:
        return common
    _require(common["progress"], "progress", _is_progress, "a dictionary of counts")
    _require(common.get("args"), "args", _is_plain, "a dictionary of flags")
    for name in ("has_optim", "has_rng"):
        _require(common.get(name), name, lambda value: type(value) is bool, "True or False")
    _require(common.get("run"), "run", _is_texts, "a dictionary of strings")
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
    """Check that the optimizer's numeric settings are finite; otherwise the first step would fail.

    Raises:
        ValueError: if a setting is not a finite number; the message names the setting and its
            value.
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
    """Return whether `value` is a dictionary whose keys are strings or integers.

    Chained optimizers use integers as the keys of their states.
    """
    return isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value)


def _is_texts(value: Any) -> bool:
    return _is_settings(value) and all(isinstance(text, str) for text in value.values())


def _is_progress(value: Any) -> bool:
    """Return whether `value` holds the progress of a run, with valid counts.

    The recent losses and gradient norms in it are checked by `checked_levels` instead.
    """
    if not _is_settings(value) or value.keys() != {*_COUNTS, "levels"}:
        return False
    return all(_is_count(value[name]) for name in _COUNTS)


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
    """Return whether `value` is a finite number, or a short list of such numbers (Adam's betas)."""
    if isinstance(value, (list, tuple)):
        return len(value) <= _DEPTH and all(map(_is_number, value))
    return _is_number(value)


def _is_plain(value: Any) -> bool:
    return _is_settings(value) and all(_is_setting(v, _DEPTH) for v in value.values())


def _is_setting(value: Any, depth: int) -> bool:
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_setting(item, depth - 1) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
