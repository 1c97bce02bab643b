"""The command line as a results page quotes it: for others, without the places of this machine."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

#: Options that say where something lies: none of them changes what is measured.
PLACES = ("--peers-python", "--output", "--output-dir", "--csv", "--folder", "--scratch", "--dump")
FILES = ("--text", "--tokenizer-model")  #: of these the name counts


def quoted(script: str, arguments: Sequence[str] | None = None) -> str:
    """`python benchmarks/SCRIPT ...`, to be pasted into a shell."""
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
