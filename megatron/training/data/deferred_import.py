"""Imports megatron-core's tokenizers without `transformers`, until one of them needs it.

The wheel imports `transformers` for any tokenizer, which takes two seconds; only Hugging Face's
tokenizers and chat templates use it. While the wheel's package is imported, the two names that it
takes stand for calls that import the library then.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

_TEMPLATES = "transformers.utils.chat_template_utils"
_WANTING = "megatron.core.tokenizers.text.libraries"


class _AutoTokenizer:
    """Stands for `transformers.AutoTokenizer`, of which the wheel calls this alone."""

    @staticmethod
    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("transformers").AutoTokenizer.from_pretrained(
            *args, **kwargs
        )


def _compile_jinja_template(template: str) -> Any:
    return importlib.import_module(_TEMPLATES)._compile_jinja_template(template)


@contextmanager
def transformers_when_needed() -> Iterator[None]:
    """Within it, the wheel's tokenizers are imported; no `transformers` for others meanwhile."""
    if "transformers" in sys.modules or _WANTING in sys.modules:
        yield
        return
    names = ("transformers", _TEMPLATES)
    stand_ins = {name: module_from_spec(ModuleSpec(name, None)) for name in names}
    stand_ins["transformers"].AutoTokenizer = _AutoTokenizer
    stand_ins[_TEMPLATES]._compile_jinja_template = _compile_jinja_template
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
