"""Parse quantization types such as `FA_mxfp8`, which consist of a prefix and a format.

`mxfp8` applies to all matmuls (linear, QK^T and PV), `linear_mxfp8` to the linear layers,
`FA_mxfp8` to QK^T, and `FA_linear_mxfp8` to both; `bf16` and `none` quantize nothing. Upper and
lower case are equivalent.
"""

from dataclasses import replace

from megatron.console import did_you_mean
from megatron.fake_quant.formats import FORMATS, Format
from megatron.fake_quant.matmul.gemm_formats import GemmFormats
from megatron.fake_quant.matmul.operand import Operand
from megatron.fake_quant.names import UnknownFormatError, get_format

OPERATIONS = ("linear", "qk", "pv")
DEFAULT_TYPE = "bf16"
UNQUANTIZED = ("bf16", "none")  #: names that leave a matmul unquantized

PREFIXES = {  # longest first: `FA_linear_` also starts with `FA_`
    "FA_linear_": ("linear", "qk"),
    "FA_": ("qk",),
    "linear_": ("linear",),
    "": OPERATIONS,
}


def parse_format(name: str) -> Format | None:
    """Return the format with the given name, or None for a name in `UNQUANTIZED`.

    Raises:
        ValueError: if there is no such format; the message lists the known ones.
    """
    return None if name.lower() in UNQUANTIZED else get_format(name)


def weight_format(fmt: Format | None) -> Format | None:
    """Return the format of a linear layer's weight in a quantization type with `fmt`.

    It is the same format, with square blocks if `fmt` has square blocks for weights.
    """
    if fmt is None or not fmt.square_weights or fmt.height > 1:
        return fmt
    return get_format(f"{fmt.name}:2d")


def gemm_formats(operation: str, fmt: Format) -> GemmFormats:
    """Return the formats of an operation's six operands in a quantization type with `fmt`."""
    formats = GemmFormats.uniform(fmt)
    if operation != "linear":
        return formats
    weight = Operand(weight_format(fmt))
    return replace(formats, fprop_b=weight, dgrad_b=weight)


def split_type(name: str) -> tuple[str, str]:
    """Split a quantization type into a prefix, spelled as in `PREFIXES`, and a format's name."""
    prefix = next(prefix for prefix in PREFIXES if name.lower().startswith(prefix.lower()))
    return prefix, name[len(prefix) :]


def parse_type(name: str) -> dict[str, Format | None]:
    """Return the format that a quantization type sets for each operation (linear, qk and pv).

    Raises:
        ValueError: if there is no such quantization type.
    """
    prefix, format_name = split_type(name)
    try:
        fmt = parse_format(format_name)
    except UnknownFormatError:
        known = [f"{place}{known}" for place in PREFIXES for known in FORMATS]
        meant = did_you_mean(name, known) or ";"
        raise ValueError(
            f"unknown quantization type {name!r}{meant} give a format, or linear_, FA_ or "
            f"FA_linear_ before a format; formats: none, {', '.join(sorted(FORMATS))}, or spelled "
            "out as in mx:e3m4:b16:rceil or nv:e2m1:b16:e4m3"
        ) from None
    return {op: fmt if op in PREFIXES[prefix] else None for op in OPERATIONS}
