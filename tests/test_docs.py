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


def test_links_of_all_pages_lead_somewhere():
    for page in [*(REPO / "docs").rglob("*.md"), *(REPO / "script").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            found = target.startswith("http") or (page.parent / target).exists()
            assert found, f"{page}: {target}"
