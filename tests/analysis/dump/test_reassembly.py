"""Test that shards are joined to logical tensors.

The shards are written by hand, or come from parallel runs that are compared with a run on one rank.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from megatron.analysis.dump.reassembly import Cut, parse_dims
from megatron.analysis.store import TensorStore
from megatron.tensor_record import TensorRecord
from tests.analysis.fake_dump import write_tensor

WHOLE = torch.arange(8 * 2 * 6, dtype=torch.float32).view(8, 2, 6)
GROUPS = ("tp", "pp", "dp", "cp", "ep", "etp")


def write(
    folder,
    tensor,
    dims,
    whole,
    *,
    counter=1,
    module="decoder.layers.0.mlp.linear_fc1",
    name="input",
    world=0,
    world_size=4,
    recomputed=False,
    **places,
):
    """Write one shard; `places` are the rank's coordinates and group sizes, by default 0 of 1."""
    rank = {"world": world, "world_size": world_size, **dict.fromkeys(GROUPS, 0)}
    rank |= {f"{group}_size": 1 for group in GROUPS} | places
    record = TensorRecord(
        run_id="r",
        iteration=1,
        micro_batch=0,
        sample_idx=0,
        counter=counter,
        timestamp="20250908_095220",
        layer_type="linear",
        layer_idx=0,
        module=module,
        operation="forward",
        phase="pre",
        component="linear",
        tensor_name=name,
        quant_type="bf16",
        format=None,
        shape=list(tensor.shape),
        dtype="float32",
        dims=dims,
        global_shape=list(whole.shape),
        rank=rank,
        recomputed=recomputed,
        wall_time=0.0,
    )
    return write_tensor(folder, record, tensor)


def write_grid(folder, dims, part_of, *, sizes=(2, 2), whole=WHOLE):
    """Write the shard of each rank of a cp x tp grid, with tp varying fastest."""
    folder.mkdir(exist_ok=True)
    cp_size, tp_size = sizes
    for cp, tp in itertools.product(range(cp_size), range(tp_size)):
        at = {"cp": cp, "tp": tp, "cp_size": cp_size, "tp_size": tp_size}
        write(folder, part_of(cp, tp), dims, whole, world=cp * tp_size + tp, **at)


def zigzag(cp):
    """Return the tokens that one of two context-parallel ranks holds, in two chunks."""
    return [0, 1, 6, 7] if cp == 0 else [2, 3, 4, 5]


def columns(cp, tp):
    return WHOLE[..., 3 * tp : 3 * tp + 3].clone()


@pytest.mark.parametrize(
    ("dims", "part_of"),
    [
        ("s b h[tp]", lambda cp, tp: columns(cp, tp)),
        ("s[tp] b h", lambda cp, tp: WHOLE[4 * tp : 4 * tp + 4].clone()),
        ("s[cp:zigzag] b h", lambda cp, tp: WHOLE[zigzag(cp)]),
        ("s[cp:zigzag] b h[tp]", lambda cp, tp: columns(cp, tp)[zigzag(cp)]),
        ("s[cp] b[tp] h", lambda cp, tp: WHOLE[4 * cp : 4 * cp + 4, tp : tp + 1].clone()),
        ("s b h | partial[tp]", lambda cp, tp: WHOLE - 10 if tp else torch.full_like(WHOLE, 10.0)),
        ("s b h | partial[cp]", lambda cp, tp: WHOLE - 10 if cp else torch.full_like(WHOLE, 10.0)),
        ("s b h | partial[tp,cp]", lambda cp, tp: WHOLE / 4),
        ("s b h | partial[tp] partial[cp]", lambda cp, tp: WHOLE / 4),
        ("s b h[tp] | partial[cp]", lambda cp, tp: (WHOLE / 2)[..., 3 * tp : 3 * tp + 3].clone()),
        ("s[cp:zigzag] b h | partial[tp]", lambda cp, tp: WHOLE[zigzag(cp)] / 2),
        ("s b h", lambda cp, tp: WHOLE),
    ],
)
def test_shards_of_a_grid_of_ranks(tmp_path, dims, part_of):
    write_grid(tmp_path, dims, part_of)
    store = TensorStore(tmp_path)
    assert torch.equal(store.load_global(tensor_name="input"), WHOLE)
    assert torch.equal(store.load_global(3), WHOLE), "by any one of its shards"


