"""Refuse a flag or a file whose package is not installed, and say how to install the package.

setup.py lists the packages that only some flags and files need. An environment may lack them. This
module imports only the standard library.
"""

import sys
from importlib.util import find_spec


def check_installed(package: str, needed_for: str) -> None:
    """Check that a package is installed, without importing it.

    Args:
        package: name of the package, both in imports and for pip.
        needed_for: flag or file that needs the package, for the error message, such as
            "--tensor-statistics".

    Raises:
        ValueError: if it is not installed.
    """
    if find_spec(package) is None:
        raise ValueError(
            f"{needed_for} needs the {package} package, which this Python does not have; run "
            f"`{sys.executable} -m pip install {package}`"
        )
