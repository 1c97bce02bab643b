"""Draw the panels of a tensor: each function returns a figure, a note and the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable

from megatron.analysis.serve.panels.codes import codes, scales
from megatron.analysis.serve.panels.magnitudes import errors, histogram
from megatron.analysis.serve.panels.pictures import attention, image
from megatron.analysis.serve.panels.profiles import channels, tokens
from megatron.analysis.serve.panels.subject import Shown, Subject

__all__ = ["PANELS", "Shown", "Subject"]

#: Panels of a tensor, by their names on the page.
PANELS: dict[str, Callable[[Subject], Shown]] = {
    "histogram": histogram,
    "errors": errors,
    "image": image,
    "channels": channels,
    "tokens": tokens,
    "scales": scales,
    "codes": codes,
    "attention": attention,
}
