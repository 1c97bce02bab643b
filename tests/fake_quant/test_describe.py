"""What is said about formats, against facts that were found elsewhere."""

import pytest

from megatron.fake_quant import get_format
from megatron.fake_quant.describe import HEADER, markdown, row

VARIANTS = [
    "mxfp8:2d", "mxfp4:sr", "hifp8:hr:inf", "hifp8:t15", "hifp8:t224:pow2", "nvfp4:2d:sr",
    "fp8_e4m3:pow2", "hifp4:sr", "mx:e3m0:b16:rceil", "mx:e1m0:b1:even",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        # 4 bits and an E4M3 for 16 values: 4 + 8/16.
        ("nvfp4", {"bits a value": "4.5", "largest": "6", "scale": "E4M3 for 16, float32 for all"}),
        # 4 bits and 32 for 64 values.
        ("hifp4", {"bits a value": "4.5", "largest": "1.75", "smallest": "2^-2"}),
        ("hifp4", {"rounding, overflow": "ties away from zero, saturates"}),
        # 8 bits and 8 for 32 x 32 values: 8 + 8/1024.
        ("mxfp8:2d", {"bits a value": "8.0078125", "scale": "E8M0 for 32 x 32 by floor"}),
        ("mxfp6_e3m2:rceil", {"bits a value": "6.25", "scale": "E8M0 for 32 by rceil"}),
        ("mxfp4:sr", {"rounding, overflow": "stochastic, saturates"}),
        ("hifp8:hr:inf", {"largest": "2^15", "rounding, overflow": "hybrid, to Inf"}),
        ("hifp8:t15", {"bits a value": "8", "scale": "float32 for all, to 15"}),
        ("fp8_e5m2:pow2", {"scale": "float32 for all, to 57344, a power of two"}),
        ("mxint8", {"largest": "1.984375", "smallest": "2^-6"}),
        ("hifp8", {"also": "hif8, hifloat8", "smallest normal": "2^-15", "smallest": "2^-22"}),
    ],
)
def test_cells_of_the_table(name, cells):
    found = dict(zip(HEADER, row(get_format(name)), strict=True))
    assert {column: found[column] for column in cells} == cells


def test_every_variant_has_a_row():
    lines = markdown(map(get_format, VARIANTS)).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {name}" for name in VARIANTS]
    assert len({line.count("|") for line in lines}) == 1
