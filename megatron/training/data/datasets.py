"""Build the data sets and iterate over their micro-batches.

megatron-core's data sets read `.bin/.idx` pairs, blend and split them, and cache sample indices on
disk. Only the ranks that feed a model read the data: the first rank of each tensor-parallel group,
on the first and last pipeline stages. Every rank still counts the samples, because the record of a
collected tensor holds the index of the first sample in its micro-batch.
"""

import argparse
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.collective_errors import all_succeed
from megatron.training.data.index_cache import check_cached_files, check_samples
from megatron.training.data.indexed_data import check_index
from megatron.training.data.manifest import check_fits
from megatron.training.data.paths import blend_prefixes, default_cache, index_state, parse_blend
from megatron.training.data.samplers import SequentialSampler
from megatron.training.errors import RankError, RunError, UserError
from megatron.training.printing import print_rank_0

if TYPE_CHECKING:  # an import at run time would be circular
    from megatron.training.logging import TrainingProgress

SPLITS = ("train", "valid", "test")


def stage_needs_data(args: argparse.Namespace) -> bool:
    """Return whether this pipeline stage needs the tokens of a batch.

    The first stage embeds the tokens, and the last stage computes the loss from them. Every stage
    needs them if the attention mask depends on document boundaries (`--reset-attention-mask`) or if
    the model predicts several tokens (`--mtp-num-layers`).
    """
    return (
        parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        or parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        or args.reset_attention_mask
        or bool(args.mtp_num_layers)
    )


def _is_reader(args: argparse.Namespace) -> bool:
    return parallel_state.get_tensor_model_parallel_rank() == 0 and stage_needs_data(args)


