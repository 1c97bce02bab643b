"""Refuse FIFOs, devices and sockets in an input folder before any library opens them.

The libraries that read such a folder open what they find: a FIFO blocks them forever, and
`/dev/zero` never ends. Links to regular files are followed.
"""

from collections.abc import Callable
from pathlib import Path

from megatron.bounded_files import UnusableFileError, check_regular


def refuse_special_files(folder: Path, *, concerns: Callable[[str], bool] = bool) -> None:
    """Refuse a folder with an entry that is neither a regular file nor a folder.

    Args:
        concerns: returns whether an entry of this name would be read.

    Raises:
        UnusableFileError: if there is such an entry; the message names it.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if concerns(path.name))
        for path in paths:
            if path.exists() and not path.is_dir():
                check_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return  # the caller reports a folder that is missing
    except OSError as error:
        raise UnusableFileError(error.filename or folder, error.strerror or str(error)) from error
