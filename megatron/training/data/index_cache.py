"""Check the sample indices that megatron-core caches on disk, before and after it loads them.

megatron-core loads its `.npy` files with `numpy.load(allow_pickle=True)`. If a file holds a pickle
instead of an array, this call runs the code in the pickle. megatron-core does not check the numbers
in an array either. The cache folder is usually next to the data, so it is as untrusted as the data.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from megatron.bounded_files import UnusableFileError, open_regular, printable
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training.errors import UserError

DTYPES = ("int16", "int32", "uint32", "int64")  #: dtypes of the arrays that megatron-core caches
BLOCK = 1 << 22  #: number of samples that are checked at a time


def check_cached_files(folder: str | None) -> None:
    """Check that a cache folder contains no links, special files or damaged `.npy` files.

    Every `.npy` file must be a complete array of integers.

    Raises:
        UserError: if it contains such a file; the message names the file and the remedy.
    """
    if folder is None or not os.path.lexists(folder):
        return
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                if entry.is_symlink():
                    raise UnusableFileError(entry.path, "a link, which megatron-core never writes")
                if entry.name.endswith(".npy"):
                    _check_array(Path(entry.path))
                else:
                    open_regular(entry.path).close()
    except (UnusableFileError, OSError) as error:
        raise UserError(f"sample index {error}; {_advice(folder)}") from error


def _advice(folder: str) -> str:
    return f"delete the folder {printable(folder, limit=1000)}; the next run recreates it"


def _check_array(path: Path) -> None:
    """Check that a file is a complete array of integers, without unpickling anything.

    Raises:
        UnusableFileError: if it is not; the message gives the reason.
    """
    with open_regular(path) as file:
        try:
            version = np.lib.format.read_magic(file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, fortran_order, dtype = read(file)
        except (ValueError, KeyError, EOFError, OSError, RecursionError, MemoryError) as error:
            raise UnusableFileError(path, f"not an array ({printable(error)})") from None
        size = os.fstat(file.fileno()).st_size
        needed = file.tell() + math.prod(shape) * dtype.itemsize
    if dtype.name not in DTYPES or fortran_order or not dtype.isnative:
        raise UnusableFileError(path, f"not an array of integers ({dtype})")
    if size != needed:
        raise UnusableFileError(path, f"has {size} bytes, but its header requires {needed}")


def check_samples(dataset: Any, folder: str | None) -> None:
    """Check that the sample indices of a data set (cached or newly built) match its documents.

    Every index is read once, which takes about 0.5 s for 10 million documents.

    Raises:
        UserError: if an index does not match; the message names the index and the remedy.
    """
    try:
        if isinstance(dataset, BlendedDataset):
            _check_blend(dataset)
            for part in dataset.datasets:
                check_samples(part, folder)
        elif isinstance(dataset, GPTDataset):
            _check_documents(dataset)
            _check_places(dataset)
            _check_shuffle(dataset)
    except UnusableFileError as error:
        raise UserError(f"sample index {error}; {_advice(str(folder))}") from error


def _check_blend(blend: Any) -> None:
    which, sample = blend.dataset_index, blend.dataset_sample_index
    if which.ndim != 1 or which.shape != sample.shape:
        raise _damaged(blend, "dataset_sample_index", "not as long as dataset_index")
    sizes = np.array([len(part) for part in blend.datasets])
    for start in range(0, len(which), BLOCK):
        part, at = which[start : start + BLOCK], sample[start : start + BLOCK]
        if part.min() < 0 or part.max() >= len(sizes):
            raise _damaged(blend, "dataset_index", "names a data set that is not in the blend")
        if at.min() < 0 or (at >= sizes[part]).any():
            raise _damaged(blend, "dataset_sample_index", "names a sample that does not exist")


def _check_documents(dataset: Any) -> None:
    """Check that the document index lists each document of the split the same number of times."""
    documents, split = dataset.document_index, dataset.indices
    first, last = int(split.min()), int(split.max())
    if documents.ndim != 1 or not len(documents) or len(documents) % len(split):
        raise _damaged(dataset, "document_index", "not a whole number of epochs")
    if documents.min() < first or documents.max() > last:
        raise _damaged(dataset, "document_index", "names a document outside its split")
    counts = np.bincount(documents - first, minlength=len(split))
    if (counts != len(documents) // len(split)).any():
        raise _damaged(dataset, "document_index", "some documents occur more often than others")


def _check_places(dataset: Any) -> None:
    """Check that sample i begins at token i * sequence_length according to the sample index."""
    places = dataset.sample_index
    if places.ndim != 2 or places.shape[1] != 2 or len(places) < 2:
        raise _damaged(dataset, "sample_index", "not a pair of numbers per sample")
    lengths = dataset.dataset.sequence_lengths[dataset.document_index]
    ends = np.cumsum(lengths, dtype=np.int64)
    for start in range(0, len(places), BLOCK):
        document, offset = places[start : start + BLOCK].astype(np.int64).T
        inside = document.min() >= 0 and document.max() < len(ends)
        if not inside or offset.min() < 0 or (offset > lengths[document]).any():
            raise _damaged(dataset, "sample_index", "names a position beyond the data")
        token = ends[document] - lengths[document] + offset
        expected = np.arange(start, start + len(token)) * dataset.config.sequence_length
        wrong = token != expected
        if start + BLOCK >= len(places):
            wrong[-1] = token[-1] > expected[-1]  # the last sample may be incomplete
        if wrong.any():
            raise _damaged(dataset, "sample_index", "a sample begins at the wrong token")


def _check_shuffle(dataset: Any) -> None:
    """Check that the shuffle index contains every sample exactly once."""
    order, samples = dataset.shuffle_index, len(dataset.sample_index) - 1
    seen = np.zeros(samples, dtype=bool)
    inside = order.ndim == 1 and len(order) == samples
    if inside and order.min() >= 0 and order.max() < samples:
        seen[order] = True
    if not seen.all():
        raise _damaged(dataset, "shuffle_index", "not every sample occurs exactly once")


def _damaged(dataset: Any, name: str, why: str) -> UnusableFileError:
    split = getattr(dataset, "index_split", None) or dataset.split
    base = f"{dataset.unique_description_hash}-{type(dataset).__name__}-{split.name}"
    return UnusableFileError(f"{base}-{name}.npy", f"does not fit the data ({why})")
