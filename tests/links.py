"""Links of a Markdown page."""

import re
from pathlib import Path


def broken_links(page: Path) -> list[str]:
    """Links to files, or sections of them, that are not there."""
    links = re.findall(r"\]\(([^)\s]+)[^)]*\)", page.read_text())
    return [link for link in links if not (link.startswith("http") or leads(page, link))]


def leads(page: Path, link: str) -> bool:
    name, _, section = link.partition("#")
    target = page.parent / name if name else page
    return target.exists() and (not section or section in sections(target))


def sections(page: Path) -> set[str]:
    """What a link may name behind its `#`, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
