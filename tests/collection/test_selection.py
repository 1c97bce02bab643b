"""Test the flags that select tensors, and the errors for invalid values."""

import itertools

import pytest
import torch

from megatron.collection.iteration_windows import Iterations, check_in_run, how_many
from megatron.collection.module_identity import ModuleIdentity
from megatron.collection.number_selection import NumberSelection
from megatron.collection.selection import DEFAULT_NAMES, Selection
from megatron.collection.tensor_slice import Slices
from megatron.tensor_record import ON_REQUEST, TENSOR_NAMES

QKV = ModuleIdentity("decoder.layers.10.self_attention.linear_qkv", 10)
CORE = ModuleIdentity("decoder.layers.10.self_attention.core_attention", 10)
FC1 = ModuleIdentity("decoder.layers.1.mlp.linear_fc1", 1)
HEAD = ModuleIdentity("output_layer", -1)
MODEL = [(QKV, "linear"), (CORE, "attention"), (FC1, "linear"), (HEAD, "linear")]


def numbers(spec, total=6):
    return NumberSelection.parse(spec, total, flag="--collect-layers", what="layers")


@pytest.mark.parametrize(
    ("spec", "selected"),
    [
        ("all", {-1, 0, 1, 2, 3, 4, 5}),
        ("first,last", {0, 5}),
        ("0,2-4", {0, 2, 3, 4}),
        ("1", {1}),
        ("3-3, last", {3, 5}),
    ],
)
def test_numbers_are_selected_one_by_one_by_range_and_by_name(spec, selected):
    found = numbers(spec)
    assert {n for n in range(-1, 6) if n in found} == selected
    assert found.count(6) == len(selected - {-1})


@pytest.mark.parametrize("spec", ["6", "0-6", "4-2", "", "a", "1,,2", "-1"])
def test_numbers_that_do_not_exist_are_refused(spec):
    with pytest.raises(ValueError, match=rf"--collect-layers {spec}: .*; give all, or"):
        numbers(spec)


@pytest.mark.parametrize(
    ("spec", "start", "every", "selected"),
    [
        (None, None, None, list(range(1, 31))),
        (None, 7, None, list(range(7, 31))),
        (None, None, 10, [1, 11, 21]),
        (None, 5, 10, [5, 15, 25]),  # counted from the start, not from 0
        ("5-:10", None, None, [5, 15, 25]),
        ("7", None, None, [7]),
        ("1-3,28-", None, None, [1, 2, 3, 28, 29, 30]),  # both ends included
        ("2-9:3, 20-21", None, None, [2, 5, 8, 20, 21]),
    ],
)
def test_iterations(spec, start, every, selected):
    found = Iterations.parse(spec, start, every)
    assert [n for n in range(1, 31) if n in found] == selected
    assert list(itertools.takewhile(lambda n: n <= 30, found)) == selected
    for done in (0, 4, 5, 6, 29):
        rest = itertools.takewhile(lambda n: n <= 30, found.after(done))
        assert list(rest) == [n for n in selected if n > done]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("1..3", None, None), "'1..3' is not understood; give iterations and windows such as 7"),
        (("", None, None), "'' is not understood"),
        (("7:2", None, None), "'7:2' is not understood"),
        (("0-3", None, None), "0-3 contains no iteration; the first is 1"),
        (("5-3", None, None), "5-3 contains no iteration"),
        (("1-9:0", None, None), "1-9:0 contains no iteration"),
        (("1-3,3-5", None, None), "3-5 begins before the end of the previous window; give"),
        (("4-,9", None, None), "9 begins before"),
        (("1-3", 2, None), "and --collect-start both select iterations; give one"),
        (("1-3", None, 2), "and --collect-every both select iterations"),
        ((None, 0, None), "--collect-start is 0; give 1 or more"),
        ((None, None, 0), "--collect-every is 0; give 1 or more"),
    ],
)
def test_iterations_that_mean_nothing_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        Iterations.parse(*flags)


