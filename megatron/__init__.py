"""Extend the package path, so that this tree comes first and the installed megatron-core second.

The megatron-core wheel ships `megatron` as a namespace package without an `__init__.py`, so this
file hides no file of the wheel. Modules that this tree lacks are imported from the installed
package.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