def test_partial_sums_are_rounded_once(tmp_path):
    """If the terms were added one by one in float32, 1 + 2^-24 would round to 1 each time."""
    terms = [1.0, 2**-24, 2**-24, 2**-24]  # 1 + 1.5 ulp, a tie that goes to even
    for rank, term in enumerate(terms):
        part = torch.full((1,), term)
        write(tmp_path, part, "h | partial[tp]", part, world=rank, tp=rank, tp_size=4)
    assert TensorStore(tmp_path).load_global(0).item() == 1 + 2**-22


def test_how_dims_are_read():
    assert parse_dims("s[cp:zigzag] b h[tp] | partial[ep]") == [
        Cut("cp", 0, zigzag=True),
        Cut("tp", 2),
        Cut("ep", None),
    ]
    for wrong in ("s b h[tp", "s b h{tp}", "s b h | sum[tp]"):
        with pytest.raises(ValueError, match=r"dims .* is not understood; give "):
            parse_dims(wrong)
    with pytest.raises(ValueError, match="no parallel group 'mp'; choose from tp, pp, dp"):
        parse_dims("s b h[mp]")


def test_a_gap_is_refused_and_named(tmp_path):
    write_grid(tmp_path, "s[cp:zigzag] b h[tp]", lambda cp, tp: columns(cp, tp)[zigzag(cp)])
    for path in tmp_path.glob("*rank0[12]*"):
        path.unlink()
    with pytest.raises(
        ValueError, match="2 of 4 shards are missing, from ranks cp=0 tp=1; cp=1 tp=0"
    ):
        TensorStore(tmp_path).load_global(0)


def test_a_replica_more_or_less_is_no_gap(tmp_path):
    write_grid(tmp_path, "s b h[tp]", columns)
    next(tmp_path.glob("*rank03*")).unlink()
    assert torch.equal(TensorStore(tmp_path).load_global(0), WHOLE)


def test_a_replica_that_differs_is_refused_and_named(tmp_path):
    write_grid(tmp_path, "s b h", lambda cp, tp: WHOLE + (torch.arange(6) == 2) * (cp + tp == 2))
    said = (
        r"input of .*fc1: rank 3 .*rank03_input.pt.* as rank 0 .*16 of 96 values differ, by up to 1"
    )
    with pytest.raises(ValueError, match=said):
        TensorStore(tmp_path).load_global(0)


def test_replicas_with_the_same_nan_agree_and_zeros_of_two_signs_do_not(tmp_path):
    nan = torch.tensor([torch.nan, 0.0])
    write_grid(tmp_path / "a", "h", lambda cp, tp: nan, whole=nan)
    assert TensorStore(tmp_path / "a").load_global(0)[0].isnan()
    write_grid(tmp_path / "b", "h", lambda cp, tp: nan * (-1) ** tp, whole=nan)
    with pytest.raises(ValueError, match=r"[12] of 2 values differ"):
        TensorStore(tmp_path / "b").load_global(0)


def test_a_shard_that_is_there_twice_is_refused(tmp_path):
    write_grid(tmp_path, "s b h[tp]", columns)
    write(
        tmp_path, columns(0, 1), "s b h[tp]", WHOLE, counter=2, world=1, tp=1, tp_size=2, cp_size=2
    )
    with pytest.raises(
        ValueError, match=r"rank 1 has more than one such tensor \(.*_0001_.*_0002_"
    ):
        TensorStore(tmp_path).load_global(0)
    assert torch.equal(TensorStore(tmp_path).load_global(counter=1), WHOLE)


