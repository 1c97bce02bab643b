"""Write a benchmark's results page in Markdown, with its tables and its command."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

#: Options that a quoted command omits, because their values are paths on this machine.
PLACES = ("--peers-python", "--output", "--output-dir", "--csv", "--folder", "--scratch", "--dump")
#: Options whose values are shortened to the name of the file or folder.
FILES = ("--text", "--tokenizer-model", "--fouroversix", "--transformer-engine")


def quoted(script: str, arguments: Sequence[str] | None = None) -> str:
    """Return the command `python benchmarks/SCRIPT ...`, quoted for a shell.

    Args:
        script: file name in the folder `benchmarks`.
        arguments: command-line arguments of the script; by default, those of this process.
    """
    words, before = ["python", f"benchmarks/{script}"], ""
    for word in sys.argv[1:] if arguments is None else arguments:
        option, equals, value = word.partition("=")
        if before in FILES:
            words.append(Path(word).name)
        elif equals and option in FILES:
            words.append(f"{option}={Path(value).name}")
        elif before not in PLACES and option not in PLACES:
            words.append(word)
        before = word
    return shlex.join(words)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with one line per row."""
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def publish(text: str, output: Path | None) -> None:
    """Print a page, and write it to the file `output` if there is one."""
    print(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
