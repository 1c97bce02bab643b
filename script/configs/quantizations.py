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
    return "no quantization" if name in ("bf16", "none") else f"{name} in {where}"


def accepted() -> dict[str, str]:
    """Every name that a user can give, in words: those of the matrix, and each of its formats
    alone, which is everywhere.
    """
    formats = [split(each)[1] for each in QUANTIZATIONS]
    names = dict.fromkeys([*QUANTIZATIONS, *formats, "none", AS_SET])
    return {name: describe(name) for name in names}
