"""Test that the prose of the tree follows those rules of CONTRIBUTING.md that can be checked.

`python -m tests.test_prose PATH ...` lists the violations below the given paths.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.subprocesses import REPO

#: files outside of the tree that our prose names
FOREIGN = {
    "custom_recipes/reference_current_scaling.py",  # TransformerEngine
    "hif4_gpu/HiF4_NVFP4_v14f16.py",  # ddddwee1/HiFloat4
    "numpy.py",  # a user's file that must not be imported
    "torch.py",
    "tools/preprocess_data.py",  # Megatron-LM
    "transformer_engine/pytorch/custom_recipes/reference_nvfp4.py",
}

FIRST = re.compile(r"(?:Of|Those|That|As|What|Whether|Which|Who|With|By|For|From|In words)\b")
FIRST_OF_FIELD = re.compile(r"(?:Of|Those|That|What|Which|Who|With)\b")
UNIT = (
    r"(?:\w+ )?(?:line|row|record|format|layer|tensor|file|token|step|cell|column|block|byte|value|"
    r"figure|process|thread|run|iteration|rank|type|module|second|worker|sample|GB)"
)
RULES = {
    "write 'per'": re.compile(rf"\ban? {UNIT} an? {UNIT}\b"),
    "American spelling": re.compile(
        r"\b(?:colour|behaviour|neighbour|licence|favour|honour|centre|catalogue|analyse|normalis|"
        r"quantis|optimis|initialis|serialis|summaris|recognis|organis|cancell)\w*",
        re.IGNORECASE,
    ),
    "say it plainly": re.compile(
        r"\b(?:who said so|said of|is said|for ever|mend(?:ed|s|ing)?|has it|goes? through|told of|"
        r"of the same name as|let go|what an? \w+ came to|whoever|wherefore|thereof|else's)\b",
        re.IGNORECASE,
    ),
}
NAME = re.compile(
    r"(?<![\w/.*<>{}$%-])(?:\.\./)*((?:[\w.-]+/)*[\w-]+\.(?:py|md|sh))\b(?![\w*/<{(-])"
)
COMMENT = re.compile(r"(?:^|\s)(#:? .*)")
FENCE = re.compile(r"^```.*?^```|<!-- prose: off -->.*?<!-- prose: on -->", re.M | re.S)


def tree() -> list[str]:
    """Return the paths of all files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (REPO / name).is_file()]


def endings(paths: list[str]) -> set[str]:
    """Return every path and every part of it that begins after a slash."""
    parts = [path.split("/") for path in paths]
    return {"/".join(names[i:]) for names in parts for i in range(len(names))}


def texts(name: str, source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the kind and the text of each piece of prose in a file."""
    if name.endswith(".py"):
        root = ast.parse(source)
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(root):
            if isinstance(node, documented) and ast.get_docstring(node) is not None:
                yield node.body[0].lineno, "docstring", ast.get_docstring(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.lineno, "string", node.value
        for number, line in enumerate(lines := source.splitlines()):
            if match := COMMENT.search(line):
                field = match[1].startswith("#:") and not lines[number - 1].strip().startswith("#:")
                yield number + 1, "field" if field else "comment", match[1]
    else:
        blanked = FENCE.sub(lambda block: "\n" * block[0].count("\n"), source)
        for number, line in enumerate(blanked.splitlines(), 1):
            if name.endswith(".md") or line.startswith("#"):
                yield number, "comment", line


def violations(name: str, source: str, files: set[str]) -> list[str]:
    """Return one line per violation in a file: its location, the reason and the words."""
    results = set()
    for line, kind, text in texts(name, source):
        opening = text.strip("#: ").split("\n")[0]
        first = {"docstring": FIRST, "field": FIRST_OF_FIELD}.get(kind)
        if first is not None and first.match(opening[:1].upper() + opening[1:]):
            results.add((line, "begin with a verb or a noun", opening))
        for reason, pattern in RULES.items():
            results |= {(line, reason, match[0]) for match in pattern.finditer(text)}
        if kind != "string":
            missing = {match[1] for match in NAME.finditer(text)} - files - FOREIGN
            results |= {(line, "no such file", word) for word in missing}
    return [f"{name}:{line}: {reason}: {words!r}" for line, reason, words in sorted(results)]


def all_violations(paths: list[str]) -> list[str]:
    """Return the violations of the files whose path begins with one of `paths`."""
    names = tree()
    files = endings(names)
    checked = [
        name
        for name in names
        if name.endswith((".py", ".md", ".sh")) and name != "tests/test_prose.py"
        if any(name.startswith(path) for path in paths)
    ]
    return [
        violation
        for name in checked
        for violation in violations(name, (REPO / name).read_text(encoding="utf-8"), files)
    ]


def test_the_prose_of_the_tree_keeps_the_rules():
    failures = all_violations([""])
    assert not failures, "\n" + "\n".join(failures)


BAD = {
    "begin with a verb or a noun": [
        '"""Of the folders."""',
        'def f():\n    """Whether it is."""',
        "size: int  #: of a block",
    ],
    "write 'per'": ["x = 1  # draw a cell a row", '"""Return a step line a format."""'],
    "American spelling": ["# the colour of a bar", 'raise ValueError("unknown behaviour")'],
    "say it plainly": ["# mended later", '"""Return names and who said so."""', "# kept for ever"],
    "no such file": ["# see missing.py", '"""Follow `megatron/missing.py`."""', "#: in none.sh"],
}
GOOD = [
    '"""Return whether a rank has a number."""\n# one cell per row, as in megatron/here.py',
    'NAMES = ["missing.py"]  # run_<name>.sh, *.py',
    "size: int  #: values per block\n#: the rows that follow\n#: of these",
    "full: bool  #: whether the disk is full",
    'def f():\n    """Forward a tensor by its format. Of two, take one."""',
]


@pytest.mark.parametrize(("reason", "source"), [(r, s) for r, bad in BAD.items() for s in bad])
def test_a_violation_is_named(reason, source):
    [line] = violations("x.py", source, set())
    assert reason in line


@pytest.mark.parametrize("source", GOOD)
def test_good_prose_passes(source):
    assert violations("x.py", source, endings(["megatron/here.py"])) == []


def test_code_and_marked_examples_of_a_page_are_not_read():
    page = "```\ncolour\n```\n<!-- prose: off -->\ncolour\n<!-- prose: on -->\ncolour"
    assert violations("x.md", page, set()) == ["x.md:7: American spelling: 'colour'"]


if __name__ == "__main__":
    lines = all_violations(sys.argv[1:] or [""])
    print("\n".join([*lines, f"{len(lines)} violations"]))
    sys.exit(bool(lines))
