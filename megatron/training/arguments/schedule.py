"""Convert the schedule of the learning rate and weight decay to samples."""

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Lengths of a run, its warm-up and its learning rate decay, in samples."""

    whole: int  #: samples of the whole run, over which the weight decay changes
    warmup: int
    decay: int  #: sample at which the decay of the learning rate ends
    wsd_decay: int | None  #: length of the final decay; None without `--lr-decay-style WSD`


def samples_after(args: argparse.Namespace, iterations: int) -> int:
    """Return the number of samples that the first `iterations` iterations of a run take.

    With `--rampup-batch-size`, megatron-core's calculator determines the batch sizes.
    """
    batch, consumed = args.global_batch_size, 0
    if args.rampup_batch_size is None:
        return iterations * batch
    start, increment, samples = args.rampup_batch_size
    per_increment = samples / ((batch - start) // increment)
    for done in range(iterations):
        if consumed > samples:
            return consumed + (iterations - done) * batch
        consumed += start + int(consumed / per_increment) * increment
    return consumed


def last_iteration(args: argparse.Namespace, iteration: int, consumed: int) -> int:
    """Return the iteration at which training ends, for a run that continues from a checkpoint.

    With `--train-samples`, this is the iteration that takes the last whole batch of samples, even
    if the earlier iterations had another batch size.

    Args:
        args: arguments of the run.
        iteration: iteration of the checkpoint.
        consumed: number of samples that the run has taken so far.
    """
    if args.train_samples is None:
        return int(args.train_iters)
    return iteration + max(args.train_samples - consumed, 0) // args.global_batch_size


def schedule_of(args: argparse.Namespace) -> Schedule:
    """Return the schedule that the flags set."""
    whole = args.train_samples or samples_after(args, args.train_iters)
    decay = args.lr_decay_samples or whole
    if args.lr_decay_iters:
        decay = samples_after(args, args.lr_decay_iters)
    warmup = args.lr_warmup_samples or samples_after(args, args.lr_warmup_iters)
    if args.lr_warmup_fraction is not None:
        warmup = int(args.lr_warmup_fraction * decay)
    wsd_decay = args.lr_wsd_decay_samples
    if args.lr_wsd_decay_iters:
        wsd_decay = args.lr_wsd_decay_iters * args.global_batch_size
    return Schedule(whole, warmup, decay, wsd_decay)
