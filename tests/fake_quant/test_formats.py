"""The registry of formats, and names that spell a format out."""

import ast
import math
import pickle
import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch

import megatron.fake_quant
from megatron.fake_quant import FORMATS, Format, get_format
from megatron.fake_quant.block_scaling import BlockScaling
from megatron.fake_quant.elements import E2M1, E4M3, ELEMENTS, Cast, ElementFormat, HiFloat8
from megatron.fake_quant.formats import OCP
from megatron.fake_quant.names import get_element

FOLDER = Path(megatron.fake_quant.__file__).parent
#: Files in which an inexact power of two would change results. Kernels and the reference of
#: accumulators use `**` for exact constants.
SOURCES = [
    path
    for path in sorted(FOLDER.rglob("*.py"))
    if path.relative_to(FOLDER).parts[0] not in ("fused", "inspect")
    and path != FOLDER / "accumulate" / "reference.py"
]


def test_the_names_are_these():
    """Adding a format is a visible decision: docs/formats.md lists every one of them."""
    assert list(FORMATS)[:13] == [
        "bf16",
        "fp16",
        "mxfp8",
        "mxfp8_e5m2",
        "mxfp6_e3m2",
        "mxfp6_e2m3",
        "mxfp4",
        "mxint8",
        "nvfp4",
        "hifp8",
        "hifp4",
        "fp8_e4m3",
        "fp8_e5m2",
    ]
    assert all(get_format(name) is fmt and fmt.name == name for name, fmt in FORMATS.items())


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("mxfp8_e4m3", "mxfp8"),
        ("hif8", "hifp8"),
        ("hifloat8", "hifp8"),
        ("MXFP8", "mxfp8"),
        ("HiF8", "hifp8"),
    ],
)
def test_aliases(alias, name):
    assert get_format(alias) is FORMATS[name]


def test_defaults():
    assert get_format("mxfp8") == Format("mxfp8", E4M3, BlockScaling(32, "floor"))
    assert get_format("mxfp4") == Format("mxfp4", E2M1, BlockScaling(32, "floor"))
    assert get_format("hifp8") == Format("hifp8", HiFloat8(overflow="saturate"), None)
    assert get_format("bf16") == Format("bf16", Cast(torch.bfloat16), None)
    assert get_format("mxfp4").block_size == 32
    assert get_format("hifp8").block_size is None


def test_a_format_can_be_spelled_out():
    fmt = get_format("mx:e3m4:b16:rceil")
    assert (fmt.name, fmt.scaling) == ("mx:e3m4:b16:rceil", BlockScaling(16, "rceil"))
    # Bias 2^2 - 1 = 3; the largest code has exponent 7 - 3 = 4 and mantissa 15/16.
    element = fmt.element
    assert (element.exponent_bits, element.mantissa_bits, element.bias) == (3, 4, 3)
    assert element.max == 31.0
    assert element.bits == 8
    assert get_format("MX:E3M4:B016:RCEIL") == fmt


def test_spelled_out_elements_with_a_name_are_the_named_ones():
    """E4M3 ends at 448 and E5M2 at 57344, as OCP defines them; some codes are not finite."""
    for name, element in ELEMENTS.items():
        assert get_format(f"mx:{name}:b32:floor").element is element
    assert get_element("e4m2").max == 2.0**8 * 1.75


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "fp7",
            r"unknown format 'fp7'; choose one of .*bf16, .*mxfp8.*, or spell out .*'mx:e3m4:b16",
        ),
        ("", r"unknown format ''; choose one of"),
        ("mxfp", r"unknown format 'mxfp', did you mean mxfp8 or mxfp4\b.*\? choose one of"),
        (
            "mx:e4m3",
            r"unknown format 'mx:e4m3'; choose one of .* spell out element, block size and",
        ),
        ("nv:b16:e2m1:e4m3", r"'nv:b16:e2m1:e4m3'; .* in this order and before all variants"),
        (None, "None is not the name of a format; give a string such as 'mxfp8'"),
        ("mx:e4m3:32:floor", r"unknown format 'mx:e4m3:32:floor'"),
        ("mx:e4m3:b-4:floor", r"unknown format 'mx:e4m3:b-4:floor'"),
        (
            "mx:e9m9:b32:floor",
            r"format 'mx:e9m9:b32:floor': unknown element 'e9m9'; choose one of e4m3,",
        ),
        ("mx:e5m3:b32:floor", r"'e5m3'.* at most 8 bits with the sign"),
        ("mx:e0m3:b32:floor", r"'e0m3'.* 1 or more exponent bits"),
        ("mx::b32:floor", r"unknown element ''"),
        (
            "mx:e4m3:b0:floor",
            r"'mx:e4m3:b0:floor': a block of 0 values; choose a block size of 1 or",
        ),
        (
            "mx:e4m3:b32:round",
            r"unknown scale rule 'round'; choose one of floor, rceil, ceil, even",
        ),
    ],
)
def test_unknown_names_say_what_is_accepted(name, message):
    with pytest.raises(ValueError, match=message):
        get_format(name)


