"""The published configurations, and what the tests of the matrix share."""

import json

from tests.subprocesses import REPO

PUBLISHED = {
    name: json.loads((REPO / "tests/data/published_models" / f"{name}.json").read_text())
    for name in ("llama31-8b", "llama32-1b", "deepseek2_lite")
}


def flags_of(words: list[str]) -> list[str]:
    """What a command gives to `pretrain_gpt.py`."""
    return words[words.index(str(REPO / "pretrain_gpt.py")) + 1 :]
