"""Names with variants, their formats, and names that are refused."""

import contextlib
import itertools
import re
from dataclasses import replace

import pytest
import torch

from megatron.fake_quant import FORMATS, Format, fake_quantize, get_format
from megatron.fake_quant.block_scaling import WHOLE_AXIS, BlockScaling
from megatron.fake_quant.elements import E2M1, E4M3, S1P2, Cast, HiFloat8
from megatron.fake_quant.special_scalings import ChoiceScaling, GroupScaling, TensorScaling


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mxfp8:rceil", {"scaling": BlockScaling(32, "rceil")}),
        ("mxfp4:2d", {"scaling": BlockScaling(32, "floor", height=32)}),
        (
            "mxfp4:ceil:2d:sr",
            {"scaling": BlockScaling(32, "ceil", height=32), "rounding": "stochastic"},
        ),
        ("mxint8:sr", {"rounding": "stochastic"}),
        ("nvfp4:2d", {"scaling": BlockScaling(16, height=16, scale="e4m3", outer="tensor")}),
        ("nvfp4:sr", {"rounding": "stochastic"}),
        ("hifp8:hr", {"rounding": "hybrid"}),
        ("hifp8:inf", {"element": HiFloat8("inf")}),
        ("hifp8:t15", {"scaling": TensorScaling(15.0)}),
        ("hifp8:t0.5:pow2", {"scaling": TensorScaling(0.5, power_of_two=True)}),
        (
            "hifp8:sr:inf:t224",
            {"element": HiFloat8("inf"), "scaling": TensorScaling(224.0), "rounding": "stochastic"},
        ),
        ("hifp4:sr", {"rounding": "stochastic"}),
        ("fp8_e4m3:pow2", {"scaling": TensorScaling(448.0, power_of_two=True)}),
        ("fp8_e5m2:sr", {"rounding": "stochastic"}),
        ("fp8_e4m3:delayed", {"scaling": TensorScaling(448.0, amax="delayed", history=1024)}),
        ("fp8_e4m3:delayed16", {"scaling": TensorScaling(448.0, amax="delayed", history=16)}),
        ("fp8_e4m3:global", {"scaling": TensorScaling(448.0, amax="global")}),
        (
            "nvfp4:global",
            {"scaling": BlockScaling(16, scale="e4m3", outer="tensor", amax="global")},
        ),
        ("mixfp4:global", {"scaling": ChoiceScaling(shared=False, amax="global")}),
        ("fp8_e5m2:recent", {"scaling": TensorScaling(57344.0, amax="delayed", history=1)}),
    ],
)
def test_a_variant_changes_one_thing(name, changes):
    base = FORMATS[name.partition(":")[0]]
    assert get_format(name) == replace(base, name=name, **changes)


def test_formats_without_variants():
    assert FORMATS["nvfp4"] == Format("nvfp4", E2M1, BlockScaling(16, scale="e4m3", outer="tensor"))
    assert FORMATS["hifp4"] == Format("hifp4", S1P2, GroupScaling())
    assert FORMATS["fp8_e4m3"] == Format("fp8_e4m3", E4M3, TensorScaling(448.0))
    assert FORMATS["fp8_e5m2"].scaling == TensorScaling(57344.0)
    blocks = {name: fmt.block_size for name, fmt in FORMATS.items() if fmt.block_size != 32}
    assert {name for name, size in blocks.items() if size is None} == {
        "bf16",
        "fp16",
        "hifp8",
        "fp8_e4m3",
        "fp8_e5m2",
    }
    assert (blocks["nvfp4"], blocks["hifp4"]) == (16, 64)
    assert not any(fmt.square for fmt in FORMATS.values())
    assert get_format("nvfp4:2d").square


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("HiF8:INF:hr", "hifp8:hr:inf"),
        ("hif4:sr", "hifp4:sr"),
        ("mxfp8:sr:2d:rceil", "mxfp8:rceil:2d:sr"),
        ("hifp8:pow2:t15", None),  # pow2 must follow the target
        ("hifp8:t15.0:pow2", "hifp8:t15:pow2"),
        ("mxfp8:floor", "mxfp8"),
        ("mx:e3m4:b16:rceil:sr", "mx:e3m4:b16:rceil:sr"),
        ("fp8_e4m3:margin1:Delayed1024", "fp8_e4m3:delayed:margin1"),
        ("fp8_e4m3:delayed:margin0", "fp8_e4m3:delayed"),
        ("fp8_e4m3:margin12:delayed007:sr:pow2", "fp8_e4m3:sr:pow2:delayed7:margin12"),
        ("fp8_e5m2:delayed1", "fp8_e5m2:recent"),
        ("NVFP4:Global:sr:2d", "nvfp4:2d:sr:global"),
        ("hifp8:global:t15:pow2", "hifp8:t15:pow2:global"),
        ("amdfp4:global:outer-tensor", "amdfp4:outer-tensor:global"),
        ("hifp8:t15:recent:margin1", "hifp8:t7.5:recent"),  # a margin of 1 halves the target
        ("nv:e4m3:tensor:fp32:outer-none", "fp8_e4m3"),
        ("nv:e5m2:tensor:fp32:delayed:sr", "fp8_e5m2:sr:delayed"),
        ("fp8_e4m3:head1/2:top448", "fp8_e4m3:top224"),
        ("fp8_e4m3:head1/2:delayed:margin1", "fp8_e4m3:delayed:margin2"),
        ("fp8_e4m3:top300:delayed:margin1", "fp8_e4m3:delayed:top150"),
        ("nv:e2m1:tensor:fp32:head3/4:global", "nv:e2m1:tensor:fp32:top4.5:global"),
        ("nv:e4m3:column:fp32:outer-none", "nv:e4m3:column:fp32"),
        ("mx:e4m3:tensor:rceil:sr", "mx:e4m3:tensor:rceil:sr"),
    ],
)
def test_a_format_has_one_name(name, canonical):
    if canonical is None:
        with pytest.raises(ValueError, match="hifp8 does not take 'pow2'"):
            get_format(name)
    else:
        assert get_format(name).name == canonical
        assert get_format(canonical) == get_format(name)


