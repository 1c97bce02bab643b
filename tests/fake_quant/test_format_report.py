"""The description of formats, compared with facts from other sources."""

import csv
import math

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron.fake_quant import FORMATS, fake_quantize, get_format
from megatron.fake_quant.elements import ELEMENTS
from megatron.fake_quant.inspect import code_point_table, format_properties
from megatron.fake_quant.inspect.format_report import describe
from megatron.fake_quant.inspect.format_table import HEADER, markdown, row
from tests.fake_quant.oracle import DATA, ML_DTYPES, RULES, code_points, scale_exponents

VARIANTS = [
    "mxfp8:2d",
    "mxfp4:sr",
    "hifp8:hr:inf",
    "hifp8:t15",
    "hifp8:t224:pow2",
    "nvfp4:2d:sr",
    "fp8_e4m3:pow2",
    "hifp4:sr",
    "mx:e3m0:b16:rceil",
    "mx:e1m0:b1:even",
    "hifp8:t40000",
    "fp8_e4m3:delayed16:margin1",
    "hifp8:t15:recent:sr",
    "fp8_e4m3:global",
    "if4:global",
]
MX = {
    "mxfp8": "e4m3",
    "mxfp8_e5m2": "e5m2",
    "mxfp6_e3m2": "e3m2",
    "mxfp6_e2m3": "e2m3",
    "mxfp4": "e2m1",
}


def said(name: str) -> dict[tuple[str, str], str]:
    """Return the lines of `describe` by the first word of their section, if any, and by label."""
    found, section, label = {}, "", ""
    for line in describe(get_format(name)).splitlines()[1:]:
        if line and not line.startswith((" ", "|")):
            section = line.split()[0]
        elif line.startswith("  "):
            label = line[2:22].strip() or label
            start = found.get((section, label), "")
            found[section, label] = f"{start} {line[22:]}".strip()
    return found


def precision(name: str) -> list[list[str]]:
    """Return the cells of the table of binades."""
    lines = [line for line in describe(get_format(name)).splitlines() if line.startswith("|")]
    return [line.strip("| ").split(" | ") for line in lines[2:]]


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        # 4 bits and an E4M3 for 16 values: 4 + 8/16.
        (
            "nvfp4",
            {
                "bits per value": "4.5",
                "largest": "6",
                "scale": "E4M3 per 16 values, float32 per tensor",
            },
        ),
        # 4 bits and 32 for 64 values.
        ("hifp4", {"bits per value": "4.5", "largest": "1.75", "smallest": "2^-2"}),
        ("hifp4", {"rounding, overflow": "ties away from zero, saturates"}),
        # 8 bits and 8 for 32 x 32 values: 8 + 8/1024.
        ("mxfp8:2d", {"bits per value": "8.0078125", "scale": "E8M0 per 32 x 32 values, floor"}),
        ("mxfp6_e3m2:rceil", {"bits per value": "6.25", "scale": "E8M0 per 32 values, rceil"}),
        ("mxfp4:sr", {"rounding, overflow": "stochastic, saturates"}),
        ("hifp8:hr:inf", {"largest": "2^15", "rounding, overflow": "hybrid, to Inf"}),
        (
            "hifp8:t15",
            {"bits per value": "8", "scale": "float32 per tensor, maps the maximum to 15"},
        ),
        (
            "fp8_e5m2:pow2",
            {"scale": "float32 per tensor, maps the maximum to 57344, a power of two"},
        ),
        ("nvfp4:global", {"scale": "E4M3 per 16 values, float32 per tensor over all ranks"}),
        ("mxint8", {"largest": "1.984375", "smallest": "2^-6"}),
        ("hifp8", {"aliases": "hif8, hifloat8", "smallest normal": "2^-15", "smallest": "2^-22"}),
    ],
)
def test_cells_of_the_table(name, cells):
    found = dict(zip(HEADER, row(get_format(name)), strict=True))
    assert {column: found[column] for column in cells} == cells


