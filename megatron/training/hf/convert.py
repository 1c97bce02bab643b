"""Convert weights to the Hugging Face format without training (`--train-iters 0`).

The model is built without an optimizer and without gradient buffers, so a conversion needs memory
only for the weights and one file.
"""

from megatron.training import model
from megatron.training.arguments.validation import RunConfig
from megatron.training.checkpointing.save_load import load_checkpoint
from megatron.training.hf.writing import save_weights
from megatron.training.printing import print_rank_0
from megatron.training.train_step import TrainingState


def convert(run: RunConfig) -> None:
    """Read the weights of `--load` or `--load-hf` and write them to `--save-hf`.

    Raises:
        UserError: on all ranks, if the weights cannot be read.
        RunError: on all ranks, if the weights cannot be written.
    """
    print_rank_0("> converting weights: nothing is trained or evaluated (--train-iters 0)")
    chunks = model.build_chunks(run, run.args.padded_vocab_size)
    load_checkpoint(run, TrainingState(chunks, None, None))
    save_weights(run, chunks)
