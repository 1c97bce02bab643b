"""Find what this machine has: the interpreter, a CUDA device, the tokenizer and the data.

A path that the user gives is relative to the current folder and must exist. A default path is
relative to the repository's root, and is printed without the root if that is the current folder.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from configs.lookup import ConfigError, MissingFile

REPO = Path(__file__).resolve().parents[2]
MISSING_SAID = "LAB_MISSING_SAID"  #: set by script/driver.sh after it named the missing files


def say(message: str) -> None:
    """Tell the user something that is no result."""
    print(message, file=sys.stderr, flush=True)


def at_home(path: str) -> str:
    """A path below the tree's root as the user would write it."""
    return path if Path.cwd() == REPO else str(REPO / path)


#: Begins the code of `python -c`: nothing is imported from the current folder, which may hold
#: anyone's torch.py.
FOREIGN_LEFT_OUT = "import sys; sys.path[:] = [path for path in sys.path if path]\n"


def is_set(variable: str) -> bool:
    """Whether a switch in the environment is on; script/driver.sh reads DRY_RUN the same way."""
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "no")


@dataclass(frozen=True, kw_only=True)
class Files:
    """What a training reads."""

    tokenizer: str  #: a SentencePiece .model file, or a folder
    data: str  #: prefix of a .bin and an .idx file

    def there(self) -> bool:
        return Path(self.tokenizer).exists() and has_data(self.data)

    def lacking(self) -> str:
        """Return which of the two is missing, as the middle of a sentence about defaults."""
        if not has_data(self.data):
            return f"none in {self.data}"
        return (
            f"no tokenizer at {self.tokenizer} for those in {self.data} (name both to train on "
            "them)"
        )


def has_data(prefix: str) -> bool:
    return all(Path(f"{prefix}{suffix}").is_file() for suffix in (".bin", ".idx"))


def default_corpus() -> Files:
    """The small corpus that script/data/default_corpus.py makes of Python's documentation."""
    return Files(
        tokenizer=at_home("model/default/tokenizer.model"),
        data=at_home("dataset/default/corpus_text_document"),
    )


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """What was asked for, and what may stand in for it."""

    tokenizer: str | None  #: as named by the user
    data: str | None
    default: Files  #: where nothing was named
    corpus: bool  #: whether the default corpus may stand in for a missing default
    prepare: Sequence[str] = ()  #: the command that makes the default
    names: tuple[str, str] = ("--tokenizer-path", "--data-path")


def resolve_data(request: DataRequest, python: str, *, dry_run: bool) -> Files:
    """The files to train on; the default corpus is made if it is to be taken.

    Raises:
        MissingFile: something is not there; says what to run.
    """
    files = request.default
    if request.tokenizer is None and request.data is None:
        if files.there():
            return files
        if request.corpus:
            say(f"No data given, and {files.lacking()}: the default corpus is used.")
            return default_corpus() if dry_run else make_corpus(python)
    data = request.data or files.data
    for suffix in (".bin", ".idx"):
        data = data.removesuffix(suffix)
    files = Files(tokenizer=request.tokenizer or files.tokenizer, data=data)
    if dry_run:
        # the dry run of a driver prints the corpus that a run would make
        if files != default_corpus() and not files.there() and not is_set(MISSING_SAID):
            say(f"Missing: {_missing(files, request, python)}.")
        return files
    _check(files, request, python)
    return files


def _missing(files: Files, request: DataRequest, python: str) -> str:
    """Return the missing files, and how to get them."""
    parts = []
    if not Path(files.tokenizer).exists():
        parts.append(f"the tokenizer {files.tokenizer}, which is needed to make the data")
    if not has_data(files.data):
        how = shlex.join(_preparation(files, request, python))
        parts.append(f"the data {files.data}.bin and .idx, which `{how}` makes")
    return "; ".join(parts)


def _preparation(files: Files, request: DataRequest, python: str) -> list[str]:
    """Return the command that makes the data."""
    if request.prepare and request.data is None:
        return [*request.prepare]
    return [
        *(python, at_home("script/data/preprocess.py"), "--input", "TEXT"),
        *("--output-prefix", files.data.removesuffix("_text_document")),
        *("--tokenizer-model", files.tokenizer, "--append-eod"),
    ]