ACCEPTED = {
    "mxfp8": ["floor", "rceil", "ceil", "even", "top400", "2d", "head3/4", "sr"],
    "nvfp4": [
        "top400",
        "2d",
        "outer-none",
        "outer-tensor",
        "outer-row",
        "outer-1x64",
        "outer-1x128",
        "4over6-mae",
        "4over6-mse",
        "bound256",
        "head3/4",
        "sr",
        "eden",
        "global",
    ],
    "hifp4": ["sr"],
    "hifp8": ["sr", "hr", "inf", "t15"],
    "fp8_e5m2": [
        *("top400", "head3/4", "sr", "pow2", "delayed", "delayed16", "recent", "global"),
    ],
    "bf16": [],
}
EVERY = [*dict.fromkeys(variant for accepted in ACCEPTED.values() for variant in accepted), "hr"]
#: How help and error messages show a variant with a number.
WITH_NUMBER = {
    "t15": "t<number> (as in t15)",
    "top400": "top<number> (as in top7.25)",
    "bound256": "bound<number>",
    "head3/4": "head<fraction>",
    "delayed16": "delayed<length> (as in delayed16)",
}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("variant", [*EVERY, "3d", "up", "tx", "t", "t-1", ""])
def test_a_variant_applies_or_is_refused(name, variant):
    """A variant that applies changes numbers; the error for any other lists the accepted ones."""
    if variant in ACCEPTED[name]:
        fmt = get_format(f"{name}:{variant}")
        amax = torch.tensor(1.0) if fmt.amax_source != "own" else None
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(23)) * 2.0**14
        changed = not torch.equal(fake_quantize(x, fmt, amax=amax), fake_quantize(x, name))
        assert changed == (variant not in ("floor", "outer-tensor"))
    elif variant:
        accepted = ", ".join(WITH_NUMBER.get(each, each) for each in ACCEPTED[name])
        said = f"it takes {accepted}" if accepted else "it has no variants"
        message = f"format '{name}:{variant}': {name} does not take '{variant}'; {said}"
        with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
            get_format(f"{name}:{variant}")


def names_with_two_variants() -> list[str]:
    """Return all accepted pairs of variants, in both orders."""
    accepted = []
    for name, count in itertools.product(FORMATS, (0, 1, 2)):
        for variants in itertools.permutations(EVERY, count):
            spelled = ":".join([name, *variants])
            with contextlib.suppress(ValueError):
                accepted.append(get_format(spelled) and spelled)
    return accepted


def test_every_name_that_is_made_can_be_read():
    names = names_with_two_variants()
    assert len(names) > 150
    for name in names:
        fmt = get_format(name)
        assert get_format(fmt.name) == fmt
        assert fake_quantize(torch.ones(4, 4), fmt.with_own_amax()).shape == (4, 4)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("mxfp5", "mxfp8"),
        ("nvfp", "nvfp4"),
        ("hif16", "hif8"),
        ("hifloat", "hifloat8"),
        ("fp8_e4m2", "fp8_e4m3"),
        ("NVFP8", "nvfp4"),
        ("mxfp9:sr", "mxfp8"),
        ("bfloat16", "hifloat8"),
    ],
)
def test_an_unknown_name_gets_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"unknown format '{name}', did you mean .*{nearest}.*[?]"):
        get_format(name)


def test_a_name_like_no_other_gets_the_list():
    with pytest.raises(
        ValueError, match=r"unknown format 'xyz'; choose one of amdfp4, bf16, fp16, fp8_b"
    ):
        get_format("xyz")


