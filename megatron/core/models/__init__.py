"""Add the modules of the megatron-core wheel to this package; see `megatron/core/_overlay.py`."""

from megatron.core._overlay import extend

extend(__name__)