def test_every_variant_has_a_row_and_a_page():
    names = [get_format(name).name for name in VARIANTS]
    lines = markdown(map(get_format, VARIANTS)).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {name}" for name in names]
    assert len({line.count("|") for line in lines}) == 1
    for name in [*FORMATS, *names]:
        page = describe(get_format(name)).splitlines()
        assert page[0] == name
        assert max(map(len, page)) <= 100


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        # OCP MX v1.0, section 5.3 (E4M3); E8M0 from 2^-127 to 2^127: 1.75 * 2^8 * 2^127.
        (
            "mxfp8",
            {
                ("element", "largest"): "448 = 1.75 x 2^8",
                ("element", "positive numbers"): "126 in 18 binades, largest / smallest 229376",
                ("element", "underflow"): "magnitudes up to 2^-10 round to zero",
                ("element", "zeros"): "0x00, 0x80",
                ("element", "Inf"): "none",
                ("element", "NaN"): "0x7F, 0xFF",
                ("scale", "range"): "2^-127 to 2^127",
                ("scale", "of"): "32 values, E8M0 (a power of two)",
                ("whole", "largest"): "7.62232502e+40 = 1.75 x 2^135 (float32 ends at 3.40282e+38)",
                ("whole", "smallest"): "2^-136",
                ("whole", "a NaN"): "makes its block NaN",
                ("whole", "an Inf"): "makes its block NaN",
            },
        ),
        # As in IEEE 754, Inf and NaN have an exponent field of ones.
        (
            "fp8_e5m2",
            {
                ("element", "Inf"): "0x7C, 0xFC",
                ("element", "NaN"): "0x7D to 0x7F, 0xFD to 0xFF",
                ("element", "never produced"): "0x7C, 0xFC (inf, -inf)",
                ("whole", "an Inf"): "becomes the largest number",
                ("whole", "a NaN"): "stays NaN",
            },
        ),
        # OCP leaves -2 unused.
        ("mxint8", {("element", "never produced"): "0x80 (-2)", ("element", "zeros"): "0x00"}),
        # arXiv 2509.25149 appendix B: 6 * 448 = 2688.
        (
            "nvfp4",
            {
                ("", "bits per value"): "4.5: 4 of the element, 8 of scales for 16 values; "
                "and 32 for the tensor",
                ("scale", "range"): "2^-9 to 448 = 1.75 x 2^8",
                ("whole", "largest"): "2688 = 1.3125 x 2^11, times the tensor's scale",
                ("whole", "smallest"): "2^-10, times the tensor's scale",
            },
        ),
        # arXiv 2602.11287: E6M2 from 2^-48 to 1.5 * 2^15; top 7 scales; elements of 1/4.
        (
            "hifp4",
            {
                ("", "rounding"): "to nearest, ties away from zero",
                ("scale", "range"): "2^-48 to 196608 = 1.5 x 2^17, with the two bits",
                ("whole", "largest"): "344064 = 1.3125 x 2^18",  # 7 * 1.5 * 2^15
                ("whole", "smallest"): "2^-50",
            },
        ),
        # arXiv 2409.16626, sections 2.1 and 2.2.
        (
            "hifp8",
            {
                (
                    "element",
                    "positive numbers",
                ): "126 in 38 binades, largest / smallest 1.37439e+11",
                ("element", "smallest normal"): "2^-15",
                ("element", "smallest"): "2^-22",
                ("element", "overflow"): "saturates: values beyond 2^15 become 2^15",
                ("element", "underflow"): "magnitudes below 2^-23 round to zero",
                ("element", "zeros"): "0x00",
                ("element", "Inf"): "0x6F, 0xEF",
                ("element", "NaN"): "0x80",
                ("whole", "an Inf"): "becomes the largest number",
            },
        ),
        (
            "hifp8:inf",
            {
                ("element", "overflow"): "to Inf, to nearest from 40960 = 1.25 x 2^15 on",
                ("whole", "an Inf"): "stays Inf",
            },
        ),
        # 15 / 2^-22.
        ("hifp8:t15", {("whole", "smallest"): "amax x 2^-22 / 15 = amax / 62914560"}),
        # IEEE 754 binary16: halfway to 2^16 is 65520.
        (
            "fp16",
            {
                ("element", "overflow"): "to Inf, to nearest from 65520 = 1.99951171875 x 2^15 on",
                ("element", "NaN"): "0x7C01 to 0x7FFF, 0xFC01 to 0xFFFF",
            },
        ),
    ],
)
def test_named_facts(name, facts):
    page = said(name)
    assert {key: page[key] for key in facts} == facts


@pytest.mark.parametrize("name", [*MX, "bf16", "fp16"])
def test_the_numbers_are_those_of_finfo(name):
    info = ml_dtypes.finfo(
        {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}.get(name) or ML_DTYPES[MX[name]]
    )
    page = said(name)
    for label, expected in [
        ("largest", info.max),
        ("smallest normal", info.smallest_normal),
        ("smallest", info.smallest_subnormal),
    ]:
        text = page["element", label].split(" = ")[-1]
        significand, _, power = text.rpartition(" x ")
        base, _, exponent = power.partition("^")
        assert float(significand or 1) * float(base) ** int(exponent or 1) == float(expected)
    spans = {
        e: span
        for span in format_properties.binades(get_format(name).element)
        for e in range(span.first, span.last + 1)
    }
    assert spans[0].relative == float(info.eps)
    assert page["", "rounding"] == "to nearest, ties even"


