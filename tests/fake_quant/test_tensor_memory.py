"""Test that results reuse freed memory, or are in huge pages where the system offers them."""

import gc
import threading

import pytest
import torch

from megatron.fake_quant import fake_quantize
from megatron.fake_quant.fused import tensor_memory


def test_the_huge_pages_inside_a_tensor_are_asked_for(monkeypatch):
    page, ranges = 1 << 12, []
    monkeypatch.setattr(
        tensor_memory, "_huge_pages", lambda: (page, lambda *given: ranges.append(given))
    )
    result = tensor_memory.empty_like(torch.zeros(5000))
    ((first, length),) = ranges
    end = result.data_ptr() + result.nbytes
    assert first % page == length % page == 0
    assert 0 <= first - result.data_ptr() < page
    assert 0 <= end - (first + length) < page
    tensor_memory.empty_like(torch.zeros(1000))
    assert len(ranges) == 1, "no page of 4 KiB is inside a tensor of 4000 bytes"


def test_systems_that_use_huge_pages_unasked_or_never_are_not_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(tensor_memory, "_HUGE_PAGES", tmp_path)
    for choice in (None, "[always] madvise never", "always madvise [never]"):
        if choice is not None:
            (tmp_path / "enabled").write_text(choice)
            (tmp_path / "hpage_pmd_size").write_text("2097152")
        tensor_memory._huge_pages.cache_clear()
        size, _ = tensor_memory._huge_pages()
        assert size > 1 << 60
        assert tensor_memory.empty_like(torch.zeros(1 << 20)).shape == (1 << 20,)
    tensor_memory._huge_pages.cache_clear()


@pytest.fixture
def kept(monkeypatch):
    """Keep tensors of 1,024 to 4,096 bytes, so that the tests need little memory."""
    monkeypatch.setattr(tensor_memory, "LEAST_KEPT", 1024)
    monkeypatch.setattr(tensor_memory, "MOST_KEPT", 4096)
    monkeypatch.setattr(tensor_memory, "_kept", tensor_memory._KeptMemory())


def place_of_next(x):
    return tensor_memory.empty_like(x).data_ptr()


def test_the_memory_of_a_freed_tensor_is_used_again(kept):
    x = torch.zeros(4, 8, 16).permute(2, 0, 1)
    first = tensor_memory.empty_like(x)
    place = first.data_ptr()
    del first
    second = tensor_memory.empty_like(x)
    assert second.data_ptr() == place
    like = torch.empty_like(x)
    assert (second.shape, second.stride(), second.dtype) == (x.shape, like.stride(), x.dtype)
    del second
    assert place_of_next(torch.zeros(1024, dtype=torch.bfloat16)) == place, "as many bytes"


@pytest.mark.parametrize(
    "reference",
    [
        lambda result: result,
        lambda result: result[3:5],
        lambda result: result.numpy(),
        lambda result: result.untyped_storage(),
        lambda result: tensor_memory.bits_in_memory(result),
        lambda result: torch.from_dlpack(result),
        lambda result: torch.ones(512, requires_grad=True) * result,
        lambda result: torch.nn.Parameter(result),
    ],
    ids=["tensor", "view", "numpy", "storage", "bits", "dlpack", "autograd graph", "parameter"],
)
def test_memory_that_something_refers_to_is_never_used_again(kept, reference):
    x = torch.zeros(512)
    result = tensor_memory.empty_like(x)
    place = result.data_ptr()
    holder = reference(result)
    del result
    gc.collect()
    assert place_of_next(x) != place
    del holder
    gc.collect()
    again = [tensor_memory.empty_like(x) for _ in range(2)]
    assert place in [tensor.data_ptr() for tensor in again], "nothing refers to it any more"


def test_shared_and_released_memory_is_forgotten(kept):
    x = torch.zeros(512)
    shared = tensor_memory.empty_like(x).share_memory_()
    place = shared.data_ptr()
    del shared  # another process may still read it
    assert place_of_next(x) != place
    result = tensor_memory.empty_like(x)
    result.untyped_storage().resize_(0)  # as selective recomputation releases an activation
    new = tensor_memory.empty_like(x)
    result.untyped_storage().resize_(x.nbytes)
    result.copy_(x + 1)
    new.zero_()
    assert torch.equal(result, x + 1)


def test_only_so_much_memory_is_kept(kept):
    live = [tensor_memory.empty_like(torch.zeros(512)) for _ in range(5)]
    assert len(tensor_memory._kept._all) == 2
    assert len({tensor.data_ptr() for tensor in live}) == 5
    del live
    for number in (255, 1025):  # too small, too large
        tensor_memory.empty_like(torch.zeros(number))
    sizes = [kept.nbytes for kept in tensor_memory._kept._all]
    assert sizes == [2048, 2048]
    tensor_memory.empty_like(torch.zeros(768))
    sizes = [kept.nbytes for kept in tensor_memory._kept._all]
    assert sizes == [3072], "free memory of a different size is released"


def test_threads_get_memory_of_their_own(kept):
    x, found = torch.zeros(512), []

    def allocate():
        for _ in range(300):
            result = tensor_memory.empty_like(x)
            number = float(threading.get_ident() % 1000)
            result.fill_(number)
            found.append(bool((result == number).all()))

    threads = [threading.Thread(target=allocate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 1200


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "bf16", "hifp8"])
def test_results_in_used_memory_have_the_same_bits(kept, name):
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    tensor_memory.LEAST_KEPT, tensor_memory.MOST_KEPT = x.nbytes, 2 * x.nbytes
    expected = fake_quantize(x, name)
    fake_quantize(-x, name)  # leaves its result in memory
    again = fake_quantize(x, name)
    assert torch.equal(again, expected)
    assert len(tensor_memory._kept._all) == 2
