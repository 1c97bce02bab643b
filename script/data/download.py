"""Wikipedia and Dolma from the Hugging Face hub, by the `datasets` library, file by file.

Only the files are fetched: nothing is converted to Arrow, which would take their size on the disk
once more. What is there already is not fetched again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlparse

#: Of each corpus: the data set on the hub, and the part of it that is taken unless told otherwise.
HUB = {
    "wikipedia": ("wikimedia/wikipedia", "20231101.en"),
    "dolma": ("allenai/dolma", "v1_6-sample"),
}


def download(
    corpus: str, folder: Path, *, name: str, part: str, limit: int | None = None
) -> tuple[Path, ...]:
    """The files of `part` of the data set `name`, the first `limit` of them.

    What the hub itself has goes to its cache (HF_HOME), what it points to elsewhere to `folder`.

    Raises:
        ValueError: they cannot be had; without a network, for example.
    """
    from tqdm import tqdm

    print(f"Asking the Hugging Face hub for {name} ({part}) ...", file=sys.stderr)
    try:
        urls = _wikipedia_urls(name, part) if corpus == "wikipedia" else _dolma_urls(name, part)
        urls = urls[:limit]
        return tuple(_fetch(url, folder) for url in tqdm(urls, unit="file", disable=None))
    # The library passes on what four HTTP libraries raise, which have no error in common.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"cannot download {name} ({part}): {type(error).__name__}: {reason}; where the network "
            "does not allow it, fetch the files elsewhere and give their folder in --input"
        ) from error


def _wikipedia_urls(name: str, part: str) -> list[str]:
    """Parquet files, which the library finds by the data set's description."""
    import datasets

    builder = datasets.load_dataset_builder(name, part)
    return [str(url) for url in builder.config.data_files["train"]]


def _dolma_urls(name: str, part: str) -> list[str]:
    """Compressed JSONL elsewhere, listed in a file of the data set: it has no other description
    that a current release of the library would read.
    """
    base = name if Path(name).is_dir() else f"hf://datasets/{name}"
    listed = _manager(None).download(f"{base}/urls/{part}.txt")
    return Path(listed).read_text(encoding="utf-8").split()


def _fetch(url: str, folder: Path) -> Path:
    """The file at `url`; under its own name where the library would give it another."""
    target = folder / urlparse(url).path.lstrip("/")
    if target.is_file():
        return target
    found = Path(_manager(folder / ".cache").download(url))
    if folder.resolve() not in found.resolve().parents:
        return found
    target.parent.mkdir(parents=True, exist_ok=True)
    return found.replace(target)


def _manager(cache: Path | None):
    import datasets

    config = datasets.DownloadConfig(cache_dir=cache, max_retries=5)
    return datasets.DownloadManager(download_config=config, record_checksums=False)
