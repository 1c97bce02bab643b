"""Describe what the launcher does, in lines that precede the output of the script."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from megatron import cpu_backend
from megatron.collection.run_card import collection_folder
from megatron.collection.settings import enabled_by_environment
from megatron.fake_quant import policy
from megatron.overlay.command_line import Request, flags_of_launcher
from megatron.overlay.module_sources import OURS, Sources


def announcement(request: Request, sources: Sources) -> Iterator[str]:
    """Yield lines about the origin of packages, the device, the formats and the collection."""
    core = import_module("megatron.core")
    base = Path(core.__path__[1])
    yield f"{request.script} runs with the megatron-core of {OURS.parent}"
    yield (
        f"  megatron.core: {core.__version__} of {base.parents[1]}, {_overlaid(base)} of its files "
        "overlaid"
    )
    training = sources.package("training")
    yield f"  megatron.training: {training or 'none'}"
    for path in sources.hidden():
        yield f"  hidden by this project's package with the same name: {path}"
    if cpu_backend.is_active():
        yield "  device: CPU; torch.cuda, NCCL and torch.compile are replaced (no CUDA device)"
    formats = policy.current()
    options = request.options
    if formats.changes_matmuls:
        yield from (f"  format of {line}" for line in formats.describe())
    if options.save_tensors is not None:
        yield f"  tensors: to {options.save_tensors}"
    if options.tensor_statistics is not None:
        folder = collection_folder(request.collection["save_dir"]) / "statistics"
        yield f"  statistics: every {options.tensor_statistics} iterations, to {folder}"
    by_environment = enabled_by_environment() and options.save_tensors is None
    if by_environment:
        yield f"  tensors: to {collection_folder(None)} (environment variable TENSOR_SAVE_ENABLED)"
    if not (formats.changes_matmuls or request.collects or by_environment):
        yield "  nothing is quantized or collected; add --quant TYPE or --save-tensors DIR"
    late = [word for word in request.arguments if word.partition("=")[0] in flags_of_launcher()]
    if late:
        yield f"  flags after the script belong to the script: {', '.join(late)}"


def _overlaid(base: Path) -> int:
    """Return the number of files of the megatron-core in `base` that this tree replaces."""
    ours = OURS / "core"
    return sum(
        (base / path.relative_to(ours)).is_file()
        for path in ours.rglob("*.py")
        if path.name != "__init__.py"
    )
