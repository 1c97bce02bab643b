"""Names of accumulators: canonical spelling, what they mean, and what is refused."""

import pytest

from megatron.fake_quant.accumulate import ACCUMULATORS, SumType, get_accumulator


@pytest.mark.parametrize("name", ACCUMULATORS)
def test_a_named_accumulator_is_found_in_upper_and_lower_case(name):
    assert get_accumulator(name).name == name
    assert get_accumulator(name.upper()) is ACCUMULATORS[name]


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("fda:l32:f13:m13:rz", "fda:l32:f13:m13:rz"),
        ("FDA:rz:m013:F13:l32", "fda:l32:f13:m13:rz"),
        ("fda:l32:f13:e8m13:rz:p128", "fda:l32:f13:m13:rz:p128"),
        ("fda:l32:f13:m13:rz:p128:pe8m23", "fda:l32:f13:m13:rz:p128"),
        ("fda:pe6m9:p64:l1:fx:e6m9:rne", "fda:l1:fx:e6m9:rne:p64:pe6m9"),
        ("fda:l1:fx:m7:rne:p64:pe8m7", "fda:l1:fx:m7:rne:p64:pe8m7"),
    ],
)
def test_a_spelled_out_name_has_one_canonical_spelling(given, canonical):
    accumulator = get_accumulator(given)
    assert accumulator.name == canonical
    assert get_accumulator(canonical) == accumulator


def test_the_parts_of_a_spelled_out_name_are_fields():
    accumulator = get_accumulator("fda:l16:f14:e6m9:rne:p64:pe8m10")
    assert (accumulator.step, accumulator.align_bits) == (16, 14)
    assert accumulator.keep == SumType(9, "rne", 6)
    assert (accumulator.keep.smallest_exponent, accumulator.keep.largest_exponent) == (-30, 31)
    assert (accumulator.promote_every, accumulator.promote_to) == (64, SumType(10, "rne"))
    assert get_accumulator("fda:l1:fx:m23:rne").align_bits is None


def test_the_spelling_of_a_unit_sums_as_the_unit_does():
    """A spelled-out accumulator takes every element type, but otherwise equals the named one."""
    unit, spelled = get_accumulator("hopper_fp8"), get_accumulator("fda:l32:f13:m13:rz")
    assert (unit.step, unit.align_bits, unit.keep) == (
        spelled.step,
        spelled.align_bits,
        spelled.keep,
    )
    assert spelled.elements == ()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hoper_fp8", "unknown accumulator 'hoper_fp8', did you mean hopper_fp8"),
        ("x", "choose one of hopper_fp8, .*fp16, or spell one out, as in 'fda:l32"),
        ("fda", "unknown accumulator 'fda'"),
        ("fda:", "unknown part ''; write it as in"),
        ("fda:l32:f13:m13", "it lacks the rounding; write it as in"),
        ("fda:l32:rz", "it lacks the fractional bits, the type of the running sum; write"),
        ("fda:l32:l16:f13:m13:rz", "'l16' sets the products per step a second time"),
        ("fda:l32:f13:m13:rz:q1", "unknown part 'q1'"),
        ("fda:l0:f13:m13:rz", "0 products per step; choose a number from 1 to 1024"),
        ("fda:l32:f37:m13:rz", "37 fractional bits; choose a number from 0 to 36"),
        ("fda:l32:f13:m24:rz", "24 mantissa bits; choose a number from 1 to 23"),
        ("fda:l32:f13:e9m3:rz", "9 exponent bits; choose a number from 2 to 8"),
        ("fda:l32:fx:m23:rz", "fx sums a step exactly, which is defined for l1 only, not for l32"),
        ("fda:l32:f13:m13:rz:p100", "after 100 products is inside a step of 32"),
        ("fda:l32:f13:m13:rz:pe8m9", "there is none; add a promotion interval such as p128"),
        (13, "13 is not the name of an accumulator; give a string"),
        ("fda:" + "l" * 200, "choose a name of at most 100 characters"),
    ],
)
def test_a_wrong_name_is_refused_with_the_accepted_ones(name, message):
    with pytest.raises(ValueError, match=message):
        get_accumulator(name)
