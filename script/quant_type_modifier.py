#!/usr/bin/env python3
"""Set or print the number formats of linear layers, Q K^T and P V for later runs.

    python3 script/quant_type_modifier.py --check
    python3 script/quant_type_modifier.py --linear-quant mxfp8 --qk-quant mxfp8 --pv-quant hifp8
    python3 script/quant_type_modifier.py --restore

No source file is edited. The formats are stored in .quant_settings.json in the root of the
repository, or in the file that QUANT_SETTINGS_FILE names. Formats that are not given stay
unchanged. The flags of a run, a recipe and the environment take precedence over this file. --check
prints each effective format and its source.

Before the first change, the file is copied to <file>.backup, which later changes do not touch.
--restore returns to the state before the first change. Concurrent calls are safe.

Exit status: 0 success; 1 the file cannot be used, or --check finds formats that a run would refuse;
2 wrong option. A change is made whatever the environment contains; if a setting in the environment
would stop a run, a warning is printed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.lookup import ConfigError
from configs.resolve import REPO, enter_environment
from megatron.console import ArgumentParser, run_main

OPERATIONS = {"linear": "linear layers", "qk": "Q K^T", "pv": "P V"}


class SettingsFile:
    """Settings file, with a backup file and a lock file in the same folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.backup = path.with_name(f"{path.name}.backup")
        self._lock = path.with_name(f"{path.name}.lock")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the settings file during a `with` block; other processes wait.

        Raises:
            ValueError: if the path of the lock exists and is not a regular file.
        """
        if self._lock.exists() and not self._lock.is_file():  # opening a FIFO would block
            raise ValueError(f"{self._lock} is not a regular file; remove it")
        with self._lock.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
            yield

    def change(self, formats: dict[str, str]) -> None:
        """Set the formats of the given operations; the other operations stay unchanged.

        Before the first change, the backup file is written.
        """
        from megatron.bounded_files import read_text
        from megatron.fake_quant.policy.settings import read_settings

        with self.locked():
            settings = read_settings(self.path) | formats
            if not self.backup.exists():
                before = read_text(self.path) if self.path.exists() else None
                _replace(self.backup, json.dumps({"before": before}) + "\n")
            _replace(self.path, json.dumps(settings, indent=2, sort_keys=True) + "\n")

    def restore(self) -> bool:
        """Restore the settings from before the first change; return False if nothing was changed.

        Raises:
            ValueError: if the backup file was not written by this script.
        """
        from megatron.bounded_files import read_json

        with self.locked():
            try:
                before = read_json(self.backup)["before"]
                if not isinstance(before, (str, type(None))):
                    raise TypeError(type(before).__name__)
            except FileNotFoundError:
                return False
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{self.backup} was not written by this script; remove it, and edit "
                    f"{self.path} by hand"
                ) from None
            if before is None:
                self.path.unlink(missing_ok=True)
            else:
                _replace(self.path, before)
            self.backup.unlink()
            return True


def _replace(path: Path, text: str) -> None:
    """Replace the contents of a file with `text` atomically."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        advice="see --help",
        error_type=ConfigError,
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="print the effective formats and stop")
    action.add_argument("--restore", action="store_true", help="undo all changes")
    for name, matmuls in OPERATIONS.items():
        parser.add_argument(
            f"--{name}-quant",
            metavar="FORMAT",
            help=f"format of {matmuls}: mxfp8, mxfp4, hifp8, ..., none",
        )
    return parser


def _check_together(options: argparse.Namespace) -> None:
    other = "--check" if options.check else "--restore" if options.restore else None
    formats = {name: getattr(options, f"{name}_quant") for name in OPERATIONS}
    given = [f"--{name}-quant" for name, value in formats.items() if value is not None]
    if given and other:
        raise ConfigError(f"{given[0]} and {other} exclude each other; give one")
    if not (given or other):
        raise ConfigError("nothing to do; give --check, --restore, or formats to set")


def parsed(options: argparse.Namespace) -> dict[str, str]:
    """Return the canonical names of the formats that the options set, by operation.

    Raises:
        ConfigError: if a format is unknown.
    """
    from megatron.fake_quant.quant_type import DEFAULT_TYPE, parse_format

    formats = {}
    for name in OPERATIONS:
        given = getattr(options, f"{name}_quant")
        if given is None:
            continue
        try:
            fmt = parse_format(given)
        except ValueError as error:
            raise ConfigError(f"--{name}-quant: {error}") from None
        formats[name] = DEFAULT_TYPE if fmt is None else fmt.name
    return formats


def report(file: SettingsFile, formats: dict[str, str]) -> None:
    """Print the effective formats, and warn if another source overrides a format that was just set.

    Args:
        file: the settings file.
        formats: formats that were just set, by operation.

    Raises:
        ValueError: if a source names an unknown format, which a run would refuse.
    """
    from megatron.fake_quant.policy import resolve

    policy = resolve()
    print("\n".join(policy.describe()))
    state = "exists" if file.path.exists() else "does not exist"
    undo = "--restore undoes all changes" if file.backup.exists() else "not changed"
    print(f"settings file: {file.path} ({state}; {undo}); flags of a run override all of these")
    for name, wanted in formats.items():
        choice = policy.choices[name]
        if name in policy.by_recipe or not choice.source.startswith("settings file"):
            source = "a recipe (QUANT_RECIPE)" if name in policy.by_recipe else choice.source
            print(
                f"[WARNING] {name} is set to {wanted}, but {source} overrides it; unset that",
                file=sys.stderr,
            )


def main(argv: list[str] | None = None) -> int:
    try:
        options = build_parser().parse_args(argv)
        _check_together(options)
        enter_environment()
        sys.path.insert(0, str(REPO))
        from megatron.fake_quant.policy.settings import SETTINGS_FILE, SETTINGS_VARIABLE

        file = SettingsFile(Path(os.environ.get(SETTINGS_VARIABLE) or SETTINGS_FILE))
        formats = parsed(options)
        if formats:
            file.change(formats)
        elif options.restore:
            restored = file.restore()
            print("restored" if restored else "nothing to restore: there was no change")
        try:
            report(file, formats)
        except ValueError as error:
            if options.check:
                raise
            print(f"[WARNING] done, but a run would be refused: {error}", file=sys.stderr)
    except ConfigError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return error.status
    except BrokenPipeError:
        raise  # The reader of the output has exited; any change has already been made.
    except (OSError, ValueError) as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_main(main)
