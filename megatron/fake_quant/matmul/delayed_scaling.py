"""Keep the amax histories of delayed scaling, from which scales are computed before a pass.

A tensor is quantized with a scale from the tensors before it, so that its values need to be read
only once. The rules are those of Transformer Engine's DelayedScaling. Between two updates, the
largest magnitude of each operand is recorded. An update then computes for each operand

    history  = the recorded amax, followed by the previous history without its oldest amax
    amax     = the maximum of the history

and the scale is computed from amax until the next update. There are three exceptions. An amax of 0,
from an operand that was not multiplied or is zero, leaves history and amax unchanged. If the
maximum of the history is Inf, amax stays as it is until the Inf has left the history. NaNs are
ignored. Before the first update, amax is 0, which stands for a scale of 1, as in Transformer
Engine.

Transformer Engine has two implementations of this, which differ. Its kernel follows the rules
above. Its other implementation, in plain torch operations (NVTE_UNFUSED_FP8_UPDATE), lets an amax
of 0 enter the history, and keeps the scale for as long as the history contains a NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor: Inf if any value is Inf, and 0 if all are NaN.

    The result is a float32 tensor without dimensions.
    """
    x = x.detach()
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    if not x.is_cuda:  # One fast pass suffices, unless a value is NaN.
        low, high = x.aminmax()
        largest = torch.maximum(-low, high).float()
        if not largest.isnan():
            return largest
    return x.abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax().float()


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


class AmaxHistories:
    """Amax histories of several operands, which are updated together, one row per operand."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """Create empty histories; `lengths` has the maximum length of each row's history."""
        self._lengths = list(lengths)
        #: recorded amaxes, shape `[rows, amaxes]`, the newest one first; 0 where there is none yet
        self.history = _zeros(len(self._lengths), max(self._lengths, default=1))
        #: amax from which the scale of each operand is computed, `[rows]`; never changed in place
        self.amax = _zeros(len(self._lengths))
        #: largest magnitude of each operand since the last update, `[rows]`
        self.recorded = _zeros(len(self._lengths))

    def record(self, row: int, x: Tensor, length: int) -> None:
        """Record the amax of an operand.

        Args:
            row: row of the operand.
            x: the operand.
            length: current length of its history, which a recipe may change during the run.
        """
        if self.recorded.device != x.device:
            self.to(x.device)
        self._lengths[row] = length
        recorded = self.recorded[row]
        torch.maximum(recorded, largest_magnitude(x), out=recorded)

    def to(self, device: torch.device) -> None:
        """Move the histories to the device of the operands."""
        self.history, self.amax, self.recorded = (
            part.to(device) for part in (self.history, self.amax, self.recorded)
        )

    def update(self) -> None:
        """Move the recorded amaxes to the histories, and compute the next amax of each row."""
        new, device = self.recorded != 0, self.recorded.device
        rolled = torch.cat([self.recorded.unsqueeze(1), self.history[:, :-1]], 1)
        self.history = torch.where(new.unsqueeze(1), rolled, self.history)
        position = torch.arange(self.history.shape[1], device=device)
        lengths = torch.tensor(self._lengths, dtype=torch.int64, device=device)
        largest = self.history.masked_fill(position >= lengths.unsqueeze(1), 0.0).amax(1)
        self.amax = torch.where(new & largest.isfinite(), largest, self.amax)
        self.recorded = torch.zeros_like(self.recorded)
