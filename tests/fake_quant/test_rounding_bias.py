"""The bias of stochastic rounding that `describe` states, compared with products of real draws."""

import functools
import itertools
import re
from pathlib import Path

import pytest
import torch

from megatron.fake_quant import fake_quantize, get_format
from megatron.fake_quant.formats import FORMATS
from megatron.fake_quant.inspect.format_report import describe
from megatron.fake_quant.inspect.rounding_bias import SMALL, operand_gains, rounding_bias

REPO = Path(__file__).resolve().parents[2]
STOCHASTIC = [name for name, fmt in FORMATS.items() if "stochastic" in fmt.element.roundings]
VARIANTS = [
    "mxfp4:rceil",
    "mxfp8:rceil",
    "mxfp4:ceil",
    "mxfp4:even",
    "mxfp4:head3/4",
    "mx:int4:b32:floor",
    "nvfp4:2d",
    "nvfp4:head16/17",
    "nv:e2m1:b16:e4m3:4over6-mae:bound256",
    "nv:e2m1:b16:ue5m3:outer-none",
    "nv:e4m3:b128:fp32:outer-none",
    "hifp8:inf",
    "hifp8:t15",
    "fp8_e4m3:pow2",
    "nv:e4m3:column:fp32",
    "mx:e2m1:tensor:rceil",
    "nvfp4:outer-row:head16/17",
    "nvfp4:outer-1x64:head16/17",
    "nvfp4:2d:head16/17",
    "nvint4:head16/17",
    "amdfp4:head16/17",
    "mxint4:rceil",
]
#: One format per kernel and cause of bias, for the default tests.
FEW = ["mxfp4:rceil", "mxfp8", "nvfp4:head16/17", "nvfp4", "hifp8", "fp8_e4m3", "mxint8"]
ROWS, K = 320, 384
COUNTS = (1, 16, 256)


@functools.cache
def operands():
    generator = torch.Generator().manual_seed(31)
    return [torch.randn(ROWS, K, generator=generator) for _ in range(2)]


@functools.cache
def measured(name):
    """Return the gain of the mean of 256 products, and the mean's rms errors for each count."""
    a, b = operands()
    exact = a.double() @ b.double().t()
    total, errors = torch.zeros(ROWS, ROWS, dtype=torch.float64), []
    for draw in range(COUNTS[-1]):
        qa, qb = (fake_quantize(x, f"{name}:sr", seed=2 * draw + i) for i, x in enumerate((a, b)))
        total += qa @ qb.t()
        if draw + 1 in COUNTS:
            errors.append(float((total / (draw + 1) - exact).norm() / exact.norm()))
    return float((total / COUNTS[-1] * exact).sum() / exact.square().sum()) - 1, errors


def check(name):
    gain, errors = measured(name)
    stated = rounding_bias(get_format(name))
    # The bias depends on the maxima of the blocks, so it is computed for these operands.
    of_both = [1 + operand_gains(get_format(f"{name}:sr"), x)[1] for x in operands()]
    assert abs(gain - (of_both[0] * of_both[1] - 1)) <= SMALL
    if not stated.unbiased:
        assert errors[-1] > 0.5 * abs(stated.gain)
        return
    assert abs(gain) <= SMALL
    for error, smaller in itertools.pairwise(errors):
        assert smaller / error == pytest.approx(1 / 4, rel=0.05), "1 / sqrt(16)"


@pytest.mark.parametrize("name", FEW)
def test_a_mean_of_products_has_the_stated_bias(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*STOCHASTIC, *VARIANTS} - {*FEW}))
def test_a_mean_of_products_has_the_stated_bias_in_every_format(name):
    check(name)


@pytest.mark.parametrize(
    ("name", "gain"),
    [
        ("nvfp4", -0.0067),
        ("mxfp4", -0.0206),
        ("hifp4", -0.0133),
        ("mxfp8", -0.0041),
        ("mxfp4:rceil", 0.0),
        ("nvfp4:head16/17", 0.0),
    ],
)
def test_the_bias_is_that_of_long_measurements(name, gain):
    """The gains were measured once, by means of 256 products of 512 x 1024 normal values."""
    stated = rounding_bias(get_format(name))
    assert stated.gain == pytest.approx(gain, rel=0.03, abs=5e-5)
    assert stated.unbiased == (gain == 0)
    assert stated == rounding_bias(get_format(f"{name}:sr"))


