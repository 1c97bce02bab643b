"""Test that results pages quote commands without paths of the machine that made them."""

import re
import sys

import pytest

from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
import results_page


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--rounds", "5", "--peers-python", "/a/b/python", "--quick"], "--rounds 5 --quick"),
        (["--peers-python=/a/b/python", "--rounds=5"], "--rounds=5"),
        (
            ["--text", "/a/wiki text.txt", "--", "--lr", "1e-3"],
            "--text 'wiki text.txt' -- --lr 1e-3",
        ),
        (["--text=/a/wiki.txt", "--output-dir", "/tmp/x"], "--text=wiki.txt"),
    ],
)
def test_places_are_left_out(given, said):
    assert results_page.quoted("x.py", given) == f"python benchmarks/x.py {said}"


def test_no_page_names_a_folder_of_a_machine():
    for page in (REPO / "docs").rglob("*.md"):
        found = re.findall(r"(?<![\w.])/(?:work|home|root|tmp|mnt|var)/\S*", page.read_text())
        assert not found, f"{page}: {found}"
