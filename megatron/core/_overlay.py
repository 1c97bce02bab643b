"""Lay this source tree over the installed megatron-core, one file at a time.

A file here takes the place of the file of the same name in the wheel; every other module comes from
the wheel untouched. An overlaid module reaches the one it shadows through `shadowed`, so that it
subclasses upstream instead of copying it.

How it works. `megatron/__init__.py` puts the wheel's folder behind ours on `megatron.__path__`.
Each overlaid package has an `__init__.py` of three lines that calls `extend`, which does the same
for that package and then runs the wheel's own `__init__.py` in it. Python's ordinary import then
finds our file first wherever we have one. `shadowed` loads the wheel's file under a private alias
(`megatron.core.tensor_parallel._upstream_layers`) and copies its names into our module.

What it gives up: the `__module__` of a class that we do not replace is the alias, so the plain
wheel cannot read a pickle of such a class. megatron-core's checkpoints hold no such references.
"""

import os
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from pkgutil import extend_path
from types import ModuleType

SUPPORTED = "0.16.1"  #: the overlaid files subclass and replace parts of this version only


def _installed(package: str, filename: str) -> Path:
    """The wheel's file behind ours; the first entry of the path is this tree."""
    for directory in sys.modules[package].__path__[1:]:
        if (path := Path(directory, filename)).is_file():
            return path
    raise ImportError(
        f"{package.replace('.', '/')}/{filename} of megatron-core is not installed; "
        f"run `pip install megatron-core=={SUPPORTED}` or `bash script/setup_env.sh`"
    )


def check_version() -> None:
    """Refuse a megatron-core that the overlaid files were not written for; call it after `extend`.

    Raises:
        ImportError: the version behind this tree is not `SUPPORTED`.
    """
    package = sys.modules["megatron.core"]
    if package.__version__ != SUPPORTED:
        raise ImportError(
            f"megatron-core {package.__version__} is behind this tree, in {package.__path__[1]}, "
            f"but its files overlay {SUPPORTED}; run `pip install megatron-core=={SUPPORTED}`, "
            "and take other copies of Megatron out of PYTHONPATH"
        )


def extend(package: str) -> None:
    """Search the wheel after this tree, then run the wheel's own `__init__.py` in `package`."""
    module = sys.modules[package]
    # A tree that Python finds twice, by another spelling or a link, would overlay itself for ever.
    once: dict[str, str] = {}
    for folder in extend_path(module.__path__, package):
        once.setdefault(os.path.realpath(folder), str(Path(folder).absolute()))
    module.__path__ = list(once.values())
    SourceFileLoader(package, str(_installed(package, "__init__.py"))).exec_module(module)


def shadowed(name: str) -> ModuleType:
    """Import the wheel's version of the overlaid module `name` and re-export all that it defines.

    Names are copied, not forwarded by a module `__getattr__`: upstream reads `vars(module)` and
    imports underscore names.
    """
    package, _, leaf = name.rpartition(".")
    alias = f"{package}._upstream_{leaf}"
    loader = SourceFileLoader(alias, str(_installed(package, f"{leaf}.py")))
    upstream = sys.modules[alias] = module_from_spec(spec_from_loader(alias, loader))
    loader.exec_module(upstream)
    vars(sys.modules[name]).update(
        {k: v for k, v in vars(upstream).items() if not k.startswith("__")}
    )
    return upstream
