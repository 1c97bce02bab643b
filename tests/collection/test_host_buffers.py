"""Test copies in host memory: they are complete, separate and within the limit."""

from dataclasses import replace

import pytest
import torch

from megatron.collection import host_buffers
from megatron.collection.host_buffers import HostBuffers
from megatron.collection.plan import CountingWriter
from tests.collection.samples import SIZE, TENSOR, nothing


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(1000.0)[10:20],
        torch.arange(100.0).view(10, 10).t(),
        torch.ones(1).expand(50),
        torch.arange(100.0)[::7],
        torch.zeros(0, 4),
        torch.tensor(3.0),
        torch.nn.Parameter(torch.randn(4)),
        torch.arange(9).to(torch.bfloat16),
    ],
    ids=["slice", "transposed", "expanded", "strided", "empty", "scalar", "parameter", "bf16"],
)
def test_a_copy_owns_its_elements_and_nothing_else(view):
    copy = HostBuffers(1 << 20).copy(view, nothing).tensor
    assert torch.equal(copy, view.detach())
    assert copy.is_contiguous()
    assert not copy.requires_grad
    assert type(copy) is torch.Tensor
    assert copy.untyped_storage().nbytes() == copy.numel() * copy.element_size()


def test_a_copy_stays_when_training_changes_the_tensor():
    x = torch.zeros(8)
    copy = HostBuffers(1 << 20).copy(x, nothing)
    x += 1
    assert torch.equal(copy.tensor, torch.zeros(8))


def test_memory_is_used_again_and_never_beyond_its_limit():
    memory = HostBuffers(4 * SIZE)
    copies = [memory.copy(TENSOR, nothing) for _ in range(4)]
    assert memory.copy(TENSOR, nothing) is None
    where = {copy.tensor.data_ptr() for copy in copies}
    assert len(where) == 4, "copies that are in use never share memory"
    for copy in copies:
        copy.release()
    again = memory.copy(TENSOR + 1, nothing)
    assert again.tensor.data_ptr() in where
    assert torch.equal(again.tensor, TENSOR + 1)
    large = memory.copy(torch.ones(3 * 256), nothing)  # unused buffers are released for it
    assert large is not None
    assert memory.peak == 4 * SIZE
    assert memory.copy(torch.ones(5 * 256), lambda: pytest.fail("waiting cannot help")) is None


def test_pinned_memory_that_is_let_go_of_is_given_back(monkeypatch):
    given_back = []
    monkeypatch.setattr(host_buffers, "_empty_host_cache", lambda: given_back.append(1))
    memory = HostBuffers(4 * SIZE)
    for pinned in (False, True):
        memory.used += SIZE
        memory._take_back(torch.empty(SIZE, dtype=torch.uint8), (SIZE, pinned))
    assert memory.copy(torch.ones(3 * 256), nothing) is not None
    assert not given_back, "unpinned memory needs no call to be released"
    assert memory.copy(torch.ones(128), nothing) is not None
    assert given_back, "torch would keep the memory, in addition to its replacement"
    assert memory.peak <= 4 * SIZE


def test_a_plan_reckons_with_the_memory_that_copies_take():
    parts = torch.ones(3 * 256), torch.ones(5)
    memory = HostBuffers(1 << 20)
    for part in parts:
        memory.copy(part, nothing)
    planned = CountingWriter().hold(parts[0], {"tensor": parts[1]}, nothing)
    assert planned.held == memory.used == 3 * 1024 + 20
    assert replace(planned, pinned=True).held == 4096 + 32, "pinned: powers of two"