@pytest.mark.parametrize(
    ("control_iter", "flags", "done", "expected"),
    [
        (None, (None, None, None), 0, 1),
        (None, (None, 100, None), 0, 1),
        (3, (None, 100, 10), 0, 3),
        (None, ("1-3,8", None, None), 0, 4),  # all iterations of the list
        (None, ("1-3,8", None, None), 2, 2),  # those that are left in a resumed run
        (None, ("1-3,100-", None, None), 0, 0),
        (2, ("1-3,100-", None, None), 0, 2),
        (0, ("1-3", None, None), 0, 0),
    ],
)
def test_how_many_iterations_end_the_run(control_iter, flags, done, expected):
    assert how_many(control_iter, Iterations.parse(*flags), done) == expected


def test_more_iterations_than_are_named_are_refused():
    with pytest.raises(ValueError, match=r"--control-iter 5 is never reached: .* selects 3 iter"):
        how_many(5, Iterations.parse("1-3", None, None), 0)
    with pytest.raises(ValueError, match="selects 3 iter"):
        how_many(5, Iterations.parse("1-3", None, None), 2)
    assert how_many(3, Iterations.parse("1-3", None, None), 2) == 1, "resumed after iteration 2"


@pytest.mark.parametrize(
    ("flags", "done", "trained", "refused"),
    [
        (("8-9", None, None), 0, 10, False),
        (("8-9", None, None), 9, 20, True),
        (("11-", None, None), 0, 10, True),
        ((None, 11, None), 0, 10, True),
        ((None, 11, None), 0, None, False),
        ((None, None, None), 10, 10, False),
    ],
)
def test_windows_that_the_run_never_enters_are_refused(flags, done, trained, refused):
    found = Iterations.parse(*flags)
    if not refused:
        check_in_run(found, 1, done, trained)
        return
    with pytest.raises(
        ValueError, match=f"none of the iterations .*{done + 1} to {trained}; select"
    ):
        check_in_run(found, 1, done, trained)


def test_iterations_after_the_last_are_not_gone_through():
    with pytest.raises(ValueError, match="selects 10 of the iterations 1 to 100"):
        check_in_run(Iterations.parse(None, None, 10), 10**15, 0, 100)


def test_fewer_iterations_than_are_to_be_collected_are_refused():
    found = Iterations.parse(None, None, 4)
    check_in_run(found, 3, 0, 9)
    with pytest.raises(ValueError, match=r"selects 3 of the iterations 1 to 10.*--control-iter 3"):
        check_in_run(found, 4, 0, 10)


def test_more_iterations_than_the_run_trains_are_refused_at_once():
    every = Iterations.parse(None, None, None)
    check_in_run(every, 10, 0, 10)
    with pytest.raises(ValueError, match=r"--control-iter 11 is more than the 10 .*to --train-ite"):
        check_in_run(every, 11, 0, 10)
    check_in_run(every, 10, 4, 10)  # resumed after iteration 4 with the same flags
    with pytest.raises(ValueError, match=r"--control-iter 11 is more than the 10"):
        check_in_run(every, 11, 4, 10)


def wanted(**flags):
    """Return the tensors of each module that are collected."""
    chosen = Selection.parse(num_layers=12, world_size=4, **flags)
    chosen.check_reached((identity, TENSOR_NAMES[kind]) for identity, kind in MODEL)
    return {
        identity.name.rpartition(".")[2]: set(TENSOR_NAMES[kind]) & chosen.names
        for identity, kind in MODEL
        if chosen.wants(identity, kind)
    }


