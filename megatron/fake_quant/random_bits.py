"""Generate random bits that depend only on a seed and on a value's position in the tensor.

Stochastic rounding needs the same bits on every device, for every memory layout and number of
threads. A counter-based generator provides them: Philox4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011) turns a key and the index of a value, in row-major order,
into bits. Value i gets word i % 4 of the block with counter i // 4.
"""

import hashlib

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF
SEEDS = 1 << 62  #: number of seeds, which are the integers from 0 on
RANDOM_BITS = 24  #: number of random bits that rounding uses per value; float32 holds them exactly

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a seed for one tensor from `generator`; None means torch's default CPU generator.

    If the generator is on a CUDA device, the call waits for the device.

    Raises:
        ValueError: if `generator` is neither a generator nor None.
    """
    if not isinstance(generator, torch.Generator | None):
        raise ValueError(f"generator={generator!r}; give a torch.Generator, or seed={generator!r}")
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(0, SEEDS, (), generator=generator, device=device))


def check_seed(seed: int | Tensor) -> None:
    """Raise ValueError unless `seed` is an integer from 0 to 2^62 - 1, or a 0-D integer tensor.

    The number in a tensor is not checked, because torch may be tracing it.

    Raises:
        ValueError: if the seed is refused; the message says what is accepted.
    """
    if isinstance(seed, Tensor):
        valid = not (seed.dim() or seed.is_floating_point() or seed.is_complex())
    else:
        is_integer = isinstance(seed, int | torch.SymInt) and not isinstance(seed, bool)
        valid = is_integer and 0 <= seed < SEEDS
    if not valid:
        raise ValueError(
            f"the seed {seed!r} is not valid; give an integer from 0 to 2^62 - 1, or an int64 "
            "tensor without dimensions that holds one"
        )


def derive_seed(*parts: int | str) -> int:
    """Return a seed that depends on all `parts` and is the same in every process and release."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Return four random 32-bit words per counter, as int64 tensors with values below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32-bit words of `a * b`; both are exact even if int64 overflows."""
    product = a * b
    return (product >> 32) & WORD, product & WORD


def random_bits(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Return a uniformly distributed int32 from 0 to 2^24 - 1 for each value of a tensor."""
    count = torch.Size(shape).numel()
    index = torch.arange(-(-count // 4), dtype=torch.int64, device=device)
    zero = torch.zeros_like(index)
    words = philox((index & WORD, index >> 32, zero, zero), (seed & WORD, seed >> 32))
    bits = torch.stack(words, dim=1).flatten()[:count]
    return (bits >> (32 - RANDOM_BITS)).int().view(shape)
