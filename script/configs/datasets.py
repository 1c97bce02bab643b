"""The datasets: where their token ids lie, which depend on the tokenizer.

Models with the same tokenizer share the files. Those of Llama 3 have the paths that the user's own
scripts have; another family's name is a part of the path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from configs.models import Tokenizer

#: The family whose files have no name of a family in their path.
PLAIN_FAMILY = "llama3"


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A column of the matrix."""

    title: str
    name: str  #: of the folder and the files
    prepare: str  #: the script that makes them

    def prefix(self, tokenizer: Tokenizer) -> str:
        """Of the `.bin` and the `.idx` file, below the tree's root."""
        family = "" if tokenizer.family == PLAIN_FAMILY else f"_{tokenizer.family}"
        name = f"{self.name}{family}"
        return f"dataset/{name}/{name}_text_document"


DATASETS: Mapping[str, Dataset] = {
    "wikipedia": Dataset(
        title="Wikipedia", name="wikipedia_processed", prepare="script/data/prepare_wikipedia.sh"
    ),
    "dolma": Dataset(title="Dolma", name="dolma_processed", prepare="script/data/prepare_dolma.sh"),
}