def test_spacing_of_hifloat8_is_that_of_the_paper():
    """Table 2 of arXiv 2409.16626: mantissa bits by |E|; denormals are powers of two."""
    assert precision("hifp8") == [
        ["2^-22 to 2^-16", "1", "2^-22 to 2^-16", "100 %"],
        ["2^-15 to 2^-8", "2", "2^-16 to 2^-9", "50 %"],
        ["2^-7 to 2^-4", "4", "2^-9 to 2^-6", "25 %"],
        ["2^-3 to 2^3", "8", "2^-6 to 1", "12.5 %"],
        ["2^4 to 2^7", "4", "4 to 32", "25 %"],
        ["2^8 to 2^14", "2", "128 to 2^13", "50 %"],
        ["2^15", "1", "-", "-"],
    ]


@pytest.mark.parametrize("name", [*ELEMENTS, "e3m4", "e3m0", "e5m1"])
def test_binades_hold_the_code_points(name):
    fmt = get_format(f"mx:{name}:b32:floor")
    points = code_points(name)[1:]
    _, exponents = np.frexp(points)
    expected = {int(e): int((exponents - 1 == e).sum()) for e in set(exponents - 1)}
    spans = format_properties.binades(fmt.element)
    assert {e: s.count for s in spans for e in range(s.first, s.last + 1)} == expected
    for span in spans:
        steps = np.diff(points[exponents - 1 == span.last])
        assert np.all(steps == math.ldexp(span.relative or 0, span.last))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", [*MX.values(), "int8"])
def test_where_the_block_s_largest_value_lands(element, rule):
    """Under the oracle's scales, amaxes lie between the two numbers, and some are near each."""
    page = said(f"mx:{element}:b32:{rule}")
    low, high = map(float, page["scale", f"{rule} *"].rpartition("lands in ")[2].split(" to "))
    amax = np.float32(1) + np.arange(1 << 16, dtype=np.float32) / (1 << 16)
    landed = amax * np.ldexp(1.0, -scale_exponents(amax, element, rule))
    tolerance = 1e-4 * high
    assert abs(landed.min() - low) < tolerance
    assert abs(landed.max() - high) < tolerance


def test_the_table_of_hifloat8_is_the_published_one():
    with (DATA / "hif8_codes.csv").open(newline="") as file:
        expected = [(int(line["code"]), line["value"]) for line in csv.DictReader(file)]
    found = csv.DictReader(code_point_table.as_csv(get_format("hifp8")).splitlines())
    for (code, value), line in zip(expected, found, strict=True):
        assert int(line["code"], 16) == code == int(line["bits"].replace(" ", ""), 2)
        assert float(line["value"]) == float(value) or value == line["value"] == "nan"


@pytest.mark.parametrize("name", MX)
def test_tables_are_those_of_ml_dtypes(name):
    codes = code_point_table.code_table(get_format(name).element)
    raw = np.arange(len(codes), dtype=np.uint8).view(ML_DTYPES[MX[name]])
    np.testing.assert_array_equal([float(c.value) for c in codes], raw.astype(np.float64))
    assert [int(c.code, 16) for c in codes] == list(range(len(codes)))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        # arXiv 2409.16626, table 1: dot 11, exponent 0 111 (+15), mantissa 0; dot 001, E = -1.
        ("hifp8", "| 0x6E | 0 11 0111 0 | 32768.0 | 1 x 2^15 |"),
        ("hifp8", "| 0x9C | 1 001 1 100 | -0.75 | -1.5 x 2^-1 |"),
        ("hifp8", "| 0x07 | 0 0000 111 | 1.52587890625e-05 | 1 x 2^-16 |"),
        ("hifp8", "| 0x08 | 0 0001 000 | 1.0 | 1 x 2^0 |"),
        ("mxfp8", "| 0x7E | 0 1111 110 | 448.0 | 1.75 x 2^8 |"),
        ("nvfp4:2d", "| 0x8 | 1 00 0 | -0.0 |  |"),
        ("mxint8", "| 0x80 | 1 0 000000 | -2.0 | -1 x 2^1 |"),
        ("hifp4", "| 0x7 | 0 1 11 | 1.75 | 1.75 x 2^0 |"),
    ],
)
def test_lines_of_tables(name, line):
    assert line in code_point_table.markdown(get_format(name)).splitlines()