def split_sizes(args: argparse.Namespace, progress: "TrainingProgress") -> dict[str, int]:
    """Return the number of samples that the whole run takes from each split.

    A run that resumes with different flags may take more samples than a run that has these flags
    from the start. If the flags are unchanged, the sizes are those of the uninterrupted run,
    because megatron-core shuffles the samples depending on their number.
    """
    batch = args.global_batch_size
    iterations = max(args.train_iters - progress.iteration, 0)
    per_evaluation = args.eval_iters * batch
    done, total = (n // args.eval_interval for n in (progress.iteration, args.train_iters))
    evaluations = max(total - done, 0) + 1
    return {
        "train": max(
            args.train_samples or args.train_iters * batch,
            progress.consumed_train_samples + iterations * batch if iterations else 0,
        ),
        "valid": max(
            (total + 1) * per_evaluation,
            progress.consumed_valid_samples + evaluations * per_evaluation if per_evaluation else 0,
        ),
        "test": per_evaluation,
    }


def check_files(args: argparse.Namespace) -> None:
    """Check every `.idx` file against its `.bin` file. Must be called on all ranks.

    Only the first process of each machine reads the files.

    Raises:
        UserError: on all ranks, if an index is damaged.
    """
    for prefix in _prefixes(args):
        all_succeed(_problem(check_index, prefix))


def _problem(check: Callable[..., None], *arguments: object) -> str | None:
    """Run `check` on the first process of this machine, and return its error message or None."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        try:
            check(*arguments)
        except UserError as error:
            return str(error)
    return None


def _prefixes(args: argparse.Namespace) -> list[str]:
    """Return the data prefixes on the command line, without duplicates."""
    blends = (args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path)
    return list(dict.fromkeys(p for blend in blends if blend for p in blend_prefixes(blend)))


def build_datasets(
    args: argparse.Namespace, tokenizer, progress: "TrainingProgress"
) -> dict[str, torch.utils.data.Dataset]:
    """Return the data sets of the splits that this run uses. Must be called on all ranks.

    Every data set is None on a rank that reads no data.

    Raises:
        UserError: if the data is too small for its split, was made with another tokenizer, or
            cannot be read.
    """
    for prefix in _prefixes(args):
        check_fits(prefix, tokenizer)
    if args.mock_data:  # suppress the warning that the indices are not cached
        logging.getLogger("megatron.core.datasets.gpt_dataset").setLevel(logging.ERROR)
    sizes = split_sizes(args, progress)
    config = _dataset_config(args, tokenizer)
    wanted = [sizes[split] > 0 for split in SPLITS]
    wanted = _without_empty_parts(config, wanted)
    if config.split_matrix is not None:
        config.split_matrix = [
            m if w else None for m, w in zip(config.split_matrix, wanted, strict=True)
        ]
    elif config.blend_per_split is not None:
        config.blend_per_split = [
            blend if w else None for blend, w in zip(config.blend_per_split, wanted, strict=True)
        ]
    builder = BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        [sizes[split] for split in SPLITS],
        lambda: _is_reader(args),
        config,
    )
    all_succeed(_problem(check_cached_files, config.path_to_cache))
    try:
        datasets = builder.build()
    except Exception as error:
        known = (ValueError, AssertionError, OSError, IndexError, MemoryError)
        if not isinstance(error, known) and type(error) is not Exception:  # as megatron-core raises
            raise
        raise UserError(
            f"the data set cannot be used: {' '.join(str(error).split()) or type(error).__name__}; "
            f"check that it holds more than --seq-length {args.seq_length} tokens in each part of "
            f"--split {args.split}, and that {config.path_to_cache} can be written"
        ) from error
    for dataset in datasets:
        all_succeed(_problem(check_samples, dataset, config.path_to_cache))
    return {s: d for s, d, w in zip(SPLITS, datasets, wanted, strict=True) if w}


def _parts(config: GPTDatasetConfig) -> Iterator[tuple[int, str, tuple[float, float] | None]]:
    """Yield (split index, data prefix, document range) for each data prefix of each split.

    The range holds the first and last document as fractions of the prefix's documents. It is None
    if the split takes no documents.
    """
    if config.blend is not None:
        for prefix in config.blend[0]:
            yield from ((index, prefix, share) for index, share in enumerate(config.split_matrix))
    for index, blend in enumerate(config.blend_per_split or ()):
        yield from ((index, prefix, (0.0, 1.0)) for prefix in (blend[0] if blend else ()))


def _without_empty_parts(config: GPTDatasetConfig, wanted: list[bool]) -> list[bool]:
    """Copy `wanted` (one bool per split), and set False for a test split that has an empty part.

    A part is empty if its data prefix has no tokens in the split. The copy is also False for a
    split without a data path. An empty part of another split is an error, because megatron-core
    would loop forever on it.

    Raises:
        UserError: if a prefix has no tokens in a training or validation split that the run needs.
    """
    wanted = list(wanted)
    for index, blend in enumerate(config.blend_per_split or ()):
        if wanted[index] and blend is None:
            name = SPLITS[index]
            missing = "validation" if name == "valid" else "test at the end"
            print_rank_0(f"> no --{name}-data-path: there will be no {missing}")
            wanted[index] = False
    for index, prefix, share in _parts(config):
        if not wanted[index]:
            continue
        # Keep a reference to `indexed`, because `lengths` is a view of its memory.
        indexed = IndexedDataset(prefix, mmap=config.mmap_bin_files)
        lengths = indexed.sequence_lengths
        first, last = (round(bound * len(lengths)) for bound in share or (0, 0))
        if lengths[first:last].any():
            continue
        name = SPLITS[index]
        part = f"the {name} part of {prefix} ({len(lengths)} documents, --split {config.split})"
        if name != "test":
            raise UserError(
                f"{part} has no tokens; give it a larger share, as in --split 90,5,5"
                + (", or --eval-iters 0" if name == "valid" else "")
            )
        print_rank_0(f"> {part} is empty: there will be no test at the end")
        wanted[index] = False
    return wanted


def _dataset_config(args: argparse.Namespace, tokenizer) -> GPTDatasetConfig:
    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    blends = [None if values is None else parse_blend(values) for values in per_split]
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None if args.data_path is None else parse_blend(args.data_path),
        blend_per_split=blends if any(blends) else None,
        split=args.split if args.data_path is not None else None,
        path_to_cache=None if args.mock_data else _cache(args, [args.data_path, *per_split]),
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
    )


def _cache(args: argparse.Namespace, blends: list[list[str] | None]) -> str:
    """Return the cache folder for sample indices of data blends. Must be called on all ranks.

    The first rank chooses the folder and writes the indices; the other ranks read them there.
    """
    prefixes = [prefix for blend in blends if blend for prefix in blend_prefixes(blend)]
    folder = args.data_cache_path or default_cache(prefixes)
    if folder is None:
        folder = str(Path(tempfile.gettempdir(), f"megatron_index_cache_{os.getuid()}"))
        print_rank_0(
            f"> the data folder cannot be written: sample indices go to {folder}; on several "
            "machines give --data-cache-path"
        )
    message = [str(Path(folder, index_state(prefixes)))]
    torch.distributed.broadcast_object_list(message, src=0)
    return message[0]


class MicroBatches:
    """Iterator over the micro-batches that one pipeline stage of this rank processes.

    Each item is a pair: the index of the micro-batch's first sample, and the batch. The batch is
    None on a rank that reads no data.
    """

    def __init__(self, dataset, sampler: SequentialSampler, args: argparse.Namespace):
        self._indices = iter(sampler)
        self._vocab_size = args.padded_vocab_size
        self._batches: Iterator | None = None
        if dataset is not None:
            self._batches = iter(
                torch.utils.data.DataLoader(
                    dataset,
                    batch_sampler=sampler,
                    num_workers=args.num_workers,
                    pin_memory=torch.cuda.is_available(),
                    generator=torch.Generator(),  # the default would draw from the run's generator
                )
            )

    def __iter__(self):
        return self

    def __next__(self) -> tuple[int, dict[str, torch.Tensor] | None]:
        indices = next(self._indices, None)
        if indices is None:
            raise RunError(
                "the data set has no samples left; give more data, fewer iterations, or a blend "
                "without weights"
            )
        return indices[0], None if self._batches is None else self._checked(next(self._batches))

    def _checked(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Check that all token ids of `batch` are in the vocabulary, and return `batch`.

        On a GPU, an id outside the vocabulary would trigger a device-side assert in the embedding.

        Raises:
            RankError: if the data was made with another tokenizer, or its ids are damaged.
        """
        bounds = [batch[name].aminmax() for name in ("tokens", "labels")]
        smallest = min(int(low) for low, _ in bounds)
        largest = max(int(high) for _, high in bounds)
        if smallest < 0:
            raise RankError(
                f"the data holds token id {smallest}, but ids begin at 0; check the data with "
                "`python script/data/preprocess.py --check PREFIX` and make it again"
            )
        if largest >= self._vocab_size:
            raise RankError(
                f"the data holds token id {largest}, but the vocabulary has {self._vocab_size}; "
                "give the --tokenizer-model (or --vocab-size) that the data was made with"
            )
        return batch


def micro_batches(
    args: argparse.Namespace, dataset, *, total: int, consumed: int
) -> list[MicroBatches]:
    """Return a list with one iterator over the micro-batches for each model chunk of this rank.

    The iterators are independent of each other. Must be called on all ranks.

    Args:
        args: the run's arguments.
        dataset: the data set, or None on a rank that reads no data; the first rank always reads it.
        total: number of samples that the whole run takes.
        consumed: number of samples that the run has already taken.

    Raises:
        UserError: on all ranks, if the data set has fewer than `total` samples.
    """
    length = [None if dataset is None else len(dataset)]
    torch.distributed.broadcast_object_list(length, src=0)
    if length[0] is not None and length[0] < total:
        raise UserError(
            f"the data has {length[0]} samples of {args.seq_length} tokens, but the run takes "
            f"{total}; lower --train-iters or --eval-iters, or add weights to the blend, so that "
            "its data is repeated"
        )
    sampler = SequentialSampler(
        total_samples=total,
        consumed_samples=consumed,
        micro_batch_size=args.micro_batch_size,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=args.data_parallel_size,
    )
    stages = args.virtual_pipeline_model_parallel_size or 1
    return [MicroBatches(dataset, sampler, args) for _ in range(stages)]
