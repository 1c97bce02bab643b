"""The quantizations: which matmuls of the linear layers and of attention run in which format.

A name is a quantization type of `megatron.fake_quant`, which is what training is told. To add one,
add a line to `QUANTIZATIONS`: a type (`"FA_nvfp4"`), or a format in all its three places
(`*places("nvfp4")`); then run `script/train_config.py --write-scripts`.
"""

from __future__ import annotations

from collections.abc import Mapping

#: What stands before a format's name, and where the format then applies.
PLACES: Mapping[str, str] = {
    "FA_linear_": "Q K^T and linear layers",
    "FA_": "Q K^T",
    "linear_": "linear layers",
}
EVERYWHERE = "linear layers, Q K^T and P V"


def places(name: str) -> list[str]:
    """The types of a format that have scripts."""
    return [f"FA_{name}", f"linear_{name}", f"FA_linear_{name}"]


#: Those of the matrix: each has a script for each model and dataset.
QUANTIZATIONS: tuple[str, ...] = (
    "bf16",
    *places("mxfp8"),
    *places("mxfp4"),
    *places("hifp8"),
)

UNQUANTIZED = ("bf16", "none")

#: Not a type: no flag is given, so that environment and settings file decide.
AS_SET = "settings"


def split(quantization: str) -> tuple[str, str]:
    """Where a type applies, and its format."""
    for prefix, where in PLACES.items():
        if quantization.startswith(prefix):
            return where, quantization.removeprefix(prefix)
    return EVERYWHERE, quantization


def describe(quantization: str) -> str:
    """A type in words."""
    where, name = split(quantization)
    if quantization == AS_SET:
        return "what the environment and script/quant_type_modifier.py have set"
    return "no quantization" if name in UNQUANTIZED else f"{name} in {where}"


def formats() -> list[str]:
    """The formats that the matrix has."""
    names = dict.fromkeys(split(each)[1] for each in QUANTIZATIONS)
    return [name for name in names if name not in UNQUANTIZED]


def accepted() -> dict[str, str]:
    """Every name that a user can give, in words: those of the matrix, and each of its formats
    alone, which is everywhere.
    """
    names = dict.fromkeys([*QUANTIZATIONS, *formats(), "none", AS_SET])
    return {name: describe(name) for name in names}


def attention_choices() -> dict[str, dict[str, str]]:
    """The formats of Q K^T (qk) and P V (pv), by the name that flash_attention_config.py takes."""
    choices: dict[str, dict[str, str]] = {"none": {}}
    for name in formats():
        choices |= {
            f"qk_{name}": {"qk": name},
            f"pv_{name}": {"pv": name},
            f"qk_pv_{name}": {"qk": name, "pv": name},
        }
    return choices
