"""List the packages that a script and its own modules import but that are not installed.

Otherwise the user would learn of them one ImportError at a time.
"""

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path


def missing_packages(script: Path, folders: Sequence[Path]) -> list[str]:
    """Return the missing packages that a run of `script` imports, in the order of the imports.

    Imports inside functions, `try` and `if` are ignored, because the script may work without them.

    Args:
        script: file to start from.
        folders: folders in which the script's own modules are searched.
    """
    missing: dict[str, None] = {}
    seen: set[Path] = set()
    waiting = [script]
    while waiting:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        for name in _imports(path, folders):
            files = list(_files(name, folders))
            waiting += files
            if not files and not _exists(name.partition(".")[0], folders):
                missing[name.partition(".")[0]] = None
    return list(missing)


def _imports(path: Path, folders: Sequence[Path]) -> Iterator[str]:
    """Yield the dotted names in a file's top-level imports, whether or not they name modules."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = path.parents[node.level - 1]
                folder = next((f for f in folders if package.is_relative_to(f)), None)
                if folder is None:
                    continue
                parts = [*package.relative_to(folder).parts, *filter(None, [module])]
                module = ".".join(parts)
            if module:
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)


def _files(name: str, folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the files in `folders` that Python executes to import the module `name`."""
    parts = name.split(".")
    for folder in folders:
        for count in range(1, len(parts) + 1):
            path = folder.joinpath(*parts[:count])
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file.is_file():
                    yield file


def _exists(package: str, folders: Sequence[Path]) -> bool:
    if any((folder / package).is_dir() for folder in folders):
        return True
    return importlib.util.find_spec(package) is not None
