"""Decide for each package `megatron.*` whether it comes from this tree or from the script's.

A script of another source tree has a `megatron.training` of its own, and this tree has one too.
Python would use the first one in `sys.path` for everything. The finder in this module instead takes
the packages in `PARTS` from this tree and all others from where the script would find them. The
megatron-core that the script would find is the base under this tree's overlay.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from pkgutil import extend_path, iter_modules
from types import ModuleType

import megatron
from megatron.overlay.replacements import (
    REPLACEMENTS,
    replace_after_import,
    replace_in_imported,
)

OURS = Path(__file__).resolve().parents[1]  #: folder `megatron` of this tree
#: modules and packages in `megatron` that come from this tree: all of them except `training`
PARTS = tuple(part.name for part in iter_modules([str(OURS)]) if part.name != "training")
INSTALLED = ("site-packages", "dist-packages")  #: names of folders with installed packages
#: module with the compiled helpers of megatron-core's data sets, which a source checkout lacks
HELPERS = "megatron.core.datasets.helpers_cpp"


@dataclass(frozen=True)
class Sources:
    """Folders named `megatron` in which the script would find its packages, in search order."""

    folders: tuple[Path, ...]

    @property
    def core(self) -> Path | None:
        """Folder of the megatron-core that the script would import; None if there is none."""
        return self.package("core")

    def package(self, name: str) -> Path | None:
        """Return the folder of the package `megatron.NAME`; None if there is none."""
        packages = (folder / name for folder in self.folders)
        return next((folder for folder in packages if folder.is_dir()), None)

    def trees(self) -> list[Path]:
        """Return the root of each source tree, and the folder `megatron` of an installed package.

        The parent of an installed package also contains torch, which is no part of a tree.
        """
        return [
            folder if folder.parent.name in INSTALLED else folder.parent for folder in self.folders
        ]

    def hidden(self) -> list[Path]:
        """Return the packages and modules of the script's tree that those in `PARTS` hide."""
        names = [name for name in PARTS if name != "core"]
        candidates = [
            path
            for folder in self.folders
            for name in names
            for path in (folder / name, folder / f"{name}.py")
        ]
        return [path for path in candidates if path.exists()]


class _Finder(MetaPathFinder):
    """Finder of the modules directly in `megatron`, of `HELPERS`, and of modules to change."""

    def __init__(self, sources: Sources) -> None:
        self._folders = [str(folder) for folder in sources.folders]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of a module; None if this finder does not handle it."""
        parent, _, leaf = name.rpartition(".")
        if parent == "megatron":
            places = [str(OURS)] if leaf in PARTS else self._folders
            return PathFinder.find_spec(name, places)
        if name == HELPERS:
            return PathFinder.find_spec(name, path) or self._compiled_helpers(name)
        if name in REPLACEMENTS and (spec := PathFinder.find_spec(name, path)) is not None:
            return replace_after_import(spec)
        return None

    def _compiled_helpers(self, name: str) -> ModuleSpec | None:
        """Return the compiled helpers of an installed wheel, if they fit the base's source."""
        sources = [Path(folder, "core", "datasets", "helpers.cpp") for folder in self._folders]
        sources = [source for source in sources if source.is_file()]
        for source in sources[1:]:
            if source.read_bytes() == sources[0].read_bytes():
                spec = PathFinder.find_spec(name, [str(source.parent)])
                if spec is not None:
                    return spec
        return None


def install() -> Sources:
    """Install the finder of `megatron.*`, and return the folders of the script's packages.

    Call it when `sys.path` is as the script expects it.
    """
    folders = tuple(
        Path(folder)
        for folder in dict.fromkeys(extend_path([], "megatron"))
        if Path(folder).resolve() != OURS
    )
    sources = Sources(folders)
    sys.meta_path.insert(0, _Finder(sources))
    megatron.__path__ = [str(folder) for folder in folders]
    replace_in_imported()
    return sources