@pytest.mark.parametrize(("name", "said"), [("hifp8:hr:inf", True), ("hifp8:hr", False)])
def test_the_range_in_which_sources_of_hybrid_rounding_disagree_is_named(name, said):
    text = " ".join(describe(get_format(name)).split())
    assert ("The sources disagree from 32768 to 49152. This format follows" in text) == said
    if said:  # the code does what is described
        x = torch.tensor([33024.0, 40704.0, 40960.0, 49151.0], dtype=torch.bfloat16)
        assert fake_quantize(x, name).tolist() == [32768, 32768, math.inf, math.inf]
        x = torch.tensor([32768.0, 40959.0])  # in float32, the low mantissa bits decide
        assert fake_quantize(x, name).tolist() == [math.inf, 32768]


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("fp8_rowwise", "8; and 32 for each row"),
        ("mx:e2m1:row:rceil", "4; and 8 for each row"),
        ("nv:e2m1:row:e4m3", "4; and 8 for each row; and 32 for the tensor"),
        ("nv:e2m1:row:e4m3:outer-row", "4; and 40 for each row"),
        ("nv:e4m3:column:fp32", "8; and 32 for each column"),
        ("nv:e2m1:column:e4m3", "4; and 8 for each column; and 32 for the tensor"),
        ("mx:e4m3:tensor:rceil", "8; and 8 for the tensor"),
        (
            "nvfp4:outer-row",
            "4.5: 4 of the element, 8 of scales for 16 values; and 32 for each row",
        ),
    ],
)
def test_the_bits_of_a_row_s_scales_are_counted(name, stored):
    assert said(name)["", "bits per value"] == stored


def test_scales_that_no_matmul_can_apply_to_a_sum_are_named():
    text = "differs along the reduction axis, so hardware cannot apply it after the sum"
    assert text in said("nv:e4m3:column:fp32")["scale", "in a matmul"]
    assert not any(label == "in a matmul" for _, label in said("fp8_rowwise"))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("nvfp4:2d", "NVFP4, arXiv 2509.25149 appendix B, as Transformer Engine computes it"),
        ("nvfp4:outer-row", "NVFP4, arXiv 2509.25149 appendix B, as Transformer Engine"),
        ("nvfp4:outer-1x64", "E4M3 scales as in NVFP4, arXiv 2509.25149 appendix B, in the order"),
        ("nv:e2m1:b3x5:e4m3", "E4M3 scales as in NVFP4, arXiv 2509.25149 appendix B, in the order"),
        ("nv:e2m1:row:e4m3:4over6-mae", "E4M3 scales as in NVFP4 with 4/6, arXiv 2512.02010, in"),
        ("nvfp4:4over6-mae", "NVFP4 with 4/6, arXiv 2512.02010, as Transformer Engine computes it"),
        ("fp8_block:2d", "FP8 blocks, arXiv 2412.19437 section 3.3, as Transformer Engine"),
        ("nv:e4m3:b3x5:fp32", "float32 scales, in the order of Transformer Engine's FP8 blocks"),
        ("nv:e4m3:column:fp32", "float32 scales, in the order of Transformer Engine's FP8 blocks"),
        ("fp8_rowwise", "FP8 with float32 scales per row, as torchao computes it"),
        ("nv:e2m3:row:fp32", "float32 scales, in the order of Transformer Engine's FP8 blocks"),
        ("amdfp4", "AMD-FP4, unsigned E5M3 scales, in the order of AMD's ALTO"),
        ("nv:e2m1:b3x5:ue5m3", "unsigned E5M3 scales as in AMD-FP4, in the order of AMD's ALTO"),
    ],
)
def test_only_the_formats_that_a_package_has_are_called_its_own(name, source):
    assert said(name)["", "source"].startswith(source)


@pytest.mark.parametrize(
    ("name", "largest", "smallest"),
    [
        ("fp8_block", "amax, the block's largest magnitude", 2.0**-9 / 448),
        ("fp8_block:top300", "amax, the block's largest magnitude", 2.0**-9 / 300),
        ("fp8_rowwise:head3/4", "amax, the block's largest magnitude", 2.0**-9 / 336),
        ("fp8_block:top500", "amax x 0.896, as 500 is more than the element has", 2.0**-9 / 500),
    ],
)
def test_a_range_under_float32_scales_is_that_of_their_top(name, largest, smallest):
    report = said(name)
    assert report["whole", "largest"] == largest
    assert float(report["whole", "smallest"].removeprefix("amax x ")) == pytest.approx(smallest)
    x = torch.full((1, 128), smallest * 1.001)
    x[0, 0] = 1
    result = fake_quantize(x, name)[0]
    assert float(result[1]) == pytest.approx(smallest)
    assert float(result[0]) == pytest.approx(0.896 if "top500" in name else 1, rel=0.05)


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("mxfp8:2d", ":floor :rceil :ceil :even :top<number> (as in top7.25) :head<fraction> :sr"),
        ("mx:e2m1:b32:floor:sr", ":2d :head<fraction>"),
        ("fp8_block:ue8m0", ":top<number> (as in top7.25) :2d :head<fraction> :sr"),
        ("if4:sr", ":global"),
        ("mxfp4_macro:sr", "nothing"),
    ],
)
def test_a_name_may_go_on_with_the_variants_that_are_left(name, variants):
    assert " ".join(said(name)["", "suffixes"].split()) == variants
