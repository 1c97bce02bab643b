"""Find a Python interpreter with the peer packages, or create one in `.venv-peers`.

`.venv-peers` is separate from the project's environment, because the peers require many packages
that training does not need.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
VENV = REPO / ".venv-peers"
REQUIREMENTS = Path(__file__).with_name("peers_requirements.txt")
#: Packages that the library needs; script/constraints.txt pins their releases.
ESSENTIAL = ("torch", "numpy", "numba")
#: Other packages whose releases script/constraints.txt pins: transformers (quark imports it),
#: ml_dtypes and en_dtypes (they are compared with our code), megatron-core (mindstudio-probe is
#: measured on one of its models), einops and psutil (megatron-core needs them), and triton (torchao
#: and fouroversix import it even where they run plain torch).
SHARED = ("transformers", "ml_dtypes", "en_dtypes", "megatron-core", "einops", "psutil", "triton")
#: Packages that are built without isolation, because their builds need packages already installed.
NOT_ISOLATED = ("fouroversix",)
PROBE = """
import importlib.metadata, json
found = importlib.metadata.distributions()
print(json.dumps({d.metadata["Name"].lower().replace("_", "-"): d.version for d in found}))
"""
PREFIX = "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"
#: Environment variables that make pip install into another interpreter or another folder.
ELSEWHERE = ("PIP_PYTHON", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER")


def say(text: str) -> None:
    print(text, file=sys.stderr)


def pins() -> dict[str, str]:
    """Return, by name, the pinned release of every package that `.venv-peers` should have."""
    setup = runpy.run_path(str(REPO / "setup.py"))
    shared = setup["pins"](setup["RUNTIME"], setup["TEST"])
    lines = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    own = dict(line.split("==") for line in lines if line)
    return {name: shared[name] for name in (*ESSENTIAL, *SHARED) if name in shared} | own


def installed(python: Path) -> dict[str, str]:
    """Return the release of each package installed for an interpreter, by normalized name.

    A normalized name is in lower case, with hyphens instead of underscores.

    Raises:
        OSError: if `python` cannot be started.
        subprocess.CalledProcessError: if it exits with an error.
    """
    probe = subprocess.run([python, "-c", PROBE], check=True, capture_output=True, text=True)
    return json.loads(probe.stdout)


def is_inside(python: Path, venv: Path) -> bool:
    """Return whether pip of the interpreter `python` would install into the environment `venv`."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", PREFIX], check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return False
    prefix, base = done.stdout.splitlines()
    return prefix != base and Path(prefix).resolve() == venv.resolve()


def install(python: Path, constraints: Path, requirement: str) -> bool:
    """Install one requirement into `.venv-peers` and nowhere else; return whether pip succeeded."""
    if not is_inside(python, VENV):
        raise SystemExit(f"[ERROR] {VENV} is not a working virtual environment; delete it")
    command = [python, "-I", "-m", "pip", "--require-virtualenv", "install", "--quiet"]
    command += ["--disable-pip-version-check", "--constraint", constraints, requirement]
    if requirement.partition("==")[0] in NOT_ISOLATED:
        command.append("--no-build-isolation")
    settings = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    settings["SKIP_CUDA_BUILD"] = "1"  # fouroversix then needs no CUDA compiler.
    return subprocess.run(command, stdout=sys.stderr, check=False, env=settings).returncode == 0


def given(python: Path) -> Path:
    """Check that the user's interpreter `python` has torch and numpy, and return its path.

    Nothing is installed into this Python.
    """
    python = python.expanduser().absolute()  # `absolute` keeps a venv's symbolic link.
    try:
        missing = {"torch", "numpy"} - installed(python).keys()
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"[ERROR] --peers-python {python} does not run: {error}; give the path of a Python "
            "interpreter, or leave the option out"
        ) from None
    if missing:
        raise SystemExit(
            f"[ERROR] {python} lacks {' and '.join(sorted(missing))}; install what is missing, or "
            "leave --peers-python out"
        )
    return python


def made() -> Path:
    """Create or complete the environment `.venv-peers`, and return its Python interpreter.

    A peer that cannot be installed is left out; the next call tries again.
    """
    python = VENV / "bin" / "python"
    if not is_inside(python, VENV):
        say(f"making {VENV}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    releases = installed(python)
    wanted = pins()
    constraints = VENV / "constraints.txt"
    constraints.write_text("".join(f"{name}=={pin}\n" for name, pin in wanted.items()))
    for name, pin in wanted.items():
        if releases.get(name.lower().replace("_", "-"), "").partition("+")[0] == pin:
            continue
        say(f"installing {name} {pin} into {VENV.name}")
        if install(python, constraints, f"{name}=={pin}"):
            continue
        if name in ESSENTIAL:
            raise SystemExit(
                f"[ERROR] pip could not install {name} {pin} into {VENV}; its own message is "
                "above. Check the network or PIP_INDEX_URL, or name a Python with --peers-python"
            )
        say(f"pip could not install {name} {pin}: continuing without it")
    return python
