"""Search this tree's `megatron` first, and the installed megatron-core second.

The wheel ships `megatron` as a namespace package, so it has no `__init__.py` that this file could
shadow by accident. Extending the path here makes `megatron.core` and any other installed part of
`megatron` reachable behind this tree.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