def test_shards_that_do_not_fit_are_refused(tmp_path):
    write_grid(tmp_path / "a", "s b h[tp]", lambda cp, tp: columns(cp, tp)[: 8 - tp])
    with pytest.raises(ValueError, match="its shards along tp do not fit together"):
        TensorStore(tmp_path / "a").load_global(0)
    write_grid(tmp_path / "b", "s b h[tp]", columns, whole=WHOLE[:4])
    with pytest.raises(ValueError, match=r"shape \[8, 2, 6\], but .* is \[4, 2, 6\]"):
        TensorStore(tmp_path / "b").load_global(0)


def test_more_than_one_logical_tensor_is_refused(tmp_path):
    write(tmp_path, WHOLE, "s b h", WHOLE)
    write(tmp_path, WHOLE, "s b h", WHOLE, counter=2, module="decoder.layers.0.mlp.linear_fc2")
    store = TensorStore(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"2 records of more than one tensor match; give module='.*fc1' or '.*fc2', or",
    ):
        store.load_global(layer=0)
    assert torch.equal(store.load_global(module="linear_fc2"), WHOLE)
    with pytest.raises(ValueError, match="no tensor has layer=7; see `records`"):
        store.load_global(layer=7)


def test_data_parallel_ranks_have_other_data_but_the_same_weights(tmp_path):
    for dp in (1, 0):
        at = {"world": dp, "world_size": 2, "dp": dp, "dp_size": 2}
        write(tmp_path, WHOLE + dp, "s b h", WHOLE, **at)
        write(tmp_path, WHOLE, "s b h", WHOLE, counter=2, name="weight", **at)
    store = TensorStore(tmp_path)
    with pytest.raises(ValueError, match="data-parallel ranks 0, 1 hold different data; give dp="):
        store.load_global(tensor_name="input")
    assert torch.equal(store.load_global(tensor_name="weight", dp=1), WHOLE)
    with pytest.raises(ValueError, match="no data-parallel rank 2; choose from 0, 1"):
        store.load_global(tensor_name="input", dp=2)
    assert torch.equal(store.load_global(tensor_name="input", dp=1), WHOLE + 1)
    assert torch.equal(store.load_global(tensor_name="weight"), WHOLE)
    both = store.load_global_all(tensor_name="input")
    assert [torch.equal(x, WHOLE + dp) for dp, x in enumerate(both)] == [True, True]


def test_an_expert_belongs_to_the_ranks_of_its_own_groups(tmp_path):
    """8 ranks, ep 2, etp 2: ranks 0, 1 and 4, 5 hold expert 0, each pair for its own tokens."""
    for world in (0, 1, 4, 5):
        etp, data = world % 2, world // 4
        write(
            tmp_path,
            (WHOLE + data)[..., 3 * etp : 3 * etp + 3].clone(),
            "s b h[etp]",
            WHOLE,
            module="decoder.layers.0.mlp.experts.local_experts.0.linear_fc2",
            world=world,
            world_size=8,
            etp=etp,
            etp_size=2,
            ep_size=2,
            dp=world // 2,
            dp_size=4,
            tp=world % 2,
            tp_size=2,
        )
    first, second = TensorStore(tmp_path).load_global_all(0)
    assert torch.equal(first, WHOLE)
    assert torch.equal(second, WHOLE + 1)


def test_of_a_recomputed_forward_the_first_counts(tmp_path):
    write(tmp_path, WHOLE, "s b h", WHOLE)
    write(tmp_path, WHOLE + 1, "s b h", WHOLE, counter=2, recomputed=True)
    store = TensorStore(tmp_path)
    assert torch.equal(store.load_global(1), WHOLE)
    assert torch.equal(store.load_global(recomputed=True), WHOLE + 1)


def tensors(store, **conditions):
    """Return every logical tensor as {(micro-batch, module, name): tensor}."""
    found = store.select(**conditions).drop_duplicates(["micro_batch", "module", "tensor_name"])
    return {
        (row.micro_batch, row.module, row.tensor_name): store.load_global(row)
        for row in found.itertuples()
    }


