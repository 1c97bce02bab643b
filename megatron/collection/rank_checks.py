"""Check that the ranks of a run collect into one folder, and that selected modules exist."""

import logging
from collections.abc import Collection, Sequence
from typing import TypeAlias

from megatron.collection.collectives import from_all_ranks
from megatron.collection.module_identity import ModuleIdentity
from megatron.collection.selection import Selection

logger = logging.getLogger(__name__)

#: A module's identity and the names of the module's tensors.
NamedTensors: TypeAlias = tuple[ModuleIdentity, Collection[str]]


def check_folders(folder: str | None) -> None:
    """Check that either all ranks or none collect tensors, and warn if their folders differ.

    The folder is None on a rank that collects nothing.

    Raises:
        ValueError: if the collection is enabled on some ranks but not on others.
    """
    folders = from_all_ranks(folder)
    if None in folders and any(folders):
        ranks = ", ".join(str(rank) for rank, each in enumerate(folders) if each is not None)
        raise ValueError(
            f"saving tensors is enabled only on rank(s) {ranks} of {len(folders)}; give "
            "--save-tensors, or set TENSOR_SAVE_ENABLED to the same value on every machine"
        )
    if len(set(folders)) > 1 and folder == folders[0]:
        logger.warning(
            "the ranks save their tensors to different folders (%s), but every analysis needs all "
            "ranks in one folder; set TENSOR_SAVE_DIR to the same value on every machine",
            ", ".join(map(str, dict.fromkeys(folders))),
        )


def check_selection_exists(selection: Selection, modules: Sequence[NamedTensors]) -> None:
    """Check a selection against the modules of all ranks. Must be called on all ranks.

    Args:
        selection: what this run collects.
        modules: modules of this rank.

    Raises:
        ValueError: if no rank has a selected module or tensor; raised on all ranks.
    """
    selection.check_reached(
        module for of_rank in from_all_ranks(list(modules)) for module in of_rank
    )
