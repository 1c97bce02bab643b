"""Results are written to huge pages where the operating system offers them."""

import torch

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
