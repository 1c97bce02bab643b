"""Check the flags for the schedule of the learning rate and weight decay."""

import argparse

from megatron.training.arguments.schedule import schedule_of
from megatron.training.errors import UserError

#: pairs of flags that set the same length, one in iterations and one in samples
_PAIRS = (
    ("lr_warmup_iters", "lr_warmup_samples"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
)


def check_schedule(args: argparse.Namespace) -> None:
    """Check the flags for the learning rate and weight decay.

    Raises:
        UserError: if a value is invalid, or if two flags contradict each other.
    """
    if args.min_lr > args.lr:
        raise UserError(f"--min-lr {args.min_lr} is above --lr {args.lr}; lower the former")
    if args.lr_warmup_init > args.lr:
        raise UserError(f"--lr-warmup-init {args.lr_warmup_init} is above --lr; lower the former")
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise UserError(
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each "
            "other; give one"
        )
    _check_pairs(args)
    _check_lengths(args)
    _check_weight_decay(args)


def _check_pairs(args: argparse.Namespace) -> None:
    """Raise `UserError` if several flags set the same length.

    A warm-up fraction outside [0, 1) is also an error.
    """
    for pair in _PAIRS:
        if all(getattr(args, name) for name in pair):
            given = " and ".join(f"--{name.replace('_', '-')}" for name in pair)
            raise UserError(f"{given} set the same length; give one of them")
    if args.lr_warmup_fraction is None:
        return
    if not 0 <= args.lr_warmup_fraction < 1:
        raise UserError(
            f"--lr-warmup-fraction {args.lr_warmup_fraction} is outside [0, 1); change it"
        )
    if args.lr_warmup_iters or args.lr_warmup_samples:
        raise UserError(
            "--lr-warmup-fraction and a number of warm-up iterations or samples were both given; "
            "give one of them"
        )


def _check_lengths(args: argparse.Namespace) -> None:
    """Raise `UserError` if the warm-up or the WSD decay does not fit into the schedule.

    A WSD schedule without the length of its final decay is also an error.
    """
    schedule = schedule_of(args)
    if args.lr_decay_style == "WSD" and schedule.wsd_decay is None:
        raise UserError(
            "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples; give one"
        )
    if not schedule.whole:  # no iteration is trained
        return
    if schedule.warmup >= schedule.decay:
        unit = "samples" if args.lr_warmup_samples else "iters"
        raise UserError(
            f"--lr-warmup-{unit} {getattr(args, f'lr_warmup_{unit}')} does not end before the "
            f"decay of the learning rate, which ends at sample {schedule.decay}; lower it or raise "
            f"--lr-decay-{unit}"
        )
    if schedule.wsd_decay is not None and schedule.wsd_decay > schedule.decay - schedule.warmup:
        raise UserError(
            f"the final decay of {schedule.wsd_decay} samples (--lr-wsd-decay-iters or "
            f"--lr-wsd-decay-samples) is longer than the {schedule.decay - schedule.warmup} "
            "samples between the warm-up and the end of the decay; shorten it"
        )


def _check_weight_decay(args: argparse.Namespace) -> None:
    start, end = args.start_weight_decay, args.end_weight_decay
    style = args.weight_decay_incr_style
    if style == "constant" and start != end:
        raise UserError(
            "--start-weight-decay and --end-weight-decay differ, but --weight-decay-incr-style is "
            "constant; give linear or cosine"
        )
    if style != "constant" and start >= end:
        raise UserError(
            f"--weight-decay-incr-style {style} raises the weight decay, but it starts at {start} "
            f"and ends at {end}; give a --start-weight-decay below --end-weight-decay"
        )
