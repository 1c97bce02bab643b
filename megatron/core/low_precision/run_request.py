"""Describe what a run requests of the layers: formats, the collection of tensors, or nothing."""

from megatron.collection import session
from megatron.collection.settings import enabled_by_environment
from megatron.fake_quant import policy


def collecting() -> bool:
    """Return whether this run collects tensors or measures their statistics."""
    return session.enabled() or (not session.configured() and enabled_by_environment())


def description() -> str | None:
    """Return what this run requests, for messages; None if it requests nothing."""
    current = policy.current()
    if current.changes_matmuls:
        return current.request
    return "tensor collection" if collecting() else None
