"""Extend this package with the modules of the wheel; see `megatron/core/_overlay.py`."""

from megatron.core._overlay import extend

extend(__name__)
