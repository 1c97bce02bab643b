"""Compare other packages with a conformance kit for benchmarks/conformance.py.

This worker runs in the Python that has the packages, and reports one JSON line per package and
format. Packages print text when they are imported. Standard output is therefore reserved for the
reports, and all other output is redirected to standard error.

    PYTHONPATH=. python benchmarks/conformance_worker.py REQUEST

REQUEST is a JSON object that `conformance.py` writes; see `python benchmarks/conformance.py --help`
for examples.
"""

import functools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peer_process import load_peers, reason, report, start_worker

if __name__ == "__main__":
    start_worker(__doc__)

import numpy as np
import torch
from torch import Tensor

import conformance_peers
import peers
from megatron.fake_quant import Format, fake_quantize, get_format

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRIED = 4  #: number of differing values per vector for which to look for a smaller input


def load_all(sources: dict[str, str]) -> dict[str, peers.Finder]:
    """Import every package, and report which are available.

    Args:
        sources: folder with the source of each peer that is loaded from its source instead of the
            installed package, by the peer's name.
    """
    loaders = dict(conformance_peers.PEERS)
    for name, folder in sources.items():
        loaders[name] = functools.partial(conformance_peers.SOURCES[name], Path(folder)), None
    return load_peers(loaders)


def vectors(kit: Path, name: str, entry: dict[str, Any]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name, input and expected values of each vector; blocks run along the last axis."""
    npz = next(file for file in entry["files"] if file.endswith(".npz"))
    with np.load(kit / npz, allow_pickle=False) as arrays:
        for vector, fields in entry["vectors"].items():
            dtype = DTYPES[fields["dtype"]]
            x, values = (
                torch.from_numpy(arrays[f"{vector}.{part}"]).to(dtype)
                for part in ("input", "values")
            )
            if fields["axis"] == 0:
                x, values = x.t().contiguous(), values.t().contiguous()
            yield vector, x, values


def smaller_inputs(x: Tensor, row: int, column: int, size: int) -> Iterator[Tensor]:
    """Yield copies of a row that are zero except in `column` and in a growing set of columns."""
    start = column - column % size
    whole = x[row].float().abs().nan_to_num(math.inf, posinf=math.inf)
    block = whole[start : start + size]
    columns: list[int] = []
    for position in (column, start + int(block.argmax()), int(whole.argmax())):
        columns = [*dict.fromkeys([*columns, position])]
        reduced = torch.zeros_like(x[row : row + 1])
        reduced[0, columns] = x[row, columns]
        yield reduced
    yield x[row : row + 1].clone()


def smallest(
    call: peers.Call, fmt: Format, vector: str, x: Tensor, wrong: Tensor
) -> dict[str, Any]:
    """Return the smallest input found on which a package and our code differ, with the results."""
    size = min(fmt.block_size or x.shape[1], x.shape[1])
    cases = []
    places = sorted(wrong.nonzero().tolist(), key=lambda place: abs(float(x[tuple(place)])))
    for row, column in places[:TRIED]:
        for reduced in smaller_inputs(x, row, column, size) if fmt.height == 1 else ():
            ours = fake_quantize(reduced, fmt)
            try:
                theirs = call(reduced.clone())
                differs = bool(peers.unlike(theirs, ours)[1][0, column])
            except Exception:  # The package may refuse a single row; try a larger input.
                continue
            if differs:
                values = reduced[0][reduced[0] != 0].tolist()
                cases.append(case(vector, reduced, (0, column), theirs, ours) | {"values": values})
                break
    if cases:
        return min(cases, key=lambda c: (len(c["values"]), abs(c["x"])))
    row, column = places[0]
    theirs, ours = call(x.clone()), fake_quantize(x, fmt)
    return case(vector, x, (row, column), theirs, ours) | {"values": [0] * x.shape[1]}


def case(
    vector: str, x: Tensor, place: tuple[int, int], theirs: Tensor, ours: Tensor
) -> dict[str, Any]:
    """Return a dict with the vector's name, and the input and both results at one index."""
    numbers = {"x": x, "theirs": theirs, "ours": ours}
    return {"vector": vector} | {name: float(t[place]) for name, t in numbers.items()}


def compare(call: peers.Call, fmt: Format, kit: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """Compare a package's results with the kit's values for all vectors of a format."""
    agree, bits, differ = [], [], []
    refused: dict[str, str] = {}
    cases = []
    for vector, x, values in vectors(kit, fmt.name, entry):
        try:
            differing, wrong = peers.unlike(call(x.clone()), values)
        except Exception as error:  # A package may raise any error for an input.
            refused[vector] = reason(error)
            continue
        if wrong.any():
            differ.append(vector)
            cases.append(smallest(call, fmt, vector, x, wrong))
        elif differing.any():
            bits.append(vector)
        else:
            agree.append(vector)
    cases.sort(key=lambda c: (len(c["values"]), abs(c["x"]) if c["x"] == c["x"] else 0))
    return {"agree": agree, "bits": bits, "differ": differ, "refused": refused, "cases": cases}


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    kit = Path(request["kit"])
    formats = json.loads((kit / "manifest.json").read_text())["formats"]
    finders = load_all(request["sources"])
    for peer, find in finders.items():
        for name, entry in formats.items():
            fmt = get_format(name)
            if (call := find(fmt)) is not None:
                report("result", peer=peer, format=name, **compare(call, fmt, kit, entry))


if __name__ == "__main__":
    main()
