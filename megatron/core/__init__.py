"""Combine megatron-core with the overlaid files of this tree; see `_overlay.py`."""

from megatron.core._overlay import check_version, extend

extend(__name__)
check_version()
