"""Extend the package path, so that modules of this repository precede those of megatron-core.

The megatron-core wheel ships `megatron` as a namespace package without an `__init__.py`, so this
file hides no file of the wheel. Modules that this repository lacks are imported from the installed
package.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
