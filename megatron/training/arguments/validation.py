"""Derive missing values of the command line, and check all values.

Each error message states what was given and how to correct it.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import configs
from megatron.training.arguments.config_flags import fill_defaults, flagged_fields
from megatron.training.arguments.defaults import derive, installed
from megatron.training.arguments.moe_mla_checks import check_experts, check_mla
from megatron.training.arguments.option_fields import minimums
from megatron.training.arguments.options import GROUPS
from megatron.training.arguments.parallel_layout import check_layout
from megatron.training.arguments.schedule_checks import check_schedule
from megatron.training.data.paths import blend_prefixes, check_prefix, check_split
from megatron.training.data.tokenizer import guess_tokenizer_type
from megatron.training.errors import UserError
from megatron.training.hf.architectures import Model


@dataclass
class RunConfig:
    """The configuration of a run: its flags and megatron-core's configuration objects."""

    args: argparse.Namespace  #: values of all flags, both given and derived
    transformer: TransformerConfig
    optimizer: OptimizerConfig
    ddp: DistributedDataParallelConfig
    notes: list[str]  #: messages for the log about flags whose values were changed or filled in
    hf: Model | None = None  #: model in the checkpoint of --load-hf or --save-hf, if any


def complete(args: argparse.Namespace, generated: list[type]) -> RunConfig:
    """Derive missing values, check all values, and build megatron-core's configuration objects.

    Args:
        args: flags as parsed, which are completed in place.
        generated: configuration classes from whose fields flags are generated.

    Raises:
        UserError: if a value is missing or invalid.
    """
    _check_required(args)
    _check_numbers(args)
    notes = derive(args)
    for check in (
        *(check_layout, _check_batches, _check_model, _check_optimizer),
        *(check_schedule, _check_data),
    ):
        check(args)
    _check_files(args)
    run = RunConfig(
        args,
        transformer=configs.transformer_config(args),
        optimizer=configs.optimizer_config(args),
        ddp=configs.ddp_config(args),
        notes=notes,
    )
    # If several configurations have the same field, the last one in this loop sets the flag.
    for config in (run.ddp, run.optimizer, run.transformer):
        for name in flagged_fields(type(config)):
            setattr(args, name, getattr(config, name))
    fill_defaults(args, generated)
    return run


def _check_required(args: argparse.Namespace) -> None:
    for name in (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "seq_length",
        "micro_batch_size",
        "lr",
    ):
        if getattr(args, name) is None:
            raise UserError(f"--{name.replace('_', '-')} is missing; give it a value")
    if (args.train_iters is None) == (args.train_samples is None):
        given = "neither" if args.train_iters is None else "both"
        raise UserError(f"{given} of --train-iters and --train-samples was given; give one")


#: smallest accepted values of the generated flags and of the tensor collection flags; options.py
#: declares the minimums of all other flags
_MINIMUMS = {
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "ffn_hidden_size",
            "kv_channels",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "moe_ffn_hidden_size",
            "moe_router_topk",
            "recompute_num_layers",
            "rotary_base",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            *("lr", "min_lr", "clip_grad", "weight_decay", "control_iter", "collect_micro_batches"),
            *("init_method_std", "embedding_init_method_std", "layernorm_epsilon"),
            *("moe_aux_loss_coeff", "moe_z_loss_coeff"),
        ),
        0,
    ),
}
#: accepted intervals of numbers that also have an upper bound, or whose lower bound is excluded
_INTERVALS = {
    **dict.fromkeys(("adam_beta1", "adam_beta2", "sgd_momentum"), "[0, 1)"),
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), "[0, 1]"),
    "rotary_percent": "(0, 1]",
    "seed": "[0, 4294967296)",
    **dict.fromkeys(("adam_eps", "softmax_scale"), "(0, inf)"),
}


def _check_numbers(args: argparse.Namespace) -> None:
    """Raise `UserError` if the value of a numeric flag is out of range or not finite."""
    for name, minimum in (_MINIMUMS | minimums(GROUPS)).items():
        for value in _numbers(args, name):
            if not math.isfinite(value):
                raise UserError(f"{_flag(name)} {value} is not finite; give {minimum} or more")
            if value < minimum:
                raise UserError(f"{_flag(name)} {value} is too small; give {minimum} or more")
    for name, interval in _INTERVALS.items():
        low, high = map(float, interval[1:-1].split(","))
        for value in _numbers(args, name):
            inside = low < value < high
            inside |= interval[0] == "[" and value == low
            inside |= interval[-1] == "]" and value == high
            if not inside:
                raise UserError(f"{_flag(name)} {value} is outside {interval}; change it")


