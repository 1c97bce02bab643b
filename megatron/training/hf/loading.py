"""Load the weights of a Hugging Face checkpoint into this rank's model, for any parallel layout."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron.collection.module_identity import global_parameters
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from megatron.training.arguments.validation import RunConfig
from megatron.training.checkpointing.files import resumes
from megatron.training.collective_errors import all_succeed, first_rank_does
from megatron.training.errors import UserError
from megatron.training.hf.architectures import Model
from megatron.training.hf.layouts import Layout, Piece
from megatron.training.hf.reading import Weights
from megatron.training.printing import print_rank_0


def parts(
    chunks: list[torch.nn.Module], tensors: dict[str, Layout]
) -> Iterator[tuple[str, torch.nn.Parameter, Layout, list[Piece]]]:
    """Yield each parameter of this rank with the parts of checkpoint tensors that it consists of.

    Each item is (name, parameter, layout, pieces). `layout` describes the tensor on all ranks, and
    `pieces` lists the parts on this rank.

    Args:
        chunks: model chunks of this rank.
        tensors: `Layout` of each model tensor, by the tensor's name in the unpartitioned model.
    """
    for chunk in unwrap_model(chunks):
        for name, parameter in global_parameters(chunk):
            layout = tensors[name]
            rank, ranks = _place(name)
            length = parameter.shape[layout.dim]
            yield name, parameter, layout, layout.pieces(rank=rank, ranks=ranks, length=length)


def _place(name: str) -> tuple[int, int]:
    """Return this rank's index in the group of ranks that share a tensor, and the group's size."""
    if ".local_experts." in name:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def check_weights(run: RunConfig) -> None:
    """Check that the weights in `--load-hf` can be read, before the model is built.

    Must be called on all ranks. A run that resumes from a checkpoint is not checked.

    Raises:
        UserError: on all ranks, if the weights cannot be read.
    """
    args = run.args
    if args.load_hf is None:
        return

    def check() -> None:
        if resumes(args):
            return
        with Weights(args.load_hf) as weights:
            layers = run.hf.config["num_hidden_layers"]
            dense = run.hf.config.get("first_k_dense_replace") or 0
            experts = run.hf.config.get("n_routed_experts") or 0
            weights.check_count(layers if not experts else layers - dense, experts)
            tied = bool(run.hf.config.get("tie_word_embeddings"))
            weights.check(run.hf.sources, tied=tied)

    first_rank_does(check)


@torch.no_grad()
def load_weights(chunks: list[torch.nn.Module], model: Model, folder: str) -> None:
    """Load this rank's share of every tensor into the model. Must be called on all ranks.

    Raises:
        UserError: on all ranks, if a file cannot be read.
    """
    print_rank_0(f" loading weights from {folder}")
    problem = None
    with Weights(folder) as weights:
        try:
            _read(weights, chunks, model)
        except UserError as error:
            problem = str(error)
    all_succeed(problem)
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, weights.bytes_read)
    least, most = (f"{count / 2**20:.1f} MiB" for count in (min(counts), max(counts)))
    print_rank_0(f"  weights loaded; each rank read {least} to {most}")


def _read(weights: Weights, chunks: list[torch.nn.Module], model: Model) -> None:
    parameters = list(parts(chunks, model.tensors))
    disable = None if dist.get_rank() == 0 else True
    for _, parameter, layout, pieces in tqdm(
        parameters, desc="loading", unit="tensor", disable=disable
    ):
        if layout.padded:
            parameter.zero_()  # padding rows must not be left uninitialized
        for piece in pieces:
            target = parameter.data.narrow(layout.dim, piece.offset, piece.stop - piece.start)
            target.copy_(weights.read(piece))
