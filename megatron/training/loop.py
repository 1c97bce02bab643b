"""The training loop, which also logs, evaluates and saves checkpoints."""

import math
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from megatron.collection.loss_spikes import Jumps, LossSpikeDetector
from megatron.core import tensor_saver
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    update_num_microbatches,
)
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.timers import Timers
from megatron.training.arguments.validation import RunConfig
from megatron.training.checkpointing.files import resumes_in_place
from megatron.training.checkpointing.save_load import save_checkpoint
from megatron.training.collection import observe_step, operand_scalars
from megatron.training.data import datasets as data
from megatron.training.data.batch import forward_step
from megatron.training.errors import RunError
from megatron.training.evaluate import evaluate, print_evaluation
from megatron.training.hf.writing import save_weights
from megatron.training.logging import (
    LogInterval,
    LogValues,
    TimeLeft,
    TrainingProgress,
    log_line,
    memory_scalars,
    params_norm,
    scalars,
    throughput,
)
from megatron.training.printing import print_rank_0, print_rank_last, stamp
from megatron.training.scalar_writers import Scalars
from megatron.training.train_step import StepResult, TrainingState, train_step, whole_weights


class TrainingLoop:
    """The training loop of a run, with its batches, counters and scalars."""

    def __init__(
        self,
        run: RunConfig,
        state: TrainingState,
        progress: TrainingProgress,
        datasets: dict[str, torch.utils.data.Dataset],
        timers: Timers,
    ):
        self.run_, self.args = run, run.args
        self.state, self.progress, self.timers = state, progress, timers
        self.forward_step = partial(forward_step, args=run.args)
        sizes = data.split_sizes(run.args, progress)
        consumed = {
            "train": progress.consumed_train_samples,
            "valid": progress.consumed_valid_samples,
            "test": 0,
        }
        self.batches = {
            split: data.micro_batches(
                run.args, datasets[split], total=total, consumed=consumed[split]
            )
            for split, total in sizes.items()
            if total > consumed[split] and split in datasets
        }
        jumps = Jumps.parse(run.args.collect_loss_jump, run.args.collect_grad_norm_jump)
        self.loss_spikes = LossSpikeDetector(
            replace(jumps, vocabulary=run.args.padded_vocab_size), progress.levels
        )
        self.scalars = Scalars(run.args)
        self.interval = LogInterval()
        self.time_left = TimeLeft()
        self.started = time.monotonic()
        self.plotted_at: int | None = None
        self.saved_at: int | None = progress.iteration if resumes_in_place(run.args) else None

    def run(self) -> None:
        """Train until `--train-iters` is reached or there is a reason to stop earlier."""
        print_rank_0(f"[before the start of training step] datetime: {stamp()}")
        for chunk in self.state.model:
            chunk.train()
        self.interval = LogInterval()
        reason = None
        if self.progress.iteration >= self.args.train_iters > 0:
            print_rank_0(
                f"> nothing left to train: the checkpoint is of iteration "
                f"{self.progress.iteration}, and {self._end()}"
            )
        elif line := self._ended_schedule():
            print_rank_0(f"> {line}")
        try:
            while self.progress.iteration < self.args.train_iters and reason is None:
                self._iterate()
                reason = self._reason_to_stop()
            print_rank_0(f"[after training is done] datetime: {stamp()}")
            if reason is not None:
                print_rank_0(f"> stopping after iteration {self.progress.iteration}: {reason}")
            # Save before the final evaluation: the checkpoint must not count the samples of this
            # evaluation, because a longer run does not evaluate at this iteration.
            self._save()
            if reason is None:
                self._evaluate_at_end()
            self._export(early=reason is not None)
        except BaseException:
            self.scalars.close(failed=True)
            raise
        self.scalars.close(failed=False)

    def _end(self) -> str:
        """Return a clause that states the flag that limits training, and its value."""
        if self.args.train_samples is None:
            return f"--train-iters is {self.args.train_iters}"
        consumed = self.progress.consumed_train_samples
        return f"{consumed} of --train-samples {self.args.train_samples} are consumed"

    def _ended_schedule(self) -> str | None:
        """Return a log line if the learning rate finished its decay before this run, or None."""
        schedule = self.state.scheduler
        if schedule.lr_decay_style == "constant" or schedule.num_steps < schedule.lr_decay_steps:
            return None
        return (
            f"the learning rate has finished its decay: the schedule ends at sample "
            f"{schedule.lr_decay_steps}, the run resumes at sample {schedule.num_steps} and trains "
            f"at {schedule.min_lr} (--min-lr); --override-opt_param-scheduler takes another "
            "schedule, for example with a larger --lr-decay-iters"
        )

    def _iterate(self) -> None:
        progress, args = self.progress, self.args
        update_num_microbatches(progress.consumed_train_samples, consistency_check=True)
        batch = get_current_global_batch_size()
        started = time.perf_counter()
        step = train_step(self.forward_step, self.batches["train"], self.state, self.run_)
        progress.iteration += 1
        progress.consumed_train_samples += batch
        progress.skipped_iterations += step.skipped
        self.interval.add(step)
        self._log(step, time.perf_counter() - started)
        self._watch(step)
        self._check_finite(step)
        if args.eval_iters and progress.iteration % args.eval_interval == 0:
            self._evaluate("valid", f"iteration {progress.iteration}")
        if args.save_interval and progress.iteration % args.save_interval == 0:
            self._save()

    def _watch(self, step: StepResult) -> None:
        """Check the loss and gradient norm for spikes, and pass both to the tensor collector."""
        # If fp16 gradients overflow under loss scaling, their norm does not indicate a spike.
        grad_norm = None if step.skipped else step.grad_norm
        self.loss_spikes.look(self.progress.iteration, step.losses["lm loss"], grad_norm)
        self.progress.levels = self.loss_spikes.levels
        observe_step(step)
        if self.scalars.requested:
            iteration = self.progress.iteration
            self.scalars.write_operands(iteration, operand_scalars(iteration))

    def _log(self, step: StepResult, seconds: float) -> None:
        args, progress, interval = self.args, self.progress, self.interval
        due = progress.iteration % args.log_interval == 0
        point = self.scalars.due(progress.iteration)
        unusual = not all(map(math.isfinite, step.losses.values()))
        if not (due or point or unusual):
            return
        optimizer = self.state.optimizer
        numbers = LogValues(
            learning_rate=get_canonical_lr_for_logging(optimizer.param_groups) or 0.0,
            loss_scale=optimizer.get_loss_scale().item(),
            params_norm=params_norm(self.state.model) if args.log_params_norm else None,
            seconds=seconds,
            throughput=throughput(args, seconds) if args.log_throughput else None,
            memory=memory_scalars() if args.log_memory_to_tensorboard else None,
        )
        self.scalars.write(progress.iteration, scalars(progress, step, numbers))
        if due or unusual:
            mean = (time.perf_counter() - interval.started) / interval.iterations
            shown = LogValues(
                numbers.learning_rate, numbers.loss_scale, numbers.params_norm, seconds=mean
            )
            print_rank_last(log_line(args, progress, interval, step, shown))
            left = self.time_left.line(progress.iteration, args.train_iters, mean)
            if left is not None:
                print_rank_last(left)
            self.interval = LogInterval()
            if args.timing_log_level > 0:
                names = [name for name in self.timers._timers if name != "interval-time"]
                self.timers.log(names, normalizer=max(interval.iterations, 1))

    def _check_finite(self, step: StepResult) -> None:
        """Check that the losses and the gradient norm of an iteration are finite.

        Skipped iterations are not checked.

        Raises:
            RunError: on every rank, if a loss or the gradient norm is not finite.
        """
        if not self.args.check_for_nan_in_loss_and_grad or step.skipped:
            return
        numbers = dict(step.losses)
        if step.grad_norm is not None:
            numbers["grad norm"] = step.grad_norm
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise RunError(
                    f"{name} is {value} at iteration {self.progress.iteration}; lower --lr, warm "
                    "up longer or choose a wider format, or continue with "
                    "--no-check-for-nan-in-loss-and-grad"
                )

    def _reason_to_stop(self) -> str | None:
        """Return the reason to stop before `--train-iters`, or None if there is none.

        The result is the same on every rank.
        """
        args, iteration = self.args, self.progress.iteration
        if reason := tensor_saver.finished():
            return reason
        if args.exit_interval and iteration % args.exit_interval == 0:
            return f"--exit-interval {args.exit_interval}"
        if args.exit_duration_in_mins is not None:
            expired = torch.tensor(
                [time.monotonic() - self.started > args.exit_duration_in_mins * 60.0],
                dtype=torch.int32,
                device=torch.cuda.current_device(),
            )
            dist.all_reduce(expired, op=dist.ReduceOp.MAX)
            if expired.item():
                return f"--exit-duration-in-mins {args.exit_duration_in_mins}"
        return None

    def _evaluate(self, split: str, where: str) -> None:
        if split not in self.batches:
            return
        paused = time.perf_counter()
        losses = evaluate(self.forward_step, self.batches[split], self.state.model, self.run_)
        if split == "valid":
            self.progress.consumed_valid_samples += (
                self.args.eval_iters * get_current_global_batch_size()
            )
            # The last iteration may be evaluated twice, in `_iterate` and in `_evaluate_at_end`;
            # only the first result is passed to the services.
            if self.plotted_at != self.progress.iteration:
                self.scalars.write_evaluation(
                    self.progress.iteration, losses, self.progress.consumed_train_samples
                )
            self.plotted_at = self.progress.iteration
        print_evaluation(losses, where)
        self.interval.started += time.perf_counter() - paused

    def _evaluate_at_end(self) -> None:
        if self.args.eval_iters:
            where = f"iteration {self.progress.iteration} on"
            self._evaluate("valid", f"{where} validation set")
            self._evaluate("test", f"{where} test set")

    def _save(self) -> None:
        """Write a checkpoint to `--save`, if given, unless this iteration is already saved."""
        if self.args.save is None or self.saved_at == self.progress.iteration:
            return
        paused = time.perf_counter()
        tensor_saver.flush_statistics()
        with whole_weights(self.state.model, self.run_):
            save_checkpoint(self.run_, self.state, self.progress)
        self.saved_at = self.progress.iteration
        self.interval.started += time.perf_counter() - paused

    def _export(self, *, early: bool) -> None:
        """Write the weights to `--save-hf`, unless the run stopped early and can be resumed.

        If the weights were written, the command that resumes the run would fail, because the folder
        would not be empty.
        """
        if self.args.save_hf is None:
            return
        if early and self.args.save is not None:
            print_rank_0(f"> --save-hf writes nothing before --train-iters {self.args.train_iters}")
            return
        with whole_weights(self.state.model, self.run_):
            save_weights(self.run_, self.state.model)
