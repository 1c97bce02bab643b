"""Import megatron-core's tokenizers without importing `transformers` before it is needed.

megatron-core imports `transformers` for any tokenizer, which takes two seconds, although only
Hugging Face's tokenizers and chat templates use it. While megatron-core's tokenizers are imported,
stand-ins replace the two names that they import from `transformers`. The stand-ins import the
library when they are called.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

_TEMPLATES = "transformers.utils.chat_template_utils"
_IMPORTER = "megatron.core.tokenizers.text.libraries"


class _AutoTokenizer:
    """Stand-in for `transformers.AutoTokenizer`; megatron-core calls only `from_pretrained`."""

    @staticmethod
    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("transformers").AutoTokenizer.from_pretrained(
            *args, **kwargs
        )


def _compile_jinja_template(template: str) -> Any:
    return importlib.import_module(_TEMPLATES)._compile_jinja_template(template)


@contextmanager
def transformers_when_needed() -> Iterator[None]:
    """Replace `transformers` with stand-ins while megatron-core's tokenizers are imported.

    Other code must not import `transformers` within this context.
    """
    if "transformers" in sys.modules or _IMPORTER in sys.modules:
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
