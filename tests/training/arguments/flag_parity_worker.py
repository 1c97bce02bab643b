"""A worker that loads a Hugging Face checkpoint with several command lines and saves the logits.

    flag_parity_worker.py CASES.json RESULTS

CASES.json maps names to {"options": [...], "unchecked": bool}. An unchecked command line may
contradict the checkpoint. RESULTS_<rank>.pt maps the names to the logits of `hf_models.sample()`,
to the message of an error or a crash, or to None on a rank without logits.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.training.hf import hf_worker  # first: it prepares the device
from tests.training.hf.hf_models import TOKENS, sample

from megatron.core import parallel_state  # isort: skip
from megatron.training.data.batch import part_of_this_rank  # isort: skip
from megatron.training.errors import UserError  # isort: skip
from megatron.training.hf import flags  # isort: skip

differing = flags.differing


def forward_step(_, chunk):
    """Compute the logits of this context-parallel rank's tokens."""
    tokens = sample()
    batch = {"tokens": tokens, "positions": torch.arange(TOKENS).repeat(2, 1)}
    batch = part_of_this_rank(batch)
    output = chunk(batch["tokens"], batch["positions"], None)
    return output, lambda output, non_loss_data: output


def whole_sequence(logits: torch.Tensor | None) -> torch.Tensor | None:
    """Join the chunks of all n context-parallel ranks; rank r holds chunks r and 2 n - 1 - r."""
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return logits
    parts = [torch.empty_like(logits) for _ in range(ranks)]
    dist.all_gather(parts, logits.contiguous(), group=parallel_state.get_context_parallel_group())
    halves = [part.chunk(2, dim=1) for part in parts]
    return torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)], dim=1)


def outcome(options: list[str], *, unchecked: bool) -> torch.Tensor | str | None:
    """Return the logits of a command line, or the message of the error that it causes."""
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        # megatron-core sets these variables and would later refuse a different attention backend.
        del os.environ[name]
    flags.differing = (lambda expected, args: []) if unchecked else differing
    try:
        run, chunks = hf_worker.loaded(options)
        with torch.no_grad():
            return hf_worker.logits_of(run, chunks)
    except UserError as error:
        return str(error)
    except Exception as error:  # raised by megatron-core; the test reports the flag
        return f"CRASHED with {type(error).__name__}: {error}"
    finally:
        if parallel_state.is_initialized():
            hf_worker.leave()


def main(cases: Path, results: str) -> None:
    hf_worker.start_once()
    hf_worker.forward_step = forward_step
    gathered = hf_worker.gather_from_tensor_model_parallel_region
    hf_worker.gather_from_tensor_model_parallel_region = lambda x: whole_sequence(gathered(x))
    outcomes = {name: outcome(**case) for name, case in json.loads(cases.read_text()).items()}
    torch.save(outcomes, f"{results}_{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
