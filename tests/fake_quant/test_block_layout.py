"""Positions of blocks in a tensor, compared with loops over indices."""

import itertools

import pytest
import torch

from megatron.fake_quant import Format, fake_quantize, get_format
from megatron.fake_quant.block_layout import BlockLayout

SQUARE = get_format("nvfp4:2d")
FLAT = get_format("nvfp4")
WHOLE = get_format("fp8_e4m3")
SHAPES = [(1,), (16,), (40,), (3, 33), (17, 16), (32, 48), (2, 18, 33), (1, 2, 3, 20)]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Return 1, 2, 3 ...: all values differ, and none is the 0 of padding."""
    return torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)


def has_blocks(shape: tuple[int, ...], fmt: Format, axis: int) -> bool:
    """Return whether the shape has blocks; square ones need one of a matrix's last two axes."""
    return not fmt.square or (len(shape) > 1 and axis % len(shape) >= len(shape) - 2)


@pytest.mark.parametrize(
    ("shape", "axis", "fmt"),
    [
        pytest.param(shape, axis, fmt, id=f"{shape}-{axis}-{fmt.name}")
        for shape in SHAPES
        for axis in range(len(shape))
        for fmt in (FLAT, SQUARE, WHOLE)
        if has_blocks(shape, fmt, axis)
    ],
)
def test_each_block_holds_its_values_and_zeros(shape, axis, fmt):
    x = numbered(shape)
    layout = BlockLayout.of(shape, fmt, axis)
    blocks = layout.to_blocks(x)
    where = {}  # number of a value -> its block
    for index in itertools.product(*map(range, shape)):
        across = [i for place, i in enumerate(index) if place != axis]
        if fmt.block_size is None:
            block = ()
        elif fmt.square:
            block = (*across[:-1], across[-1] // 16, index[axis] // 16)
        else:
            block = (*across, index[axis] // 16)
        where.setdefault(block, set()).add(float(x[index]))
    found = [set(block.tolist()) - {0.0} for block in blocks.flatten(0, -2)]
    assert sorted(map(sorted, found)) == sorted(map(sorted, where.values()))
    if fmt.block_size is not None:
        for block, values in where.items():  # in the order of rows
            assert set(blocks[block].tolist()) - {0.0} == values
        assert blocks.shape[-1] == (256 if fmt.square else 16)


@pytest.mark.parametrize("shape", [*SHAPES, ()])
@pytest.mark.parametrize("fmt", [FLAT, SQUARE, WHOLE], ids=lambda fmt: fmt.name)
def test_blocks_and_rows_are_undone(shape, fmt):
    x = numbered(shape)
    for axis in range(-len(shape), len(shape)) if shape else [0]:
        if not has_blocks(shape, fmt, axis) or (not shape and fmt.block_size is not None):
            continue
        layout = BlockLayout.of(shape, fmt, axis)
        rows = layout.from_blocks(layout.to_blocks(x))
        assert tuple(rows.shape) == layout.rows_shape == tuple(layout.to_rows(x).shape)
        assert torch.equal(rows, layout.to_rows(x))
        assert torch.equal(layout.from_rows(rows), x)


def test_rows_have_the_axis_last():
    x = numbered((2, 3, 5))
    layout = BlockLayout.of((2, 3, 5), FLAT, 0)
    assert layout.rows_shape == (3, 5, 2)
    assert torch.equal(layout.to_rows(x), x.permute(1, 2, 0))
    assert layout.to_rows(x).data_ptr() == x.data_ptr()


def test_an_axis_counts_from_either_end():
    assert BlockLayout.of((4, 5, 6), FLAT, -2) == BlockLayout.of((4, 5, 6), FLAT, 1)


@pytest.mark.parametrize(("shape", "axis"), [((64,), 0), ((2, 3, 64), 0), ((2, 3, 64), -3)])
@pytest.mark.parametrize("name", ["mxfp8:2d", "nvfp4:2d"])
def test_square_blocks_need_one_of_the_last_two_axes(shape, axis, name):
    message = rf"format '{name}' has blocks of .* over the last two axes; .* give a matrix"
    with pytest.raises(ValueError, match=message):
        fake_quantize(torch.ones(shape), name, axis=axis)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4:even"])
def test_square_blocks_share_one_scale(name):
    """A block's largest value affects its 32 x 32 neighbors, and no others."""
    x = torch.rand(70, 70, generator=torch.Generator().manual_seed(22)) + 1
    x[40, 3] = 2.0**40
    y = fake_quantize(x, f"{name}:2d")
    zeroed = torch.zeros(70, 70, dtype=torch.bool)
    zeroed[32:64, :32] = True
    zeroed[40, 3] = False
    assert torch.equal(y == 0, zeroed)
    flat = x[64:, 64:].reshape(1, -1)  # the corner is a block of 36 values
    by_hand = fake_quantize(torch.nn.functional.pad(flat, (0, 28)), f"mx:{element(name)}:b64:even")
    if name.endswith("even"):
        assert torch.equal(y[64:, 64:].reshape(1, -1), by_hand[:, :36])


def element(name: str) -> str:
    return get_format(name).element.name
