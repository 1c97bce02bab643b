"""Plant faults in the files of a dump, and run `diff` in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron.analysis.__main__ import main
from megatron.analysis.store import TensorStore


def path_of(folder: Path, **conditions) -> Path:
    """Return the path of the only tensor that meets the conditions."""
    [record] = TensorStore(folder).select(**conditions).itertuples()
    return Path(record.path)


def plant(path: Path, change: Callable[[Tensor], object]) -> None:
    """Change the tensor of a file in place, by `change`."""
    payload = torch.load(path, weights_only=True)
    change(payload["tensor"])
    path.unlink()  # the file may be a link to a file of another dump
    torch.save(payload, path)


def add_to_first(amount: float) -> Callable[[Tensor], object]:
    """Return a function that adds to the first value of a tensor."""

    def change(tensor: Tensor) -> None:
        tensor.view(-1)[0] += amount

    return change


def diff(capsys, *arguments: object) -> tuple[int, list[str]]:
    """Run `python -m megatron.analysis diff`; return the exit status and the lines of stdout."""
    capsys.readouterr()
    status = main(["diff", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return status, out.splitlines() if status < 2 else err.splitlines()