def test_the_error_names_every_format_and_alias():
    with pytest.raises(ValueError, match="unknown format") as caught:
        get_format("nonsense")
    for name in [*FORMATS, "mxfp8_e4m3", "hif8", "hifloat8"]:
        assert re.search(rf"\b{name}\b", str(caught.value))


def test_formats_are_frozen_and_hashable_and_travel():
    fmt = get_format("mxfp8")
    with pytest.raises(FrozenInstanceError):
        fmt.name = "other"
    with pytest.raises(TypeError):
        FORMATS["other"] = fmt
    assert {fmt: 1}[pickle.loads(pickle.dumps(fmt))] == 1


def test_block_scales_need_an_element_that_is_described_by_its_fields():
    message = r"format 'x' puts block scales on HiFloat8.*; block scales need"
    with pytest.raises(ValueError, match=message):
        Format("x", HiFloat8(), BlockScaling(32, "floor"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_no_function_that_is_inexact_near_powers_of_two(path):
    """log2(2^k - 1 ulp) is k in float32, so packages that use log2 err there (test_mx.py)."""
    # The softmax of attention in tiles needs exp, as any softmax does; no format uses it.
    softmax = path in (FOLDER / "tiles" / "forward.py", FOLDER / "tiles" / "backward.py")
    banned = {
        *(() if softmax else ("exp", "exp_")),
        "pow",
        "pow_",
        "exp2",
        "exp2_",
        "log",
        "log_",
        "log2",
        "log2_",
        "log10",
    }
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
        assert name not in banned, f"{path.name}:{node.lineno}: {name}"
        if path.name != "gradient_rule.py":  # it converts decibels
            assert not isinstance(node, ast.Pow), f"{path.name}: the operator **"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Format("a", replace(E4M3, max=447.0)), "up to 447, which is no number with 3"),
        (lambda: Format("a", replace(E4M3, max=math.inf)), "up to inf, which is no number"),
        (lambda: ElementFormat("a", 4, 3, 7, 448.0, ties="foo"), "unknown rule for ties 'foo'"),
        (lambda: ElementFormat("a", 4, -1, 7, 1.0), "-1 mantissa bits; give 0 or more"),
        (lambda: Format("a", ElementFormat("b", 5, 10, 15, 65504.0)), "of 16 bits, with a sign"),
        (lambda: Format("a", replace(E4M3, signed=False)), "of 7 bits, without a sign"),
        (lambda: Format("a", "e4m3", OCP), "has the element 'e4m3'; give an ElementFormat"),
        (lambda: Format("a", E4M3, "floor"), "has the scaling 'floor'; give None or a scaling"),
        (lambda: Cast(torch.int8), "torch.int8 is no floating-point dtype"),
        (lambda: BlockScaling(3.0, "floor"), "a block of 3.0 values; choose an integer"),
        (lambda: BlockScaling(32, "floor", headroom=0.5), "a headroom of 0.5; choose a fraction"),
        (lambda: BlockScaling(32, "floor", headroom="abc"), "a headroom of 'abc'; choose a"),
        (lambda: BlockScaling(32, "floor", headroom="1/0"), "a headroom of '1/0'; choose a"),
    ],
)
def test_parts_of_a_format_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
