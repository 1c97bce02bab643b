"""Download Wikipedia and Dolma from the Hugging Face hub, file by file, with `datasets`.

The files are not converted to Arrow, which would need the same disk space again. A file that was
downloaded before is not downloaded again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlparse

#: For each corpus: the dataset's name on the hub, and the part that is used by default.
HUB = {
    "wikipedia": ("wikimedia/wikipedia", "20231101.en"),
    "dolma": ("allenai/dolma", "v1_6-sample"),
}


def download(
    corpus: str, folder: Path, *, name: str, part: str, limit: int | None = None
) -> tuple[Path, ...]:
    """Download the first `limit` files, or all, of one part of a dataset; return their paths.

    Files from the hub itself are stored in its cache (HF_HOME), and files from other servers in
    `folder`.

    Raises:
        ValueError: if the files cannot be downloaded, for example without a network, or if a
            package for it is not installed.
    """
    from tqdm import tqdm

    from megatron.optional_packages import check_installed

    for package in ("datasets", "aiohttp"):
        check_installed(package, "the download from the Hugging Face hub")
    print(f"Asking the Hugging Face hub for {name} ({part}) ...", file=sys.stderr)
    try:
        urls = _wikipedia_urls(name, part) if corpus == "wikipedia" else _dolma_urls(name, part)
        urls = urls[:limit]
        return tuple(_fetch(url, folder) for url in tqdm(urls, unit="file", disable=None))
    # The library raises exceptions of four HTTP libraries, which have no common base class.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"cannot download {name} ({part}): {type(error).__name__}: {reason}; where the network "
            "does not allow it, fetch the files elsewhere and give their folder in --input"
        ) from error


def _wikipedia_urls(name: str, part: str) -> list[str]:
    """Return the URLs of the Parquet files in the part `part` of the dataset `name`."""
    import datasets

    builder = datasets.load_dataset_builder(name, part)
    return [str(url) for url in builder.config.data_files["train"]]


def _dolma_urls(name: str, part: str) -> list[str]:
    """Return the URLs of Dolma's compressed JSONL files, which are not on the hub.

    A text file in the dataset lists the URLs. Current releases of the library cannot read any other
    description of this dataset.
    """
    base = name if Path(name).is_dir() else f"hf://datasets/{name}"
    listed = _manager(None).download(f"{base}/urls/{part}.txt")
    return Path(listed).read_text(encoding="utf-8").split()


def _fetch(url: str, folder: Path) -> Path:
    """Download the file at `url` and return its path.

    The library would store a file under a different name. In `folder`, the file gets the path that
    it has in its URL.
    """
    target = folder / urlparse(url).path.lstrip("/")
    if target.is_file():
        return target
    cached = Path(_manager(folder / ".cache").download(url))
    if folder.resolve() not in cached.resolve().parents:
        return cached
    target.parent.mkdir(parents=True, exist_ok=True)
    return cached.replace(target)


def _manager(cache: Path | None):
    import datasets

    config = datasets.DownloadConfig(cache_dir=cache, max_retries=5)
    return datasets.DownloadManager(download_config=config, record_checksums=False)