def _check(files: Files, request: DataRequest, python: str) -> None:
    """Refuse missing files; the message lists all of them, those given by the user first.

    Raises:
        MissingFile: if files are missing; the message has a remedy for each.
    """
    problems = []
    if not Path(files.tokenizer).exists():
        problems.append(
            f"no tokenizer at {files.tokenizer}; name a SentencePiece .model file, or a folder "
            f"with tokenizer.json or tokenizer.model, in {request.names[0]}"
        )
    if not has_data(files.data):
        how = shlex.join(_preparation(files, request, python))
        problems.append(
            f"no data at {files.data} (it takes {files.data}.bin and {files.data}.idx); make them "
            f"with `{how}`, or name others in {request.names[1]}"
        )
    if request.data is not None and request.tokenizer is None:
        problems.reverse()
    if problems:
        neither = f"neither {request.names[0]} nor {request.names[1]}"
        small = f"with {neither}" if request.corpus else f"with --preset tiny and {neither}"
        raise MissingFile(
            f"{'; and '.join(problems)}; {small} a small corpus and its tokenizer are made"
        )


def make_corpus(python: str) -> Files:
    """Make the default corpus unless it is there.

    Raises:
        MissingFile: it cannot be made; the reason was printed.
    """
    made = subprocess.run([python, REPO / "script/data/default_corpus.py"], check=False)
    if made.returncode:
        raise MissingFile("no default corpus; the reason is above")
    return default_corpus()


def tokenizer_type(path: str) -> str:
    """Return Megatron-LM's name for what is at `path`, as `megatron.training.data.tokenizer` does.

    Raises:
        MissingFile: a folder without a tokenizer, or with several.
    """
    place = Path(path)
    hugging_face = ("tokenizer.json", "tokenizer_config.json")
    if place.suffix == ".json" or any((place / name).is_file() for name in hugging_face):
        return "HuggingFaceTokenizer"
    file = _tokenizer_in(place) if place.is_dir() else place
    if file.is_file():
        return "TikTokenizer" if _is_tiktoken(file) else "SentencePieceTokenizer"
    if file.suffix == ".model":
        return "SentencePieceTokenizer"
    return "HuggingFaceTokenizer"  # of a dry run: what the models were published with


def _tokenizer_in(folder: Path) -> Path:
    """The tokenizer's file in a folder that has no Hugging Face tokenizer."""
    if (folder / "tokenizer.model").is_file():
        return folder / "tokenizer.model"
    found = sorted(folder.glob("*.tiktoken"))
    if not found:
        raise MissingFile(
            f"no tokenizer in the folder {folder}; it needs tokenizer.json (Hugging Face), "
            "tokenizer.model or a .tiktoken file"
        )
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise MissingFile(f"several tokenizers in the folder {folder} ({names}); name one of them")
    return found[0]


def _is_tiktoken(path: Path) -> bool:
    """Both kinds may be called tokenizer.model; tiktoken's is text: a token and its number."""
    with path.open("rb") as file:
        return re.fullmatch(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", file.readline(1000)) is not None


def interpreter(*, dry_run: bool) -> str:
    """The Python that has the requirements; made if need be. A dry run only looks.

    Raises:
        MissingFile: LAB_PYTHON names no program.
        ConfigError: it cannot be made; the reason was printed.
    """
    if given := os.environ.get("LAB_PYTHON"):
        if shutil.which(given) is None:
            raise MissingFile(
                f"LAB_PYTHON is '{given}', which is no program; name a Python 3.10 or newer, or "
                "unset it"
            )
        return given
    if dry_run:
        made = REPO / ".venv" / "bin" / "python"
        return str(made) if os.access(made, os.X_OK) else "python3"
    found = subprocess.run(
        ["bash", REPO / "script/setup_env.sh"], stdout=subprocess.PIPE, text=True, check=False
    )
    if found.returncode:
        raise ConfigError("no Python environment; the reason is above")
    return found.stdout.strip()


def enter_environment() -> None:
    """Go on in the Python that has torch, if this one has not.

    Raises:
        ConfigError: see `interpreter`; or that Python has no torch either.
    """
    if find_spec("torch") is not None and find_spec("yaml") is not None:
        return
    python = interpreter(dry_run=False)
    if Path(python).absolute() == Path(sys.executable).absolute():
        raise ConfigError(f"{python} (LAB_PYTHON) lacks torch; run it without LAB_PYTHON")
    sys.stdout.flush()
    os.execv(python, [python, *sys.argv])


@cache
def cuda_devices(python: str, *, dry_run: bool = False) -> int:
    """GPUs that torch can use; a dry run only sees whether there is a driver (then 1)."""
    if not Path("/dev/nvidia0").exists() and shutil.which("nvidia-smi") is None:
        return 0
    if dry_run:
        return 1
    code = "import torch; print(torch.cuda.device_count())"
    asked = subprocess.run(
        [python, "-c", FOREIGN_LEFT_OUT + code], capture_output=True, text=True, check=False
    )
    return int(asked.stdout) if asked.returncode == 0 else 0
