"""Find out whether modules of a model, or their methods, were replaced."""

from weakref import WeakKeyDictionary

import torch

#: Hash of the modules that each model had at the last call of `remember`.
_hashes: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()


def remember(model: torch.nn.Module) -> None:
    """Remember the modules of a model, for `were_replaced`."""
    _hashes[model] = _hash_of_modules(model)


def were_replaced(model: torch.nn.Module) -> bool:
    """Return whether the modules of a model or their `forward` methods changed since `remember`.

    This takes 2 milliseconds for a GPT of 126 layers (2,151 modules).
    """
    return _hashes.get(model) != _hash_of_modules(model)


def forget() -> None:
    """Forget all models."""
    _hashes.clear()


def _hash_of_modules(model: torch.nn.Module) -> int:
    """Return a hash that changes if a module is added, removed or replaced, or its `forward` is."""
    identities, waiting, kinds = [], [model], dict[type, int]()
    while waiting:
        module = waiting.pop()
        kind, own = type(module), module.__dict__
        if kind not in kinds:
            methods = (id(getattr(kind, name, None)) for name in ("forward", "_forward_impl"))
            kinds[kind] = hash((id(kind), *methods))
        identities += (id(module), kinds[kind], id(own.get("forward")))
        identities.append(id(own.get("_forward_impl")))
        waiting += [child for child in module._modules.values() if child is not None]
    return hash(tuple(identities))