def _numbers(args: argparse.Namespace, name: str) -> list[float]:
    """Return the values of a flag that takes one number or several."""
    value = getattr(args, name)
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _flag(name: str) -> str:
    """Return the flag that sets the field `name`."""
    spelled = {"layernorm_epsilon": "norm_epsilon"}.get(name, name)
    return f"--{spelled.replace('_', '-')}"


def _check_batches(args: argparse.Namespace) -> None:
    step = args.micro_batch_size * args.data_parallel_size
    pp = args.pipeline_model_parallel_size
    interleaved = args.virtual_pipeline_model_parallel_size
    if args.rampup_batch_size is not None:
        _check_rampup(args, step * pp if interleaved else step)
    if args.global_batch_size % step and args.rampup_batch_size is None:
        raise UserError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size} x {args.data_parallel_size} data-parallel rank(s); "
            f"make it a multiple of {step}"
        )
    if interleaved and (args.global_batch_size // step) % pp:
        raise UserError(
            f"the interleaved schedule needs a multiple of {pp} micro-batches per iteration, but "
            f"--global-batch-size {args.global_batch_size} makes {args.global_batch_size // step}; "
            f"make it a multiple of {step * pp}"
        )
    if args.train_samples is not None:
        if args.rampup_batch_size is not None:
            raise UserError(
                "--rampup-batch-size needs --train-iters; give it instead of --train-samples"
            )
        args.train_iters = args.train_samples // args.global_batch_size
        if not args.train_iters:
            raise UserError(
                f"--train-samples {args.train_samples} is less than one iteration of "
                f"{args.global_batch_size}; raise it"
            )


def _check_rampup(args: argparse.Namespace, step: int) -> None:
    """Raise `UserError` unless the batch grows to `--global-batch-size` in whole increments.

    Every batch size on the way must be a multiple of `step`.
    """
    start, increment, samples = args.rampup_batch_size
    flag = f"--rampup-batch-size {start} {increment} {samples}"
    if min(start, increment, samples) < 1:
        raise UserError(f"{flag} holds a number below 1; give three numbers of at least 1")
    growth = args.global_batch_size - start
    if growth <= 0 or growth % increment:
        raise UserError(
            f"{flag} does not reach --global-batch-size {args.global_batch_size} in whole "
            "increments; give a smaller start, and an increment that divides the difference"
        )
    if start % step or increment % step:
        raise UserError(
            f"{flag} makes batches that cannot be divided into micro-batches of "
            f"{args.micro_batch_size} on {args.data_parallel_size} data-parallel rank(s)"
            + f"; make the start and the increment multiples of {step}"
        )


def _check_model(args: argparse.Namespace) -> None:
    if args.kv_channels is None and args.hidden_size % args.num_attention_heads:
        raise UserError(
            f"--hidden-size {args.hidden_size} is not a multiple of --num-attention-heads "
            f"{args.num_attention_heads}; change one or give --kv-channels"
        )
    rotary = args.position_embedding_type == "rope" and not args.multi_latent_attention
    channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    if rotary and args.rotary_percent in (None, 1) and channels % 2:
        raise UserError(
            f"--kv-channels {channels} is odd, but rotary position embeddings rotate pairs "
            "of channels; make it even or lower --rotary-percent"
        )
    groups = args.num_query_groups
    if groups is not None and args.num_attention_heads % groups:
        raise UserError(
            f"--num-attention-heads {args.num_attention_heads} is not a multiple of "
            f"--num-query-groups {groups}; change one"
        )
    if args.seq_length > args.max_position_embeddings:
        raise UserError(
            f"--seq-length {args.seq_length} is longer than --max-position-embeddings "
            f"{args.max_position_embeddings}; lower the first or raise the second"
        )
    parts = (args.tensor_model_parallel_size if args.sequence_parallel else 1) * (
        2 * args.context_parallel_size if args.context_parallel_size > 1 else 1
    )
    if args.seq_length % parts:
        raise UserError(
            f"--seq-length {args.seq_length} cannot be cut into {parts} equal parts, as sequence "
            "or context parallelism needs; change it"
        )
    if sum((args.swiglu, args.quick_geglu, args.squared_relu)) > 1:
        raise UserError("--swiglu, --quick-geglu and --squared-relu exclude each other; give one")
    if args.transformer_impl != "local" and not installed("transformer_engine"):
        raise UserError(
            f"--transformer-impl {args.transformer_impl} needs Transformer Engine, which is not "
            "installed; remove the flag: the default, local, needs no other package"
        )
    if args.transformer_impl == "local":
        _check_local_only(args)
    check_experts(args)
    check_mla(args)


def _check_optimizer(args: argparse.Namespace) -> None:
    """Raise `UserError` for optimizers that megatron-core cannot build here."""
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        raise UserError(
            "--optimizer sgd and --use-distributed-optimizer exclude each other in megatron-core; "
            "remove one of them"
        )
    if args.use_precision_aware_optimizer and not installed("transformer_engine"):
        raise UserError(
            "--use-precision-aware-optimizer needs Transformer Engine, which is not installed; "
            "remove the flag"
        )


def _check_local_only(args: argparse.Namespace) -> None:
    """Raise `UserError` for flags that only Transformer Engine's layers read.

    megatron-core's local layers ignore these flags.
    """
    for flag, value in (("--fp8-format", args.fp8), ("--fp4-format", args.fp4)):
        if value:
            raise UserError(
                f"{flag} {value} works only with Transformer Engine's layers; give "
                "--transformer-impl transformer_engine on a GPU, or simulate a format, for example "
                "with --custom-quant-type mxfp8"
            )
    if args.fp32_residual_connection and (args.bf16 or args.fp16):
        raise UserError(
            "--fp32-residual-connection needs Transformer Engine's layers if the model is bf16 or "
            "fp16; remove it, or give --transformer-impl transformer_engine on a GPU"
        )
    backend = getattr(args.attention_backend, "name", "auto")
    if backend in ("flash", "fused"):
        raise UserError(
            f"--attention-backend {backend} belongs to Transformer Engine; remove it: the local "
            "layers have only unfused attention"
        )


def _check_data(args: argparse.Namespace) -> None:
    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    sources = [args.data_path is not None, any(p is not None for p in per_split), args.mock_data]
    if sum(sources) != 1:
        given = "none" if not any(sources) else "more than one"
        raise UserError(
            f"{given} of --data-path, --train-data-path (with its companions) and --mock-data was "
            "given; give one"
        )
    if args.train_data_path is None and any(per_split):
        raise UserError(
            "--valid-data-path or --test-data-path was given without --train-data-path; add the "
            "latter"
        )
    if args.split is not None:
        check_split(args.split)
    for blend in (args.data_path, *per_split):
        for prefix in blend_prefixes(blend) if blend else ():
            check_prefix(prefix)
    if args.tokenizer_type is None:
        if args.tokenizer_model is None:
            raise UserError(
                "--tokenizer-model is missing; give it a value, or --tokenizer-type NullTokenizer"
            )
        args.tokenizer_type = guess_tokenizer_type(args.tokenizer_model)
    if args.tokenizer_type == "NullTokenizer":
        if args.vocab_size is None:
            raise UserError("--tokenizer-type NullTokenizer needs --vocab-size; give it")
    elif args.tokenizer_model is None:
        raise UserError(f"--tokenizer-type {args.tokenizer_type} needs --tokenizer-model; give it")
    elif not Path(args.tokenizer_model).exists():
        raise UserError(
            f"--tokenizer-model {args.tokenizer_model} does not exist; name a .model file or a "
            "folder with a tokenizer"
        )


def _check_files(args: argparse.Namespace) -> None:
    if args.save_interval is not None and args.save is None:
        raise UserError("--save-interval was given without --save; give the folder to write to")
    if args.load is None:
        for flag, given in (("--finetune", args.finetune), ("--ckpt-step", args.ckpt_step)):
            if given:
                raise UserError(f"{flag} was given without --load; give the folder to load from")
    if args.save is not None and not installed("psutil"):
        raise UserError(
            "--save needs the psutil package: without it megatron-core's writer waits forever; run "
            "`pip install psutil`"
        )
    if args.tensorboard_dir is not None and not installed("tensorboard"):
        raise UserError(
            "--tensorboard-dir needs the tensorboard package; run `pip install tensorboard` or "
            "remove the flag"
        )
    _check_trackers(args)


def _check_trackers(args: argparse.Namespace) -> None:
    """Check that requested trackers are installed, and that a wandb run has a name and a folder."""
    for flag, given, package, wheel in (
        ("--wandb-project", args.wandb_project, "wandb", "wandb"),
        ("--mlflow-experiment", args.mlflow_experiment, "mlflow", "mlflow-skinny"),
    ):
        if given is not None and not installed(package):
            raise UserError(
                f"{flag} needs the {package} package; run `pip install {wheel}` or remove the flag"
            )
    if args.wandb_project is None:
        return
    if args.wandb_exp_name is None:
        raise UserError("--wandb-project needs the name of the run; give --wandb-exp-name")
    if args.wandb_save_dir is None and args.save is None:
        raise UserError(
            "--wandb-project needs a folder for its local files; give --wandb-save-dir or --save"
        )
