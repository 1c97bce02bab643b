"""Random bits against Philox's known answers, an implementation in numpy and statistics."""

import numpy as np
import pytest
import torch

from megatron.fake_quant import fake_quantize
from megatron.fake_quant.random_bits import draw_seed, philox, random_bits

from .oracle_random import philox_words, random_integers

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # The known answers of Random123's philox4x32-10.
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter, key, expected):
    words = [torch.tensor([int(word, 16)]) for word in counter.split()]
    key = tuple(int(word, 16) for word in key.split())
    found = philox(tuple(words), key)
    assert " ".join(f"{int(word):08x}" for word in found) == expected
    ours = philox_words(np.array([[int(word, 16)] for word in counter.split()]), key)
    assert " ".join(f"{int(word[0]):08x}" for word in ours) == expected


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4,), (5, 7), (2, 3, 4, 5), (70000,)])
@pytest.mark.parametrize("seed", [0, 1, (1 << 62) - 1, 0x123456789ABCDEF])
def test_each_value_gets_the_upper_bits_of_its_own_word(shape, seed):
    found = random_bits(shape, seed, CPU)
    assert found.shape == torch.Size(shape)
    assert found.dtype == torch.int32
    np.testing.assert_array_equal(found.numpy(), random_integers(shape, seed))


def test_a_value_s_bits_depend_on_its_place_and_not_on_the_shape():
    flat = random_bits((120,), 7, CPU)
    assert torch.equal(random_bits((2, 3, 20), 7, CPU).flatten(), flat)
    assert torch.equal(random_bits((40,), 7, CPU), flat[:40])


def test_bits_are_even_and_independent():
    """Frequencies of the upper 8 bits, of neighbors' parity and of each bit are within 5 sigma."""
    bits = random_bits((1 << 18,), 99, CPU)
    assert bits.min() >= 0
    assert bits.max() < 1 << 24
    counts = torch.bincount(bits >> 16, minlength=256).double()
    chi_square = ((counts - 1024) ** 2 / 1024).sum()
    assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5
    for shift in range(24):
        ones = bits >> shift & 1
        assert abs(ones.sum() - (1 << 17)) < 5 * 256
        for distance in (1, 2, 4):
            changes = (ones[distance:] ^ ones[:-distance]).sum()
            assert abs(changes - (len(ones) - distance) / 2) < 5 * 256


def test_different_seeds_give_different_bits():
    drawn = torch.stack([random_bits((64,), seed, CPU) for seed in (0, 1, 2, 1 << 32, 1 << 61)])
    assert len(drawn.unique(dim=0)) == 5
    assert len(drawn.unique()) > 300


def test_a_seed_comes_from_the_generator_or_the_default_one():
    one, two = (torch.Generator().manual_seed(3) for _ in range(2))
    before = torch.get_rng_state()
    seeds = [draw_seed(one) for _ in range(100)]
    assert torch.equal(torch.get_rng_state(), before)
    assert seeds == [draw_seed(two) for _ in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 1 << 62 for seed in seeds)
    assert max(seeds) > 1 << 61
    torch.manual_seed(3)
    assert [draw_seed(None) for _ in range(100)] == seeds


@pytest.mark.parametrize(
    "name", ["mxfp8", "nvfp4", "hifp8", "hifp8:hr", "hifp4", "fp8_e4m3", "bf16"]
)
def test_nothing_is_drawn_but_for_stochastic_rounding(name):
    generator = torch.Generator().manual_seed(3)
    state, default = generator.get_state(), torch.get_rng_state()
    fake_quantize(torch.ones(64), name, generator=generator)
    fake_quantize(torch.ones(64), name)
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(torch.get_rng_state(), default)
