"""What docs/collection.md says of the flags is so."""

import re
from dataclasses import fields

from megatron.training.collection_options import CollectionOptions
from tests.subprocesses import REPO

PAGE = (REPO / "docs" / "collection.md").read_text()


def test_every_flag_of_the_collection_is_explained_and_no_other():
    flags = {f"--{field.name.replace('_', '-')}" for field in fields(CollectionOptions)}
    said = set(re.findall(r"--(?:collect|control|save|tensor)-[a-z-]+", PAGE))
    assert said == flags - {"--tensor-save-dir"}
