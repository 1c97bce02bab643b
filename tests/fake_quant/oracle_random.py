"""Philox4x32-10 in numpy, after Salmon et al., SC 2011, and rounding with its bits by tables."""

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint64]


def philox_words(counter: NDArray[np.integer], key: tuple[int, int]) -> Words:
    """Return `[4, n]` words of 32 bits for n counters; 64-bit products are split in halves."""
    words = [row.astype(np.uint64) for row in counter]
    mask = np.uint64(0xFFFFFFFF)
    for number in range(10):
        keys = [
            np.uint64((key[0] + number * 0x9E3779B9) & 0xFFFFFFFF),
            np.uint64((key[1] + number * 0xBB67AE85) & 0xFFFFFFFF),
        ]
        first = words[0] * np.uint64(0xD2511F53)
        second = words[2] * np.uint64(0xCD9E8D57)
        words = [
            (second >> np.uint64(32)) ^ words[1] ^ keys[0],
            second & mask,
            (first >> np.uint64(32)) ^ words[3] ^ keys[1],
            first & mask,
        ]
    return np.stack(words)


def random_integers(shape: tuple[int, ...], seed: int) -> NDArray[np.int64]:
    """Return 24 bits for each value i: word i % 4 of counter i // 4."""
    count = int(np.prod(shape))
    number = np.arange(-(-count // 4))
    zeros = np.zeros_like(number)
    counter = np.stack([number & 0xFFFFFFFF, number >> 32, zeros, zeros])
    words = philox_words(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return (words.T.ravel()[:count] >> np.uint64(8)).astype(np.int64).reshape(shape)


def seed_of(generator_seed: int) -> int:
    """Return the seed that `fake_quantize` draws from a fresh generator with that seed."""
    return int(torch.randint(1 << 62, (), generator=torch.Generator().manual_seed(generator_seed)))
