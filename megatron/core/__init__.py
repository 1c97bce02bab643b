"""megatron-core with this tree's files laid over it; see `_overlay.py`."""

from megatron.core._overlay import check_version, extend

extend(__name__)
check_version()
