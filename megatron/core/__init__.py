"""Overlay the installed megatron-core with the files in this folder; see `_overlay.py`."""

from megatron.core._overlay import check_version, extend

extend(__name__)
check_version()
