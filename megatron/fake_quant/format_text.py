"""Convert a `Format` to a string and back, so that a traced graph can pass it to operators.

Operators of `torch.library` take tensors, numbers and strings. A format that `get_format` returns
for its name is written as this name. Any other format, built from `Format` itself, is written as
JSON with all of its fields. The string alone is enough to rebuild the format, so that an exported
program can be loaded by another process.
"""

import dataclasses
import functools
import json
from typing import Any, get_args

import torch

from megatron.fake_quant.elements import Cast, Element
from megatron.fake_quant.formats import Format, Scaling
from megatron.fake_quant.names import get_format

#: Names of the fields that define an element type or a scaling, by its class.
_FIELDS: dict[type, tuple[str, ...]] = {
    part: tuple(field.name for field in dataclasses.fields(part) if field.init)
    for part in (*get_args(Element), *get_args(Scaling))
}
_CLASSES = {part.__name__: part for part in _FIELDS}


def to_text(fmt: Format) -> str:
    """Return a string from which `from_text` rebuilds an equal format.

    Only plain string operations are used, because torch.compile cannot trace the json module.
    """
    if fmt.known_name is not None:
        return fmt.known_name
    # torch.compile does not guard all fields of formats that it only compares, so it would use the
    # compiled code for different formats, too.
    if not torch.compiler.is_dynamo_compiling():
        try:
            if get_format(fmt.name) == fmt:
                return fmt.name
        except ValueError:
            pass  # The name is user-defined, and `get_format` does not accept it.
    parts = f'"element": {_packed(fmt.element)}, "scaling": {_packed(fmt.scaling)}'
    more = f'"square_weights": {_value(fmt.square_weights)}'
    return f'{{"name": {_value(fmt.name)}, "rounding": {_value(fmt.rounding)}, {more}, {parts}}}'


@functools.lru_cache(maxsize=1 << 10)
def from_text(text: str) -> Format:
    """Return the format from which `to_text` made the string `text`.

    Raises:
        ValueError: if the text is neither a format's name nor a description in JSON.
    """
    if not text.startswith("{"):
        return get_format(text)
    try:
        fields = json.loads(text, strict=False)
        parts = {name: _unpacked(fields.pop(name)) for name in ("element", "scaling")}
        return Format(**fields, **parts)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{text[:80]!r} does not describe a format ({error}); export the program again"
        ) from None


def _packed(part: Any) -> str:
    if part is None:
        return "null"
    pairs = [f'"class": "{type(part).__name__}"']
    for field in _FIELDS[type(part)]:
        value = getattr(part, field)
        value = part.name if isinstance(value, torch.dtype) else value
        pairs.append(f'"{field}": {_value(value)}')
    return "{" + ", ".join(pairs) + "}"


def _value(value: str | bool | int | float | None) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def _unpacked(fields: dict[str, Any] | None) -> Any:
    if fields is None:
        return None
    part = _CLASSES[fields.pop("class")]
    if part is Cast:
        dtype = getattr(torch, str(fields["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{fields['dtype']!r} is not a dtype")
        return Cast(dtype)
    return part(**fields)
