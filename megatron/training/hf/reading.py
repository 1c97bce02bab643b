"""A folder of safetensors files: what is in it, whether it is whole, and parts of its tensors.

A file is opened by its header; of a tensor only the rows or columns that are asked for are read.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron.bounded_files import MEBIBYTE, UnusableFileError, printable, read_json
from megatron.training.data.special_files import refuse_special_files
from megatron.training.errors import UserError
from megatron.training.hf.layouts import Piece, Source

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: What was read of an open file stays mapped, and counts as this process's memory.
OPEN_FILES = 4
#: Stored types that are numbers of their own, without scales beside them.
PLAIN = ("F64", "F32", "F16", "BF16")
#: Computed from the config.json; older checkpoints store it.
COMPUTED = ".rotary_emb.inv_freq"
INDEX_LIMIT = 256 * MEBIBYTE  #: an index takes some 100 bytes per tensor


class Weights:
    """The tensors of a checkpoint; open within `with`."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.bytes_read = 0
        self._files: dict[str, Any] = {}

    def __enter__(self) -> "Weights":
        self._of_tensor = self._index()
        return self

    def __exit__(self, *reason) -> None:
        for file in self._files.values():
            file.__exit__(None, None, None)
        self._files.clear()

    def _index(self) -> dict[str, str]:
        """The file of each tensor.

        Raises:
            UserError: files are missing, or there are none.
        """
        index = self.folder / INDEX
        try:
            refuse_special_files(self.folder)
        except UnusableFileError as error:
            raise UserError(f"{error}; get the file again") from error
        try:
            found = read_json(index, limit=INDEX_LIMIT)
        except FileNotFoundError:
            return self._names_in_single()
        except UnusableFileError as error:
            raise UserError(
                f"{index} is not an index of tensors ({error.why}); get the file again"
            ) from error
        of_tensor = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(of_tensor, dict) or not all(map(_is_text, of_tensor.values())):
            raise UserError(
                f"{index} is not an index of tensors: it has no weight_map from names to files; "
                "get the file again"
            )
        names = sorted(set(of_tensor.values()))
        if any(Path(name).name != name for name in names):
            raise UserError(f"{index} names files outside of its folder; get the file again")
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing:
            raise UserError(
                f"--load-hf {self.folder} lacks {len(missing)} of its {len(names)} files: "
                f"{_some(missing)}; download them"
            )
        return of_tensor

    def _names_in_single(self) -> dict[str, str]:
        if (self.folder / SINGLE).is_file():
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        raise UserError(
            f"--load-hf {self.folder} holds neither {INDEX} nor {SINGLE}; other formats (.bin, "
            ".pth) are not read, because such a file can run code: write it again with "
            "transformers' save_pretrained"
        )

    def _open(self, name: str):
        """A file; of those opened before the last ones stay open."""
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
        """Refuse a config.json that claims more layers than there are tensors.

        This comes before the comparison by name, for which a list of all claimed tensors is made.

        Raises:
            UserError: if there are too few tensors; the message gives both numbers.
        """
        if len(self._of_tensor) < layers * max(1, experts):
            claimed = f"{layers} layers" + (f" of {experts} experts" if experts else "")
            raise UserError(
                f"--load-hf {self.folder} has {len(self._of_tensor)} tensors, but its config.json "
                f"claims {claimed}; get both again"
            )

    def check(self, expected: dict[str, Source], *, tied: bool) -> None:
        """Open every file and compare what is there with what the model has.

        Raises:
            UserError: names the first tensors that are missing, superfluous or of another shape.
        """
        missing = [name for name in expected if name not in self._of_tensor]
        if missing:
            raise UserError(f"--load-hf {self.folder} lacks {_some(missing)}; get its files again")
        ignored = {"lm_head.weight"} if tied else set()
        unknown = [
            name
            for name in self._of_tensor
            if name not in expected and name not in ignored and not name.endswith(COMPUTED)
        ]
        if unknown:
            raise UserError(
                f"--load-hf {self.folder} has {_some(unknown)}, for which the model here has no "
                "place; they would be lost: give a checkpoint of the plain architecture"
            )
        for source in expected.values():
            self._check_tensor(source)

    def _check_tensor(self, source: Source) -> None:
        file = self._of_tensor[source.name]
        try:
            stored = self._open(file).get_slice(source.name)
        except SafetensorError as error:
            raise UserError(
                f"{self.folder / file} lacks {source.name}, which {INDEX} says it has; get the "
                "file again"
            ) from error
        shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        if shape != source.shape:
            raise UserError(
                f"{source.name} in {self.folder / file} is {shape}, but by config.json it is "
                f"{source.shape}; get both again"
            )
        if dtype not in PLAIN:
            raise UserError(
                f"{source.name} in {self.folder / file} is stored as {dtype}; --load-hf takes "
                f"{', '.join(PLAIN)}"
            )

    def read(self, piece: Piece) -> torch.Tensor:
        """A piece of a tensor, and no more of it.

        Raises:
            UserError: the file cannot be read.
        """
        name = piece.source.name
        try:
            stored = self._open(self._of_tensor[name]).get_slice(name)
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
