"""Parse command lines, and keep programs running after the reader of their output has exited.

Options may be written with underscores instead of hyphens, because Megatron-LM and older scripts of
this project use underscores. The error for an unknown option suggests similar known options.

This module imports only the standard library.
"""

import argparse
import difflib
import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

SHOWN = 3  #: maximum number of names in a suggestion


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that are similar to `name`, in descending order of similarity.

    Case is ignored, and hyphens and underscores are considered equal.
    """
    folded = {_folded(option): option for option in known}
    close = difflib.get_close_matches(_folded(name), folded, n=SHOWN, cutoff=0.6)
    return [folded[option] for option in close]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean X?` with similar known names, or an empty string if there are none."""
    near = nearest(name, known)
    return f", did you mean {' or '.join(near)}?" if near else ""


def hyphenated(word: str) -> str:
    """Return an option spelled with hyphens: `--tensor_dir=a_b` becomes `--tensor-dir=a_b`."""
    name, equals, value = word.partition("=")
    if not name.startswith("--"):
        return word
    return name.replace("_", "-") + equals + value


def _folded(name: str) -> str:
    return name.lower().lstrip("-").replace("_", "-")


class ArgumentParser(argparse.ArgumentParser):
    """Command-line parser with error messages of the form `[ERROR] problem; what to do`.

    Options may be written with underscores instead of hyphens.
    """

    def __init__(
        self,
        *args: Any,
        advice: str | None = None,
        error_type: type[Exception] | None = None,
        **kwargs: Any,
    ) -> None:
        """Create a parser.

        Args:
            args: positional arguments of `argparse.ArgumentParser`.
            advice: end of every error message; by default it refers to `--help`.
            error_type: exception to raise for an invalid command line; None to exit the process.
            kwargs: keyword arguments of `argparse.ArgumentParser`.
        """
        super().__init__(*args, **kwargs)
        self._advice = advice
        self._error_type = error_type

    def error(self, message: str) -> NoReturn:
        """Raise `error_type`; if that is None, print the message and exit with status 2."""
        text = f"{message}; {self._advice or f'see {self.prog} --help'}"
        if self._error_type is not None:
            raise self._error_type(text)
        self.exit(2, f"[ERROR] {text}\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse the known options, whether spelled with hyphens or with underscores."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args(self._respelled(words), namespace)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse all options; for an unknown one, suggest similar options in the error message."""
        parsed, others = self.parse_known_args(args, namespace)
        if others:
            self.error(about_unknown(others, self.all_options()))
        return parsed

    def all_options(self) -> list[str]:
        """Return the names of all options of this parser and its subcommands."""
        options = dict.fromkeys(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    options |= dict.fromkeys(parser._option_string_actions)
        return list(options)

    def _respelled(self, words: Sequence[str]) -> list[str]:
        """Return the command-line arguments with every option spelled as in its definition.

        Arguments after `--` stay unchanged. The parser's own spelling may contain underscores, as
        some of Megatron-LM's options do.
        """
        known = self._option_string_actions
        spelled = {hyphenated(option): option for option in known}
        respelled: list[str] = []
        for position, word in enumerate(words):
            if word == "--":
                return [*respelled, *words[position:]]
            name, equals, value = word.partition("=")
            if name not in known:
                name = spelled.get(hyphenated(name), name)
            respelled.append(name + equals + value)
        return respelled


def about_unknown(words: Sequence[str], options: Iterable[str]) -> str:
    """Return the error message about unrecognized command-line arguments."""
    first = words[0].partition("=")[0]
    if not first.startswith("-"):
        return f"unrecognized arguments: {' '.join(words)}"
    options = list(options)
    hint = (
        f" ({first} is an option of another command)"
        if first in options
        else did_you_mean(first, options)
    )
    return f"unrecognized arguments: {' '.join(words)}{hint}"


class _Outliving(io.FileIO):
    """Raw file that discards its output once the process that reads its pipe has exited."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            # Replace the descriptor itself, because child processes write to it too.
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Let this process continue when the reader of its output exits, as `head -n 1` does.

    A program that works for hours must not end when the pager that shows its messages is closed.
    The exit status still shows whether the work has succeeded.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            number = stream.fileno()
        except (AttributeError, OSError, ValueError):  # the stream is closed or not a file
            continue
        stream.flush()
        writer = io.BufferedWriter(_Outliving(number, "w", closefd=False))
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                writer,
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            ),
        )


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run the main function of a program and exit with the status that it returns.

    On Ctrl-C, print one line and exit with status 130. On SIGTERM, exit with status 143; the usual
    cleanup, such as the removal of temporary files, still runs.
    """
    outlive_readers()
    # Imports create a million objects and little garbage. With the default settings, garbage
    # collection takes a quarter of the time of importing torch and matplotlib.
    gc.set_threshold(100_000, 20, 100)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("[ERROR] interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _terminate(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)
