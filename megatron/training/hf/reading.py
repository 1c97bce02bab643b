"""Check a folder of safetensors files and read parts of its tensors.

Opening a file reads only its header. Reading a piece of a tensor reads only the requested rows or
columns.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron.bounded_files import (
    MEBIBYTE,
    UnusableFileError,
    printable,
    read_json,
    refuse_special_files,
)
from megatron.training.errors import UserError
from megatron.training.hf.layouts import Piece, Source

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Maximum number of open files. It limits memory use: pages that were read from an open file stay
#: mapped and count as used memory.
OPEN_FILES = 4
#: Accepted dtypes: safetensors' names of the float dtypes that need no separate scales.
PLAIN = ("F64", "F32", "F16", "BF16")
#: Suffix of the names of tensors that are computed from the config.json. Older checkpoints contain
#: such tensors, but they are not loaded.
COMPUTED = ".rotary_emb.inv_freq"
INDEX_LIMIT = 256 * MEBIBYTE  #: maximum size of an index; each tensor takes about 100 bytes in it


class Weights:
    """Context manager that opens the files of a checkpoint and reads its tensors."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.bytes_read = 0
        self._files: dict[str, Any] = {}

    def __enter__(self) -> "Weights":
        self._file_of = self._index()
        return self

    def __exit__(self, *reason) -> None:
        for file in self._files.values():
            file.__exit__(None, None, None)
        self._files.clear()

    def _index(self) -> dict[str, str]:
        """Return a mapping from tensor names to the names of their files.

        Raises:
            UserError: if the index is damaged, a file is missing, or the folder has no safetensors
                files.
        """
        index = self.folder / INDEX
        try:
            refuse_special_files(self.folder)
        except UnusableFileError as error:
            raise UserError(f"{error}; get the file again") from error
        try:
            content = read_json(index, limit=INDEX_LIMIT)
        except FileNotFoundError:
            return self._names_in_single()
        except UnusableFileError as error:
            raise UserError(
                f"{index} is not an index of tensors ({error.why}); get the file again"
            ) from error
        file_of = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(file_of, dict) or not all(map(_is_text, file_of.values())):
            raise UserError(
                f"{index} is not an index of tensors: it has no weight_map from names to files; "
                "get the file again"
            )
        names = sorted(set(file_of.values()))
        if any(Path(name).name != name for name in names):
            raise UserError(f"{index} names files outside of its folder; get the file again")
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing:
            raise UserError(
                f"--load-hf {self.folder} lacks {len(missing)} of its {len(names)} files: "
                f"{_some(missing)}; download them"
            )
        return file_of

    def _names_in_single(self) -> dict[str, str]:
        if (self.folder / SINGLE).is_file():
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        raise UserError(
            f"--load-hf {self.folder} holds neither {INDEX} nor {SINGLE}; other formats (.bin, "
            ".pth) are not read, because such a file can run code: write it again with "
            "transformers' save_pretrained"
        )

    def _open(self, name: str):
        """Open the file `name` if necessary and return it; keep at most `OPEN_FILES` files open."""
        if name not in self._files:
            path = self.folder / name
            if len(self._files) == OPEN_FILES:
                oldest = next(iter(self._files))
                self._files.pop(oldest).__exit__(None, None, None)
            try:
                opened = safe_open(path, framework="pt", device="cpu")
                self._files[name] = opened.__enter__()
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"{path} is incomplete or not a safetensors file ({printable(error)}); get "
                    "the file again"
                ) from error
        return self._files[name]

    def check_count(self, layers: int, experts: int) -> None:
        """Check that the files hold enough tensors for the layers and experts in config.json.

        This check comes before the comparison by name, because that comparison needs a list of all
        claimed tensors in memory.

        Raises:
            UserError: if there are too few tensors; the message gives both numbers.
        """
        if len(self._file_of) < layers * max(1, experts):
            claimed = f"{layers} layers" + (f" of {experts} experts" if experts else "")
            raise UserError(
                f"--load-hf {self.folder} has {len(self._file_of)} tensors, but its config.json "
                f"claims {claimed}; download the weights and config.json again"
            )

    def check(self, expected: dict[str, Source], *, tied: bool) -> None:
        """Check that the tensors have the expected names and shapes, and accepted dtypes.

        Raises:
            UserError: if tensors are missing, unexpected, or of a wrong shape or dtype; the message
                names the first of them.
        """
        missing = [name for name in expected if name not in self._file_of]
        if missing:
            raise UserError(f"--load-hf {self.folder} lacks {_some(missing)}; get its files again")
        ignored = {"lm_head.weight"} if tied else set()
        unknown = [
            name
            for name in self._file_of
            if name not in expected and name not in ignored and not name.endswith(COMPUTED)
        ]
        if unknown:
            raise UserError(
                f"--load-hf {self.folder} has {_some(unknown)}, which this program's model "
                "does not have and would drop; give a checkpoint of the plain architecture"
            )
        for source in expected.values():
            self._check_tensor(source)

    def _check_tensor(self, source: Source) -> None:
        file = self._file_of[source.name]
        try:
            stored = self._open(file).get_slice(source.name)
        except SafetensorError as error:
            raise UserError(
                f"{self.folder / file} lacks {source.name}, although {INDEX} assigns it to "
                "this file; get the file again"
            ) from error
        shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        if shape != source.shape:
            raise UserError(
                f"{source.name} in {self.folder / file} has shape {shape}, but config.json "
                f"requires {source.shape}; download the weights and config.json again"
            )
        if dtype not in PLAIN:
            raise UserError(
                f"{source.name} in {self.folder / file} is stored as {dtype}; --load-hf takes "
                f"{', '.join(PLAIN)}"
            )

    def read(self, piece: Piece) -> torch.Tensor:
        """Return the part of a checkpoint tensor that `piece` describes, without reading the rest.

        Raises:
            UserError: if the file cannot be read.
        """
        name = piece.source.name
        try:
            stored = self._open(self._file_of[name]).get_slice(name)
            part = slice(piece.start, piece.stop)
            tensor = stored[part] if piece.dim == 0 else stored[:, part]
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{name} in {self.folder} cannot be read: {printable(error)}; get the file again"
            ) from error
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(map(printable, names[:3]))}{more}"


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
