"""Quantization types: a format's name, and before it where it applies.

`mxfp8` is for all matmuls (linear, QK^T and PV), `linear_mxfp8` for the linear layers, `FA_mxfp8`
for QK^T, `FA_linear_mxfp8` for both; `bf16` and `none` quantize nothing. Upper and lower case are
not distinguished.
"""

from megatron.console import did_you_mean
from megatron.fake_quant.formats import FORMATS, Format
from megatron.fake_quant.names import get_format

OPERATIONS = ("linear", "qk", "pv")
DEFAULT_TYPE = "bf16"
UNQUANTIZED = ("bf16", "none")  #: types that quantize nothing

PREFIXES = {  # longest first: `FA_linear_` also starts with `FA_`
    "FA_linear_": ("linear", "qk"),
    "FA_": ("qk",),
    "linear_": ("linear",),
    "": OPERATIONS,
}


def parse_format(name: str) -> Format | None:
    """A format's name, or one of `UNQUANTIZED`.

    Raises:
        ValueError: no such format; the message lists the known ones.
    """
    return None if name.lower() in UNQUANTIZED else get_format(name)


def parse_type(name: str) -> dict[str, Format | None]:
    """The format of each operation that the quantization type `name` asks for.

    Raises:
        ValueError: no such type.
    """
    prefix = next(prefix for prefix in PREFIXES if name.lower().startswith(prefix.lower()))
    try:
        fmt = parse_format(name[len(prefix) :])
    except ValueError:
        known = [f"{place}{each}" for place in PREFIXES for each in FORMATS]
        meant = did_you_mean(name, known) or ";"
        raise ValueError(
            f"unknown quantization type {name!r}{meant} give a format, or linear_, FA_ or "
            f"FA_linear_ before a format; formats: none, {', '.join(sorted(FORMATS))}, or spelled "
            "out as in mx:e3m4:b16:rceil"
        ) from None
    return {op: fmt if op in PREFIXES[prefix] else None for op in OPERATIONS}
