"""Replace functions of the script's tree when their module is imported.

Two of them would compile code and write it into the script's tree, which this project never does.
"""

import argparse
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megatron import cpu_backend
from megatron.overlay import script_arguments


def _use_compiled_helpers(module: ModuleType) -> None:
    """Replace `compile_helpers`, which runs make in the folder of megatron-core.

    It compiles for the Python of the shell, which may differ from this Python.
    """

    def compile_helpers() -> None:
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError as error:
            raise ImportError(
                "megatron-core's compiled helpers for data sets are missing for this Python: "
                f"{error}; install the megatron-core wheel of the same version as "
                f"{sys.modules['megatron.core'].__path__[1]}"
            ) from error

    module.compile_helpers = compile_helpers  # type: ignore[attr-defined]


def _skip_fused_kernels(module: ModuleType) -> None:
    """Replace `fused_kernels.load`, which calls nvcc, if there is no CUDA device."""
    if cpu_backend.is_active():
        module.load = lambda args: None  # type: ignore[attr-defined]


def _check_arguments(module: ModuleType) -> None:
    """Replace `validate_args`, so that flags which a CPU needs are checked before all others."""
    validate = module.validate_args

    @functools.wraps(validate)
    def validate_args(args: argparse.Namespace, *rest: Any, **options: Any) -> Any:
        script_arguments.check(args)
        return validate(args, *rest, **options)

    module.validate_args = validate_args  # type: ignore[attr-defined]


def _pass_on_losses(module: ModuleType) -> None:
    """Replace `training_log`, so that the collection sees each iteration's loss and gradient norm.

    A ring buffer needs them, and the statistics of the operands are saved with them.
    """
    log = module.training_log
    signature = inspect.signature(log)

    @functools.wraps(log)
    def training_log(*args: Any, **options: Any) -> Any:
        values = signature.bind(*args, **options).arguments
        collecting = importlib.import_module("megatron.overlay.collecting")
        skipped = bool(values.get("skipped_iter"))
        collecting.observe(values["loss_dict"], None if skipped else values["grad_norm"])
        return log(*args, **options)

    if {"loss_dict", "grad_norm"} <= signature.parameters.keys():
        module.training_log = training_log  # type: ignore[attr-defined]


#: functions that change a module after its import, by the module's name
REPLACEMENTS: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.datasets.utils": _use_compiled_helpers,
    "megatron.legacy.fused_kernels": _skip_fused_kernels,
    "megatron.training.arguments": _check_arguments,
    "megatron.training.training": _pass_on_losses,
}


def register(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call `change` with the module `name` after its import, or now if it is already imported."""
    REPLACEMENTS[name] = change
    if name in sys.modules:
        change(sys.modules[name])


def replace_after_import(spec: ModuleSpec) -> ModuleSpec:
    """Return `spec` with a loader that changes the module after it has been executed."""
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        REPLACEMENTS[spec.name](module)

    loader.exec_module = exec_module
    return spec


def replace_in_imported() -> None:
    """Change the modules that were imported before the finder was installed."""
    for name, change in REPLACEMENTS.items():
        if name in sys.modules:
            change(sys.modules[name])
