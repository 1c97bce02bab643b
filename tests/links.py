"""Checks of the links of a Markdown page."""

import re
from pathlib import Path


def broken_links(page: Path) -> list[str]:
    """Return the links to files or sections that do not exist."""
    links = re.findall(r"\]\(([^)\s]+)[^)]*\)", page.read_text())
    return [link for link in links if not (link.startswith("http") or leads(page, link))]


def leads(page: Path, link: str) -> bool:
    name, _, section = link.partition("#")
    target = page.parent / name if name else page
    return target.exists() and (not section or section in sections(target))


def sections(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub derives them from its headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