def test_the_page_lists_the_bias_of_every_format():
    """A row of the page lists formats that share one gain, or one gain for each format."""
    page = (REPO / "docs/formats.md").read_text()
    table = page.partition("| formats with `:sr` | gain |")[2].partition("\n\n")[0]
    listed = {}
    for row in table.splitlines()[2:]:
        names, gains = (cell.strip().split(", ") for cell in row.strip("|").split("|"))
        listed |= {
            name: gains[i if gains[-1][-1] == "%" and gains[1:] else 0]
            for i, name in enumerate(names)
        }
    stated = {name: rounding_bias(get_format(name)) for name in STOCHASTIC}
    assert listed == {
        name: "0" if bias.unbiased else f"{100 * bias.gain:+.2g} %" for name, bias in stated.items()
    }


def test_causes_are_told_apart():
    hifp4 = rounding_bias(get_format("hifp4"))
    assert hifp4.clipping < -0.01
    assert hifp4.scales > 0.001
    assert rounding_bias(get_format("nvfp4")).scales == pytest.approx(0, abs=1e-6)
    assert rounding_bias(get_format("bf16")) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nvfp4", "bias of :sr biased: the mean of a product of normal values has the gain -0.68"),
        ("mxfp4:sr", "bias biased: .* gain -2.1 %; -2.1 % from values that clip at the largest"),
        ("hifp4:sr", "-1.5 % from values that clip .*, \\+0.14 % from scales that do not undo"),
        ("mxint8:sr", "bias slightly biased: .* gain -0.0013 %"),
        ("mxfp4:rceil", "bias of :sr unbiased: no value clips, and the mean of a product is the"),
    ],
)
def test_describe_states_the_bias(name, text):
    assert re.search(text, " ".join(describe(get_format(name)).split()))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hifp8", "; for magnitudes up to 2^15"),
        ("nvfp4:head16/17", "; for blocks with a scale of at least 2^-6; rounding results to bf"),
        ("nvfp4:outer-none:head16/17", "; for blocks with a scale from 2^-6 to 448; rounding res"),
        ("amdfp4:head16/17", "; for blocks with a scale from 2^-14 to 114688; rounding results"),
        ("mxfp4:head3/4", "; rounding results to bfloat16 can add up to 0.2 %"),
        ("mxfp4:rceil", ""),
    ],
)
def test_describe_states_where_a_format_is_unbiased(name, text):
    words = f"unbiased: no value clips, and the mean of a product is the product{text}"
    line = " ".join(describe(get_format(name)).split())
    assert words in line
    assert text or f"{words} suffixes" in line


@pytest.mark.parametrize(
    ("name", "power", "within"),
    [
        ("nvfp4:outer-none:head16/17", -3, True),  # amax is about 2^-1.8, and the scale 2^-4.3
        ("nvfp4:outer-none:head16/17", -8, False),
        ("nvfp4:outer-none:head16/17", 12, False),
        ("amdfp4:head16/17", -8, True),
        ("amdfp4:head16/17", -14, False),
        ("hifp8", 12, True),
        ("hifp8", 15, False),
    ],
)
def test_a_format_is_unbiased_within_the_stated_limits_only(name, power, within):
    x = operands()[0] * 2.0**power
    gain = operand_gains(get_format(f"{name}:sr"), x)[1]
    assert (abs(gain) < 1e-6) == within


@pytest.mark.parametrize(
    ("name", "amax"),
    [
        ("mx:e4m3:tensor:floor", 500.0),  # stays 500
        ("mx:e2m1:b512:even:2d", 6.9),  # stays 6.9; 7 becomes 3.5
        ("nvfp4:outer-none:head0.942", 6.005),  # stays 6.005: its scale, 1.0625, becomes 1
    ],
)
def test_a_format_in_which_few_blocks_clip_is_not_called_unbiased(name, amax):
    """All block maxima of one normal tensor may lie in the part of a binade where nothing clips."""
    fmt = get_format(f"{name}:sr")
    x = torch.zeros(2, 16)
    x[0, 0] = amax
    assert operand_gains(fmt, x)[1] < -1e-4
    assert not rounding_bias(fmt).unbiased
    assert "bias slightly biased: " in " ".join(describe(fmt).split())


def test_blocks_of_any_size_are_unbiased_if_their_scale_rule_is():
    for name in ("mx:e4m3:tensor:rceil", "nv:e2m1:column:e4m3:outer-none:head16/17"):
        assert rounding_bias(get_format(name)).unbiased


def test_rounding_results_to_bfloat16_shifts_a_gain_by_less_than_stated():
    x = operands()[0][:64].bfloat16()
    total = torch.zeros_like(x, dtype=torch.float64)
    for seed in range(32):
        total += fake_quantize(x, "mxfp4:head3/4:sr", seed=seed)
    gain = float((total / 32 * x).sum() / x.double().square().sum()) - 1
    assert 0.0005 < gain < 0.002


def test_describe_is_silent_about_formats_without_stochastic_rounding():
    assert "bias of :sr" not in describe(get_format("bf16"))
