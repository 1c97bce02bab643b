"""Define the datasets and the paths of their token files, which depend on the tokenizer.

Models with the same tokenizer share the files. The files for Llama 3 have the paths that users' own
scripts expect; the paths for any other tokenizer family contain the name of the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from configs.models import Tokenizer

#: Tokenizer family whose data paths do not contain its name.
PLAIN_FAMILY = "llama3"


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A dataset of the experiment matrix."""

    title: str
    name: str  #: name of the folder, and first part of the file names
    prepare: str  #: script that makes the token files

    def prefix(self, tokenizer: Tokenizer) -> str:
        """Return the common prefix of the `.bin` and `.idx` files, relative to the repository."""
        family = "" if tokenizer.family == PLAIN_FAMILY else f"_{tokenizer.family}"
        name = f"{self.name}{family}"
        return f"dataset/{name}/{name}_text_document"


DATASETS: Mapping[str, Dataset] = {
    "wikipedia": Dataset(
        title="Wikipedia", name="wikipedia_processed", prepare="script/data/prepare_wikipedia.sh"
    ),
    "dolma": Dataset(title="Dolma", name="dolma_processed", prepare="script/data/prepare_dolma.sh"),
}