def of_one_rank(key, tensor, size):
    """Return the tensors of one rank, cut as on two ranks.

    Both parts of a gated fc1 are sharded: [gate0, up0, gate1, up1].
    """
    _, module, name = key
    if not module.endswith("linear_fc1") or name in ("input", "grad_input"):
        return tensor
    axis = 0 if "weight" in name else tensor.dim() - 1
    parts = tensor.chunk(2 * size, axis)
    return torch.cat([*parts[::2], *parts[1::2]], axis)


@pytest.mark.parametrize("layout", ["tp2", "tp2sp", "pp2", "cp2"])
def test_tensors_of_two_ranks_put_together_are_those_of_one(dumps, layout):
    store = TensorStore(dumps / layout)
    assert store.records["rank"].nunique() == 2
    expected, found = tensors(TensorStore(dumps / "one")), tensors(store)
    # weights are saved with the first micro-batch only
    assert len(expected) == 2 * 2 * 32 - 2 * 4
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        size = 2 if layout.startswith("tp2") else 1
        tensor = of_one_rank(key, tensor, size)
        if layout == "pp2":
            assert torch.equal(tensor, expected[key]), key
        largest = expected[key].abs().max().item()
        torch.testing.assert_close(
            tensor, expected[key], rtol=1e-4, atol=1e-5 * largest, msg=str(key)
        )


def test_experts_spread_over_two_ranks_put_together_are_those_of_one(dumps):
    """Two ranks compute the two micro-batches of one rank.

    One rank divides its gradients by two micro-batches, so those of two ranks are exactly twice as
    large. An expert gets the tokens of both ranks at once; only the gradient of its weight sums
    over them in a different order.
    """
    one, spread = TensorStore(dumps / "experts"), TensorStore(dumps / "ep2")
    experts = spread.select(module="*local_experts*")
    numbers = experts["module"].str.extract(r"local_experts\.(\d+)", expand=False).astype(int)
    assert set(zip(experts["rank"], numbers, strict=True)) == {(0, 0), (0, 1), (1, 2), (1, 3)}
    assert set(spread.records["module"]) == set(one.records["module"])
    compared = 0
    for module, name in set(
        zip(spread.records["module"], spread.records["tensor_name"], strict=True)
    ):
        where = {"module": module, "tensor_name": name}
        parts = [one.load_global(micro_batch=batch, **where) for batch in (0, 1)]
        times = 2 if name.startswith("grad") else 1
        if name == "weight":
            pairs = [(spread.load_global(**where), parts[0])]
        elif "local_experts" not in module:
            pairs = [(spread.load_global(dp=dp, **where), times * parts[dp]) for dp in (0, 1)]
        elif name == "grad_weight":
            found, expected = spread.load_global(**where), times * (parts[0] + parts[1])
            largest = expected.abs().max().item()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * largest)
            continue
        else:
            pairs = [(spread.load_global(**where), times * torch.cat(parts))]
        for found, expected in pairs:
            assert torch.equal(found, expected), (module, name)
            compared += 1
    # For each rank: 3 attentions (8 tensors) and 18 linear layers (5).
    # Once: 34 weights, and 16 linear layers of experts (4).
    assert compared == 2 * (3 * 8 + 18 * 5) + 34 + 16 * 4


def test_each_data_parallel_rank_has_what_one_rank_has_for_its_data(dumps):
    store, one = TensorStore(dumps / "dp2"), TensorStore(dumps / "one")
    where = {"layer": 1, "micro_batch": 0, "module": "linear_fc2", "tensor_name": "input"}
    first, second = store.load_global_all(**where)
    assert torch.equal(first, one.load_global(**where))
    assert not torch.equal(first, second)
    weight = store.load_global(**where | {"tensor_name": "weight"})
    assert torch.equal(weight, one.load_global(**where | {"tensor_name": "weight"}))


def test_a_real_gap_is_named(dumps, tmp_path):
    for path in (dumps / "tp2").iterdir():
        if not re.search(r"rank01_output\.pt$", path.name):
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(ValueError, match="1 of 2 shards are missing, from ranks tp=1"):
        TensorStore(tmp_path).load_global(
            layer=0, micro_batch=0, module="linear_proj", tensor_name="output"
        )