LINEAR, ATTENTION = (set(TENSOR_NAMES[kind]) - set(ON_REQUEST) for kind in ("linear", "attention"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {"linear_qkv": LINEAR, "core_attention": ATTENTION, "linear_fc1": LINEAR}),
        ({"collect_layers": "1"}, {"linear_fc1": LINEAR}),
        ({"collect_modules": ["linear_*"]}, {"linear_qkv": LINEAR, "linear_fc1": LINEAR}),
        (
            {"collect_modules": ["mlp.*,core_*"]},
            {"core_attention": ATTENTION, "linear_fc1": LINEAR},
        ),
        ({"collect_modules": ["decoder.layers.1.*"]}, {"linear_fc1": LINEAR}),
        (
            {"collect_tensors": ["input", "query"]},
            {"linear_qkv": {"input"}, "core_attention": {"query"}, "linear_fc1": {"input"}},
        ),
        ({"collect_tensors": ["attention_probs"]}, {"core_attention": {"attention_probs"}}),
        (
            {"collect_tensors": ["all,attention_probs"], "collect_modules": ["core_attention"]},
            {"core_attention": ATTENTION | {"attention_probs"}},
        ),
        (
            {"collect_operations": ["backward"], "collect_modules": ["linear_fc1"]},
            {"linear_fc1": {"grad_output", "grad_input", "grad_weight"}},
        ),
    ],
)
def test_modules_tensors_and_operations_are_added_up(flags, expected):
    assert wanted(**flags) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"collect_tensors": ["inptu"]},
            "--collect-tensors: unknown 'inptu'; choose from all codes que",
        ),
        ({"collect_operations": ["pre"]}, "--collect-operations: unknown 'pre'; choose from forw"),
        (
            {"collect_tensors": ["input", "grad_output"], "collect_operations": ["forward"]},
            "--collect-operations forward leaves out grad_output of --collect-tensors; name",
        ),
        ({"collect_modules": ["linear_x"]}, "'linear_x' matches none of the 3 modules .* linear_q"),
        ({"collect_modules": ["output_layer"]}, "'output_layer' matches none"),
        (
            {"collect_modules": ["linear_*"], "collect_tensors": ["query", "input"]},
            "-tensors query: the selected modules have no such tensor; their tensors are output",
        ),
        ({"collect_ranks": "4"}, "--collect-ranks 4: 4 is not within the ranks 0 to 3"),
        ({"collect_micro_batches": -1}, "--collect-micro-batches is -1; give 0 for no limit"),
        ({"collect_slice": ["s=0-5"]}, "'s=0-5' is not understood; give DIM=START:STOP"),
        ({"collect_tensors": [""]}, "--collect-tensors has no value; give some, or leave it out"),
        ({"collect_modules": [" ,"]}, "--collect-modules has no value"),
        ({"collect_slice": ["q=0:5"]}, "'q=0:5' is not understood.* s .sequence."),
        ({"collect_slice": ["s=5:5"]}, "s=5:5 is empty; STOP must be above START"),
        ({"collect_slice": ["s=0:5:0"]}, "s=0:5:0 is empty"),
        ({"collect_slice": ["s=0:5", "s=6:7"]}, "names the dimension s a second time; give one"),
    ],
)
def test_what_selects_nothing_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        wanted(**flags)


def test_scores_and_probabilities_come_on_request_only():
    assert DEFAULT_NAMES.isdisjoint(ON_REQUEST)
    assert Selection().names == DEFAULT_NAMES


def test_a_slice_is_of_the_named_dimensions_and_says_of_what():
    tensor = torch.arange(8 * 2 * 10).view(8, 2, 10)
    part, where = Slices.parse(["s=2:6", "h=0:100:3"]).cut(tensor, "s[cp:zigzag] b h[tp]")
    assert torch.equal(part, tensor[2:6, :, ::3])
    assert where == {"of": [8, 2, 10], "start": [2, 0, 0], "step": [1, 1, 3]}


@pytest.mark.parametrize("dims", ["s b h | partial[tp]", "k b d"])
def test_what_a_slice_leaves_whole_is_not_called_a_slice(dims):
    tensor = torch.zeros(8, 2, 10)
    part, where = Slices.parse(["s=0:8"]).cut(tensor, dims)
    assert part is tensor
    assert where is None


def test_a_tensor_that_ends_before_the_slice_is_left_out():
    assert Slices.parse(["s=8:9"]).cut(torch.zeros(8, 2), "s b") == (None, None)
