"""Update the documentation of the collection flags from the table in `flags.py`.

The flags are listed in docs/collection.md and in the manual of run_tensor_collection.sh. Run this
module after changing `flags.py`:

    python -m megatron.collection.flag_tables

A test checks that both files match `flags.FLAGS`.
"""

import itertools
import re
import textwrap
from pathlib import Path

from megatron.collection.flags import FLAGS, Flag, Topic

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "collection.md"
DRIVER = REPO / "run_tensor_collection.sh"
MARK = "<!-- python -m megatron.collection.flag_tables -->\n"
INDENT = 27  #: width of the flag column in the manual of run_tensor_collection.sh, in characters
WIDTH = 100


def markdown() -> str:
    """Return the Markdown table of all flags for docs/collection.md."""
    rows = ["| flag | meaning |", "| --- | --- |"]
    for flag in FLAGS:
        values = f" {flag.metavar}{'...' if flag.many else ''}" if flag.metavar else ""
        text = re.sub(r"([*<|])", r"\\\1", flag.help)
        rows.append(f"| `{flag.option}{values}` | {text} |")
    return "\n".join(rows) + "\n"


def manual(topic: Topic) -> str:
    """Return the flag descriptions for one section of the manual in run_tensor_collection.sh."""
    return "".join(_entry(flag) for flag in FLAGS if flag.topic is topic)


def _entry(flag: Flag) -> str:
    """Return the manual's lines about one flag; LIST stands for the values if there are several."""
    option = f"{flag.option} {'LIST' if flag.many else flag.metavar}"
    columns = WIDTH - INDENT - len("#   ")
    lines = textwrap.wrap(flag.brief, columns, break_long_words=False, break_on_hyphens=False)
    return "".join(
        f"#   {name:{INDENT - 1}} {line}\n"
        for name, line in itertools.zip_longest([option], lines, fillvalue="")
    )


def updated_page(text: str) -> str:
    """Return the text of docs/collection.md with its table of flags updated."""
    before, mark, after = text.partition(MARK)
    if not mark:
        raise ValueError(f"{PAGE} has no line {MARK.strip()!r}; put it above the table of flags")
    rest = re.sub(r"\A(\|.*\n)*", "", after)
    return before + mark + markdown() + rest


def updated_driver(text: str) -> str:
    """Return the text of run_tensor_collection.sh with the flags in its manual updated.

    In each section, the flags of the collection follow the heading directly; the script's own
    options come after them.
    """
    for topic in Topic:
        if topic is Topic.NONE:
            continue
        heading = f"# {topic.value}\n"
        before, match, after = text.partition(heading)
        if not match:
            raise ValueError(f"{DRIVER} has no section {topic.value!r}; add it to the manual")
        rest = re.sub(r"\A(#   --(collect|control)-.*\n(#    .*\n)*)*", "", after)
        text = before + heading + manual(topic) + rest
    return text


if __name__ == "__main__":
    for path, update in ((PAGE, updated_page), (DRIVER, updated_driver)):
        path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
