"""Define the quantization types of the experiment matrix: the format, and where it applies.

The names are quantization types of `megatron.fake_quant`, which training accepts. To add types, add
a line to `QUANTIZATIONS`: a single type (`"FA_nvfp4"`), or a format with all three prefixes
(`*places("nvfp4")`). Then run `script/train_config.py --write-scripts`.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Prefixes of quantization types, and the matmuls to which each prefix applies the format.
PLACES: Mapping[str, str] = {
    "FA_linear_": "Q K^T and linear layers",
    "FA_": "Q K^T",
    "linear_": "linear layers",
}
EVERYWHERE = "linear layers, Q K^T and P V"


def places(name: str) -> list[str]:
    """Return the quantization types of format `name` with prefixes FA_, linear_ and FA_linear_."""
    return [f"FA_{name}", f"linear_{name}", f"FA_linear_{name}"]


#: Quantization types in the experiment matrix; each type has one script per model and dataset.
QUANTIZATIONS: tuple[str, ...] = (
    "bf16",
    *places("mxfp8"),
    *places("mxfp4"),
    *places("hifp8"),
)

UNQUANTIZED = ("bf16", "none")

#: Accepted name for which no format flag is passed to training, so that the environment and the
#: settings file determine the formats.
AS_SET = "settings"


def split(quantization: str) -> tuple[str, str]:
    """Return two strings: which matmuls a quantization type quantizes, and to which format."""
    for prefix, where in PLACES.items():
        if quantization.startswith(prefix):
            return where, quantization.removeprefix(prefix)
    return EVERYWHERE, quantization


def describe(quantization: str) -> str:
    """Return a description of a quantization type."""
    where, name = split(quantization)
    if quantization == AS_SET:
        return "what the environment and script/quant_type_modifier.py have set"
    return "no quantization" if name in UNQUANTIZED else f"{name} in {where}"


def formats() -> list[str]:
    """Return the names of the formats in the experiment matrix, except bf16."""
    names = dict.fromkeys(split(quantization)[1] for quantization in QUANTIZATIONS)
    return [name for name in names if name not in UNQUANTIZED]


def accepted() -> dict[str, str]:
    """Return the accepted names of quantization types, each with a description.

    They are the types in the matrix, each of its formats without a prefix, `none` and `settings`.
    """
    names = dict.fromkeys([*QUANTIZATIONS, *formats(), "none", AS_SET])
    return {name: describe(name) for name in names}


def plain_type(name: str) -> str | None:
    """Return the canonical name of an accepted type except `settings`; case does not matter.

    Return None for all other types: only `megatron.fake_quant`, which needs torch, resolves them.
    """
    spellings = {each.lower(): each for each in accepted() if each not in (*UNQUANTIZED, AS_SET)}
    return (spellings | dict.fromkeys(UNQUANTIZED, UNQUANTIZED[0])).get(name.lower())


def attention_choices() -> dict[str, dict[str, str]]:
    """Return the formats of Q K^T (qk) and P V (pv) for each value of --fa-quantization."""
    choices: dict[str, dict[str, str]] = {"none": {}}
    for name in formats():
        choices |= {
            f"qk_{name}": {"qk": name},
            f"pv_{name}": {"pv": name},
            f"qk_pv_{name}": {"qk": name, "pv": name},
        }
    return choices