@pytest.mark.parametrize("target", ["t0", "t0.0"])
def test_a_target_of_zero_is_refused(target):
    with pytest.raises(ValueError, match=rf"'hifp8:{target}': a scale to 0 is out of range"):
        get_format(f"hifp8:{target}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((E2M1, BlockScaling(32, "floor"), "hybrid"), "e2m1 elements have no hybrid rounding"),
        ((HiFloat8(), BlockScaling(32, "floor")), "puts block scales on HiFloat8"),
        ((HiFloat8(), GroupScaling()), "puts block scales on HiFloat8"),
        (
            (HiFloat8(), BlockScaling(16, scale="e4m3", outer="tensor")),
            "puts block scales on HiFloat8",
        ),
        ((Cast(torch.bfloat16), TensorScaling(1.0)), "a plain torch cast, which has no scale"),
        ((Cast(torch.float16), None, "stochastic"), "and rounds to nearest"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, message):
    with pytest.raises(ValueError, match=f"format 'x'.*{message}"):
        Format("x", *arguments)


def test_unknown_ways_to_round_are_refused():
    with pytest.raises(ValueError, match="unknown rounding 'up'; choose one of nearest, stoch"):
        Format("x", E2M1, rounding="up")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hifp8:hr:sr", "'sr' sets the rounding a second time"),
        ("mxfp8:floor:rceil", "'rceil' sets the rule a second time"),
        ("mx:e4m3:b32:floor:rceil", "'rceil' sets the rule a second time"),
        ("hifp8:t15:t224", "'t224' sets the target a second time"),
        ("mxfp8:sr:sr", "'sr' sets the rounding a second time"),
        ("mxfp8:", "mxfp8 does not take ''"),
        ("mx:e4m3:b32:floor:", "mx:e4m3:b32:floor does not take ''"),
    ],
)
def test_contradictions_and_empty_variants_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        get_format(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mx:e4m3:b1000000000:floor", "a block of 1 x 1000000000 values; choose at most 65536"),
        (f"mx:e4m3:b{WHOLE_AXIS}:floor", "or row for whole rows"),
        ("mx:e4m3:b2048x1024:floor", "a block of 2048 x 1024 values; .* 1048576 in a block"),
        ("mx:e4m3:b2048:floor:2d", "a block of 2048 x 2048 values; .* 1048576 in a block"),
        ("nvfp4:bound0", "a bound of 0 is out of range; choose a number"),
        ("nvfp4:bound1" + "0" * 39, "a bound of 1e\\+39 is out of range; choose a number"),
        ("nvfp4:top0", "a top of 0 is out of range; choose a number from 2\\^-32 to 2\\^32"),
        ("fp8_block:top1" + "0" * 39, "a top of 1e\\+39 is out of range; choose a number"),
        ("amdfp4:top0." + "0" * 60 + "1", "a top of 1e-61 is out of range; choose a number"),
        ("hifp8:t1" + "0" * 39, "a scale to 1e\\+39 is out of range; choose a target"),
        ("mxfp4:head1/1" + "0" * 39, "choose a fraction of the largest number, from 2\\^-32 to 1"),
        ("nvfp4:head" + "9" * 180, "choose a fraction of the largest number, from 2\\^-32 to 1"),
        ("nvfp4:head" + "9" * 5000, "name 'nvfp4:head9999999999'... has 5010 characters"),
        ("x" * 10_000, "has 10000 characters; .* at most 200 characters"),
        ("mxfp8:2d:2d", "'2d' is given twice; remove one"),
    ],
)
def test_numbers_out_of_range_are_refused_in_a_short_message(name, message):
    with pytest.raises(ValueError, match=message) as error:
        get_format(name)
    assert len(str(error.value)) < 700


def test_a_headroom_beyond_float64_is_refused():
    with pytest.raises(ValueError, match="choose a fraction of the largest number"):
        BlockScaling(16, "floor", headroom="9" * 400)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("amdfp4:bound300:outer-row", "amdfp4:outer-row:bound300"),
        ("fp8_block:ue8m0:outer-none", "fp8_block:ue8m0"),
        ("nvfp4:eden:top5:outer-1x64", "nvfp4:top5:outer-1x64:bound255.99:eden"),
    ],
)
def test_variants_may_have_any_order(name, canonical):
    first, *variants = name.split(":")
    for order in itertools.permutations(variants):
        assert get_format(":".join([first, *order])).name == canonical


@pytest.mark.parametrize("target", ["1000000", "0.1234567", "0.00001", "15", "32768.5"])
def test_a_target_s_name_reads_back(target):
    fmt = get_format(f"hifp8:t{target}")
    assert fmt.name == f"hifp8:t{target}"
    assert get_format(fmt.name) == fmt


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp8_e4m3:delayed0", "an amax history of 0; choose a length from 1 to 65536"),
        ("fp8_e4m3:delayed70000", "an amax history of 70000"),
        ("fp8_e4m3:delayed:recent", "'recent' sets the amax a second time"),
        ("fp8_e4m3:margin1", r"does not take 'margin1'; it takes .*, sr, pow2, delayed"),
        ("fp8_e4m3:delayed:margin", r"recent, margin<k>"),
        ("nvfp4:delayed", "nvfp4 does not take 'delayed'"),
        ("mxfp8:global", "mxfp8 does not take 'global'; it takes floor"),
        ("amdfp4:global", "amdfp4 does not take 'global'; it takes .*outer-tensor"),
        ("nvfp4:global:outer-row", "nvfp4 does not take 'global'"),
        ("fp8_e4m3:delayed:global", "'global' sets the amax a second time"),
    ],
)
def test_a_source_of_the_amax_that_makes_no_sense_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        get_format(name)
