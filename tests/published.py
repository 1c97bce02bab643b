"""Configurations of published models to compare with, and the flags of a command."""

import json

from tests.subprocesses import REPO

PUBLISHED = {
    path.stem: json.loads(path.read_text())
    for path in sorted((REPO / "tests/data/published_models").glob("*.json"))
}

#: Sizes of the published tokenizers; DeepSeek's is smaller than the model's embedding.
TOKENS = {"llama31-8b": 128256, "llama32-1b": 128256, "deepseek2_lite": 100002}

#: Numbers of parameters according to the model cards and papers.
PARAMETERS = {
    "llama31-8b": 8_030_261_248,
    "llama32-1b": 1_235_814_400,
    "deepseek2_lite": 15_706_484_224,
}


def flags_of(words: list[str]) -> list[str]:
    """Return the arguments that a command passes to `pretrain_gpt.py`."""
    return words[words.index(str(REPO / "pretrain_gpt.py")) + 1 :]
