"""Find the Python interpreter, the GPUs, the tokenizer and the data for a training run.

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
#: Environment variable that script/driver.sh sets after it has listed the missing files.
MISSING_SAID = "LAB_MISSING_SAID"


def say(message: str) -> None:
    """Print a message for the user on standard error."""
    print(message, file=sys.stderr, flush=True)


def at_home(path: str) -> str:
    """Convert a path relative to the repository into one that is valid in the current folder.

    The result is `path` itself if the current folder is the root of the repository, and otherwise
    the absolute path.
    """
    return path if Path.cwd() == REPO else str(REPO / path)


#: First line of code for `python -c`. It prevents imports from the current folder, which may
#: contain an unrelated module named torch.
FOREIGN_LEFT_OUT = "import sys; sys.path[:] = [path for path in sys.path if path]\n"


def is_set(variable: str) -> bool:
    """Return whether an environment variable has a nonempty value other than 0, false and no."""
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "no")


@dataclass(frozen=True, kw_only=True)
class Files:
    """Paths of the files that a training run reads."""

    tokenizer: str  #: path of a SentencePiece .model file or of a tokenizer folder
    data: str  #: path of the .bin and .idx files, without these suffixes

    def there(self) -> bool:
        return Path(self.tokenizer).exists() and has_data(self.data)

    def lacking(self) -> str:
        """Return a phrase, for a message, about missing data or else a missing tokenizer."""
        if not has_data(self.data):
            return f"none in {self.data}"
        return (
            f"no tokenizer at {self.tokenizer} for the data in {self.data} (name both to train on "
            "these data)"
        )


def has_data(prefix: str) -> bool:
    return all(Path(f"{prefix}{suffix}").is_file() for suffix in (".bin", ".idx"))


def default_corpus() -> Files:
    """Return the paths of the default corpus, which is made from Python's documentation."""
    return Files(
        tokenizer=at_home("model/default/tokenizer.model"),
        data=at_home("dataset/default/corpus_text_document"),
    )


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Tokenizer and data that the user gives for a run, and the files to use by default."""

    tokenizer: str | None  #: tokenizer path given by the user, if any
    data: str | None  #: data prefix given by the user, if any
    default: Files  #: files to use if the user gives none
    corpus: bool  #: True if the default corpus may replace missing default files
    prepare: Sequence[str] = ()  #: command that makes the default files
    names: tuple[str, str] = ("--tokenizer-path", "--data-path")  #: option names, for messages


def resolve_data(request: DataRequest, python: str, *, dry_run: bool) -> Files:
    """Return the files to train on. If the default corpus is needed but missing, make it.

    Raises:
        MissingFile: if a file is missing; the message gives the command that makes it.
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
        # In a dry run, a driver script passes the paths of the default corpus before it exists.
        if files != default_corpus() and not files.there() and not is_set(MISSING_SAID):
            say(f"Missing: {_missing(files, request, python)}.")
        return files
    _check(files, request, python)
    return files


def _missing(files: Files, request: DataRequest, python: str) -> str:
    """Return text that states which of `files` are missing and how to get them."""
    parts = []
    if not Path(files.tokenizer).exists():
        parts.append(f"the tokenizer {files.tokenizer}, which is needed to make the data")
    if not has_data(files.data):
        how = shlex.join(_preparation(files, request, python))
        parts.append(f"the data {files.data}.bin and .idx, which `{how}` makes")
    return "; ".join(parts)


def _preparation(files: Files, request: DataRequest, python: str) -> list[str]:
    """Return the command that makes the missing data files."""
    if request.prepare and request.data is None:
        return [*request.prepare]
    return [
        *(python, at_home("script/data/preprocess.py"), "--input", "TEXT"),
        *("--output-prefix", files.data.removesuffix("_text_document")),
        *("--tokenizer-model", files.tokenizer, "--append-eod"),
    ]


