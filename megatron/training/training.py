"""The steps of a run: check the flags, build the model and the data, train, and shut down."""

from megatron.core import tensor_saver
from megatron.core.low_precision import program_end
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.fake_quant import policy
from megatron.training import model
from megatron.training.arguments.schedule import last_iteration
from megatron.training.arguments.validation import RunConfig
from megatron.training.checkpointing.files import check_save_directory
from megatron.training.checkpointing.save_load import load_checkpoint
from megatron.training.collection import (
    check_collection,
    close_collection,
    configure_collection,
    print_plan,
    report_collection,
)
from megatron.training.collective_errors import all_succeed
from megatron.training.data import datasets as data
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.errors import RunError, UserError
from megatron.training.hf.convert import convert
from megatron.training.hf.flags import check_vocabulary, converts, name_special_tokens
from megatron.training.hf.loading import check_weights
from megatron.training.hf.writing import check_export
from megatron.training.initialize import initialize
from megatron.training.loop import TrainingLoop
from megatron.training.low_precision import audit_model, configure_formats
from megatron.training.printing import print_rank_0
from megatron.training.scalar_writers import Scalars, event_folder_problem
from megatron.training.train_step import TrainingState


def pretrain(run: RunConfig) -> None:
    """Set up and run the training that the command line specifies.

    Raises:
        UserError: on every rank, if the flags or the data are invalid.
    """
    args = run.args
    program_end.leave_exit_to_launcher()  # with some flags, the model is never run
    model.check_buildable(args)
    configure_formats(args)
    check_collection(args)
    timers = initialize(args)
    for note in run.notes:
        print_rank_0(f"> {note}")
    for line in policy.current().describe():
        print_rank_0(f"> {line}" if line.startswith("accumulator") else f"> format of {line}")
    check_save_directory(args)
    all_succeed(event_folder_problem(args))
    check_export(run)
    check_weights(run)
    data.check_files(args)
    tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    tokens = check_vocabulary(args, run.hf, tokenizer.vocab_size)
    name_special_tokens(args, run.hf, tokenizer)
    args.padded_vocab_size = model.padded_vocab_size(args, tokens)
    run.transformer.timers = run.optimizer.timers = timers
    if converts(args):
        convert(run)
        return

    chunks = model.build_model(run, args.padded_vocab_size)
    optimizer = model.build_optimizer(run, chunks)
    state = TrainingState(chunks, optimizer, model.build_scheduler(args, optimizer))
    _connect(run, state)
    progress = load_checkpoint(run, state)
    consumed = progress.consumed_train_samples
    args.train_iters = last_iteration(args, progress.iteration, consumed)
    update_num_microbatches(consumed, consistency_check=False)
    lines, quantization = audit_model(args, chunks, progress.iteration)
    for line in lines:
        print_rank_0(f"> {line}")
    if args.quant_audit:
        print_rank_0("> stopping before training (--quant-audit)")
        return
    datasets = data.build_datasets(args, tokenizer, progress)
    try:
        configure_collection(args, chunks, progress, quantization)
        if args.collect_plan:
            print_plan(run, state, progress, datasets["train"])
            return
        loop = TrainingLoop(run, state, progress, datasets, timers)
        loop.run()
        report_collection()
    except BaseException as error:
        reason = str(error) or type(error).__name__
        tensor_saver.close(aborted=reason, interrupted=not isinstance(error, Exception))
        raise
    close_collection()
    _check_scalars(loop.scalars)


def _check_scalars(scalars: Scalars) -> None:
    """Raise an error if a service did not receive all scalars, at the end of a run.

    Must be called on all ranks.

    Raises:
        RunError: on every rank, if scalars are missing.
    """
    for kind in scalars.requested:
        try:
            all_succeed(scalars.failure(kind))
        except UserError as error:
            raise RunError(
                f"training is complete, but {kind.incomplete}: {error}; {kind.remedy}"
            ) from None


def _connect(run: RunConfig, state: TrainingState) -> None:
    """Set the functions that megatron-core's schedules call to scale losses and sync gradients."""
    from megatron.core.distributed import finalize_model_grads

    config, ddp = run.transformer, run.ddp
    config.grad_scale_func = state.optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads

    def chunk_methods(name: str):
        methods = [getattr(chunk, name) for chunk in state.model]
        return methods[0] if len(methods) == 1 else methods

    if ddp.overlap_grad_reduce:
        config.no_sync_func = chunk_methods("no_sync")
        if ddp.align_param_gather or ddp.use_distributed_optimizer:
            config.grad_sync_func = chunk_methods("start_grad_sync")
    if ddp.overlap_param_gather and ddp.align_param_gather:
        config.param_sync_func = chunk_methods("start_param_sync")
