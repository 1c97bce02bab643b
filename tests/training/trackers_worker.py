"""A worker that runs `pretrain_gpt.py` with recorders instead of wandb and mlflow.

The recorders append each call as a line of JSON to the file that $CALLS names. $BROKEN names a
call that raises an error.
"""

import json
import os
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

from megatron.training.main import main


def record(name: str, /, *values: object, **named: object) -> None:
    with Path(os.environ["CALLS"]).open("a") as file:
        file.write(json.dumps([name, values, named]) + "\n")
    if name == os.environ.get("BROKEN"):
        raise RuntimeError("the server is away\nfor a while")


def recorder(prefix: str) -> types.SimpleNamespace:
    """Return an object whose functions record their calls."""
    names = ("log", "finish", "set_tracking_uri", "set_experiment", "start_run", "end_run")
    names += ("log_params", "log_metrics")
    return types.SimpleNamespace(
        **{
            name: (lambda *values, name=name, **named: record(f"{prefix}.{name}", *values, **named))
            for name in names
        }
    )


def install() -> None:
    """Put both modules where `import` and `find_spec` find them."""

    def init(**named: object) -> types.SimpleNamespace:
        record("wandb.init", **named)
        return recorder("wandb")

    modules = {
        "wandb": {"init": init, "Settings": lambda **named: named},
        "mlflow": vars(recorder("mlflow")),
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, origin=__file__)
        vars(module).update(contents)
        sys.modules[name] = module


if __name__ == "__main__":
    from megatron.training import device

    device.prepare()
    install()
    sys.exit(main())