def _check(files: Files, request: DataRequest, python: str) -> None:
    """Check that the files exist. The error lists all missing files, first those the user named.

    Raises:
        MissingFile: if files are missing; the message has a remedy for each file.
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
            f"no data at {files.data} ({files.data}.bin and {files.data}.idx are needed); make "
            f"them with `{how}`, or name other data in {request.names[1]}"
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
    """Make the default corpus if it does not exist, and return its files.

    Raises:
        MissingFile: if it cannot be made; the reason was printed.
    """
    result = subprocess.run([python, REPO / "script/data/default_corpus.py"], check=False)
    if result.returncode:
        raise MissingFile("no default corpus; the reason is above")
    return default_corpus()


def tokenizer_type(path: str) -> str:
    """Return Megatron-LM's name for the tokenizer type of `path`, such as `HuggingFaceTokenizer`.

    `megatron.training.data.tokenizer` applies the same rules.

    Raises:
        MissingFile: if `path` is a folder with no tokenizer or with several.
    """
    location = Path(path)
    hugging_face = ("tokenizer.json", "tokenizer_config.json")
    if location.suffix == ".json" or any((location / name).is_file() for name in hugging_face):
        return "HuggingFaceTokenizer"
    file = _tokenizer_in(location) if location.is_dir() else location
    if file.is_file():
        return "TikTokenizer" if _is_tiktoken(file) else "SentencePieceTokenizer"
    if file.suffix == ".model":
        return "SentencePieceTokenizer"
    # In a dry run, the tokenizer may be missing. Hugging Face's format is then assumed, because
    # published tokenizers have it.
    return "HuggingFaceTokenizer"


def _tokenizer_in(folder: Path) -> Path:
    """Return the path of the tokenizer.model or .tiktoken file in a folder.

    Raises:
        MissingFile: if the folder has no such file, or several .tiktoken files.
    """
    if (folder / "tokenizer.model").is_file():
        return folder / "tokenizer.model"
    files = sorted(folder.glob("*.tiktoken"))
    if not files:
        raise MissingFile(
            f"no tokenizer in the folder {folder}; it needs tokenizer.json (Hugging Face), "
            "tokenizer.model or a .tiktoken file"
        )
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise MissingFile(f"several tokenizers in the folder {folder} ({names}); name one of them")
    return files[0]


def _is_tiktoken(path: Path) -> bool:
    """Return whether a file's first line is in tiktoken's format: a token and its rank.

    The file's name does not show its format: a SentencePiece model may also be called
    tokenizer.model.
    """
    with path.open("rb") as file:
        return re.fullmatch(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", file.readline(1000)) is not None


def interpreter(*, dry_run: bool) -> str:
    """Return the path of the Python interpreter for training; set up .venv if necessary.

    LAB_PYTHON takes precedence. A dry run sets up nothing.

    Raises:
        MissingFile: if LAB_PYTHON does not name a program.
        ConfigError: if the environment cannot be set up; the reason was printed.
    """
    if given := os.environ.get("LAB_PYTHON"):
        if shutil.which(given) is None:
            raise MissingFile(
                f"LAB_PYTHON is '{given}', which is not a program; name a Python 3.10 or newer, or "
                "unset it"
            )
        return given
    if dry_run:
        python = REPO / ".venv" / "bin" / "python"
        return str(python) if os.access(python, os.X_OK) else "python3"
    setup = subprocess.run(
        ["bash", REPO / "script/setup_env.sh"], stdout=subprocess.PIPE, text=True, check=False
    )
    if setup.returncode:
        raise ConfigError("no Python environment; the reason is above")
    return setup.stdout.strip()


def enter_environment() -> None:
    """Restart this program with the Python for training if this Python lacks torch or yaml.

    Raises:
        ConfigError: if this is already the Python for training, or if `interpreter` raises it.
    """
    lacking = [module for module in ("torch", "yaml") if find_spec(module) is None]
    if not lacking:
        return
    python = interpreter(dry_run=False)
    if Path(python).absolute() == Path(sys.executable).absolute():
        given = os.environ.get("LAB_PYTHON")
        advice = "unset LAB_PYTHON" if given else "delete the folder .venv"
        raise ConfigError(
            f"{python} lacks {' and '.join(lacking)}; {advice} and run the command again"
        )
    sys.stdout.flush()
    os.execv(python, [python, *sys.argv])


@cache
def cuda_devices(python: str, *, dry_run: bool = False) -> int:
    """Return the number of usable GPUs; in a dry run, 1 if an NVIDIA driver is installed."""
    if not Path("/dev/nvidia0").exists() and shutil.which("nvidia-smi") is None:
        return 0
    if dry_run:
        return 1
    code = "import torch; print(torch.cuda.device_count())"
    result = subprocess.run(
        [python, "-c", FOREIGN_LEFT_OUT + code], capture_output=True, text=True, check=False
    )
    return int(result.stdout) if result.returncode == 0 else 0
