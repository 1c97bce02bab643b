"""Part of the overlay; see `megatron/core/_overlay.py`."""

from megatron.core._overlay import extend

extend(__name__)
