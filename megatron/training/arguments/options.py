"""Declarations of the flags that are not fields of megatron-core's configurations.

There is one dataclass per group of `--help`, with one field per flag. The docstring of a dataclass
is the title of its group in `--help`. Names and defaults are the same as in Megatron-LM unless the
help text says otherwise. The flags of the tensor collection are in `megatron.collection.flags`.
"""

# ruff: noqa: RUF009  (`option` returns a dataclass field)

from dataclasses import dataclass, make_dataclass

from megatron.collection.flags import FLAGS, Flag
from megatron.training.arguments.option_fields import option
from megatron.training.data.tokenizer import TOKENIZER_TYPES


@dataclass(kw_only=True)
class ModelOptions:
    """Flags for the model"""

    swiglu: bool = option(False, "use gated linear units with SiLU instead of GELU")
    quick_geglu: bool = option(False, "use gated linear units with the quick GELU approximation")
    squared_relu: bool = option(False, "use squared ReLU instead of GELU")
    group_query_attention: bool = option(
        False, "share keys and values between heads; --num-query-groups alone also turns it on"
    )
    position_embedding_type: str = option(
        "learned_absolute",
        "kind of position embedding",
        choices=("learned_absolute", "rope", "none"),
    )
    use_rotary_position_embeddings: bool = option(
        False, "older name of --position-embedding-type rope"
    )
    rotary_seq_len_interpolation_factor: float | None = option(
        None, "divide rotary positions by this factor, for longer sequences", type=float
    )
    use_rope_scaling: bool = option(
        False, "scale the rotary frequencies as Llama 3.1 and later models do"
    )
    rope_scaling_factor: float = option(8.0, "scaling factor of --use-rope-scaling", type=float)
    max_position_embeddings: int | None = option(
        None, "longest sequence that the model accepts (default: --seq-length)", type=int, minimum=1
    )
    untie_embeddings_and_output_weights: bool = option(
        False, "give the output layer its own weights instead of the embedding's"
    )
    make_vocab_size_divisible_by: int = option(
        128,
        "pad the vocabulary to a multiple of this number times the tensor-parallel size",
        type=int,
        minimum=1,
    )
    fp16_lm_cross_entropy: bool = option(
        False, "no effect, hence refused: the loss is computed from 32-bit logits"
    )
    init_method_xavier_uniform: bool = option(
        False, "use Xavier uniform instead of normal initialization"
    )
    use_mcore_models: bool = option(
        False, "no effect; accepted for older scripts, because there are no other models"
    )


@dataclass(kw_only=True)
class ParallelOptions:
    """Flags for processes and the pipeline"""

    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "layers per stage of the interleaved pipeline schedule", type=int
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None, "stages per rank of the interleaved pipeline schedule", type=int, minimum=1
    )
    use_tp_pp_dp_mapping: bool = option(
        False, "order the ranks by tensor, pipeline, data instead of tensor, data, pipeline"
    )
    distributed_backend: str | None = option(
        None,
        "backend of torch.distributed (default: nccl if CUDA is available, otherwise gloo)",
        choices=("nccl", "gloo"),
    )
    distributed_timeout_minutes: int = option(
        10, "timeout of a collective operation, in minutes", type=int, minimum=1
    )
    disable_gloo_process_groups: bool = option(
        False, "create no gloo process groups beside those of the backend"
    )


@dataclass(kw_only=True)
class TrainingOptions:
    """Flags for training"""

    micro_batch_size: int | None = option(
        None, "sequences per micro-batch (required)", type=int, minimum=1
    )
    global_batch_size: int | None = option(
        None,
        "sequences per iteration (default: micro-batch size x data-parallel size)",
        type=int,
        minimum=1,
    )
    rampup_batch_size: list[int] | None = option(
        None,
        "grow the global batch size: its start value, its increment, and the number of samples "
        "over which it grows",
        type=int,
        nargs=3,
        metavar="N",
    )
    train_iters: int | None = option(
        None, "iterations to train; give this or --train-samples", type=int, minimum=0
    )
    train_samples: int | None = option(None, "sequences to train on", type=int, minimum=1)
    exit_interval: int | None = option(
        None,
        "stop after the first iteration that is divisible by this; saves a checkpoint if --save "
        "is given",
        type=int,
        minimum=1,
    )
    exit_duration_in_mins: int | None = option(
        None,
        "stop after this many minutes; saves a checkpoint if --save is given",
        type=int,
        minimum=1,
    )
    seed: int = option(
        1234, "seed of Python, NumPy, PyTorch and the order of the data", type=int, minimum=0
    )
    check_for_nan_in_loss_and_grad: bool = option(
        True, "stop if a loss or the gradient norm is not finite; the log always shows it"
    )


@dataclass(kw_only=True)
class SchedulerOptions:
    """Flags for the learning rate and weight decay"""

    lr_decay_style: str = option(
        "linear",
        "shape of the learning rate's decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_wsd_decay_style: str = option(
        "exponential",
        "shape of the final decay with --lr-decay-style WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_decay_iters: int | None = option(
        None, "iteration at which the decay ends (default: the last one)", type=int, minimum=1
    )
    lr_decay_samples: int | None = option(
        None, "sample at which the decay ends (default: the last one)", type=int, minimum=1
    )
    lr_wsd_decay_iters: int | None = option(
        None, "iterations of the final decay with --lr-decay-style WSD", type=int, minimum=1
    )
    lr_wsd_decay_samples: int | None = option(
        None, "samples of the final decay with --lr-decay-style WSD", type=int, minimum=1
    )
    lr_warmup_iters: int = option(0, "iterations of linear warm-up", type=int, minimum=0)
    lr_warmup_samples: int = option(0, "samples of linear warm-up", type=int, minimum=0)
    lr_warmup_fraction: float | None = option(
        None, "length of the warm-up as a fraction of the decay's length", type=float
    )
    lr_warmup_init: float = option(
        0.0, "learning rate at which the warm-up starts", type=float, minimum=0
    )
    start_weight_decay: float | None = option(
        None, "weight decay at the beginning (default: --weight-decay)", type=float, minimum=0
    )
    end_weight_decay: float | None = option(
        None, "weight decay at the end (default: --weight-decay)", type=float, minimum=0
    )
    weight_decay_incr_style: str = option(
        "constant",
        "how the weight decay changes during training",
        choices=("constant", "linear", "cosine"),
    )
    override_opt_param_scheduler: bool = option(
        False,
        "take the schedule and the optimizer's settings (learning rates, betas, epsilon, weight "
        "decay) from the command line, not from the checkpoint",
        flags=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "take the schedule and the optimizer's settings from the checkpoint, not from the command "
        "line",
        flags=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
    )


@dataclass(kw_only=True)
class DataOptions:
    """Flags for data and the tokenizer"""

    data_path: list[str] | None = option(
        None,
        "prefix of a .bin/.idx pair, or a blend of weights and prefixes: 0.3 a 0.7 b",
        nargs="+",
        metavar="PREFIX",
    )
    train_data_path: list[str] | None = option(
        None, "like --data-path, for training only", nargs="+", metavar="PREFIX"
    )
    valid_data_path: list[str] | None = option(
        None, "like --data-path, for validation only", nargs="+", metavar="PREFIX"
    )
    test_data_path: list[str] | None = option(
        None, "like --data-path, for testing only", nargs="+", metavar="PREFIX"
    )
    split: str | None = option(
        None,
        "shares of --data-path for training, validation and testing (default: 969,30,1)",
    )
    mock_data: bool = option(False, "train on generated tokens instead of --data-path")
    data_cache_path: str | None = option(
        None,
        "folder of the sample indices (default: the data's folder if it is writable)",
        metavar="DIR",
    )
    mmap_bin_files: bool = option(True, "memory-map the .bin files instead of reading them")
    seq_length: int | None = option(None, "tokens per sequence (required)", type=int, minimum=1)
    num_workers: int | None = option(
        None,
        "data loading processes per rank (default: 2 with CUDA, otherwise 0)",
        type=int,
        minimum=0,
    )
    reset_position_ids: bool = option(False, "restart the positions at each document")
    reset_attention_mask: bool = option(False, "restrict attention to tokens of one document")
    eod_mask_loss: bool = option(False, "exclude end-of-document tokens from the loss")
    create_attention_mask_in_dataloader: bool | None = option(
        None,
        "build an attention mask for each sample (default: only with --reset-attention-mask, "
        "because the layers create a causal mask themselves)",
    )
    tokenizer_type: str | None = option(
        None,
        "kind of tokenizer (default: detected from --tokenizer-model)",
        choices=TOKENIZER_TYPES,
    )
    tokenizer_model: str | None = option(
        None, "a .model, .tiktoken or tokenizer.json file, or a folder with one", metavar="PATH"
    )
    vocab_size: int | None = option(
        None, "vocabulary size before padding; required by NullTokenizer", type=int, minimum=1
    )
    eval_interval: int = option(1000, "iterations between validations", type=int, minimum=1)
    eval_iters: int = option(
        100, "iterations per validation; 0: no validation", type=int, minimum=0
    )


@dataclass(kw_only=True)
class CheckpointOptions:
    """Flags for checkpoints"""

    save: str | None = option(None, "folder to write checkpoints to", metavar="DIR")
    load: str | None = option(None, "folder of checkpoints to resume from", metavar="DIR")
    save_interval: int | None = option(
        None,
        "iterations between checkpoints (default: only one, when training ends)",
        type=int,
        minimum=1,
    )
    ckpt_step: int | None = option(
        None, "iteration of the checkpoint to load (default: the latest)", type=int, minimum=0
    )
    save_optim: bool = option(True, "write the optimizer's state")
    save_rng: bool = option(True, "write the random states")
    load_optim: bool = option(True, "read the optimizer's state")
    load_rng: bool = option(True, "read the random states")
    finetune: bool = option(False, "load only the weights, and start at iteration 0")
    allow_changed_run: bool = option(
        False,
        "resume even if the number format, data, split, seed, sequence length or bf16/fp16 differ "
        "from those of the checkpoint; without this flag that is an error",
    )
    load_hf: str | None = option(
        None,
        "start from a Hugging Face checkpoint (safetensors of LlamaForCausalLM or "
        "DeepseekV2ForCausalLM), which sets the architecture's flags that are not given. A "
        "checkpoint in --load takes precedence",
        metavar="DIR",
    )
    save_hf: str | None = option(
        None,
        "write the weights in the Hugging Face format when training ends; with --train-iters 0, "
        "only convert the weights of --load or --load-hf",
        metavar="DIR",
    )
    ckpt_format: str = option("torch_dist", "format of checkpoints", choices=("torch_dist",))


@dataclass(kw_only=True)
class LoggingOptions:
    """Flags for logging"""

    log_interval: int = option(
        1, "iterations between log lines (Megatron-LM's default is 100)", type=int, minimum=1
    )
    log_throughput: bool = option(False, "add TFLOP/s per device to the log line and the scalars")
    log_params_norm: bool = option(False, "add the L2 norm of the parameters to the log line")
    tensorboard_dir: str | None = option(
        None, "folder to write TensorBoard event files to", metavar="DIR"
    )
    tensorboard_log_interval: int = option(
        1,
        "iterations between values in the TensorBoard event files, Weights & Biases and MLflow",
        type=int,
        minimum=1,
    )
    log_memory_to_tensorboard: bool = option(
        False,
        "add the memory of the last rank's device to the scalars; without a CUDA device, the "
        "resident memory of its process",
    )
    wandb_project: str | None = option(
        None, "project in Weights & Biases to send the scalars to", metavar="NAME"
    )
    wandb_exp_name: str | None = option(None, "name of the run in Weights & Biases", metavar="NAME")
    wandb_save_dir: str | None = option(
        None, "folder of Weights & Biases' local files (default: wandb in --save)", metavar="DIR"
    )
    wandb_entity: str | None = option(
        None, "user or team that owns the project (default: that of `wandb login`)", metavar="NAME"
    )
    mlflow_experiment: str | None = option(
        None, "experiment in MLflow to send the scalars to (not in Megatron-LM)", metavar="NAME"
    )
    mlflow_run_name: str | None = option(
        None, "name of the run in MLflow (default: MLflow chooses one)", metavar="NAME"
    )
    mlflow_tracking_uri: str | None = option(
        None,
        "address of the MLflow server, or of a local store (default: the environment variable "
        "MLFLOW_TRACKING_URI)",
        metavar="URI",
    )
    timing_log_level: int = option(
        0,
        "timers to log; 0: only the time per iteration; 1, 2: more detailed ones",
        type=int,
        choices=(0, 1, 2),
    )
    timing_log_option: str = option(
        "minmax",
        "statistics of the timers over the ranks",
        choices=("max", "minmax", "all"),
    )


@dataclass(kw_only=True)
class QuantizationOptions:
    """Flags for simulated number formats (not in Megatron-LM)"""

    custom_quant_type: str | None = option(
        None,
        "formats of linear layers and attention: mxfp8, FA_mxfp8, linear_mxfp4, FA_linear_hifp8, "
        "..., bf16 or none; overrides the environment variable CUSTOM_QUANT_TYPE",
        metavar="TYPE",
    )
    linear_quant: str | None = option(
        None, "format of the matmuls of linear layers", metavar="FORMAT"
    )
    qk_quant: str | None = option(None, "format of the matmul Q K^T in attention", metavar="FORMAT")
    pv_quant: str | None = option(None, "format of the matmul P V in attention", metavar="FORMAT")
    quant_recipe: str | None = option(
        None,
        "YAML file that sets the formats per layer and operand; see examples/recipes. Overrides "
        "the environment variable QUANT_RECIPE",
        metavar="FILE",
    )
    quant_accumulate: str | None = option(
        None,
        "accumulator of every matmul whose operands the simulated unit multiplies, as in "
        "hopper_fp8; `python -m megatron.fake_quant accumulate list` lists them. Overrides the "
        "environment variable QUANT_ACCUMULATE",
        metavar="NAME",
    )
    quant_audit: bool = option(
        False, "print the formats of every matmul of the model, and stop before training"
    )


def _collection_option(flag: Flag) -> tuple[str, object, object]:
    """Return the name, type and dataclass field of a tensor collection flag."""
    if flag.type is bool:
        return flag.name, bool, option(flag.default, flag.help)
    values = {"nargs": "+"} if flag.many else {}
    how = option(flag.default, flag.help, type=flag.type, metavar=flag.metavar, **values)
    return flag.name, list[flag.type] if flag.many else flag.type, how


CollectionOptions = make_dataclass(
    "CollectionOptions",
    [_collection_option(flag) for flag in FLAGS],
    namespace={"__doc__": "Tensor collection (not in Megatron-LM)"},
    kw_only=True,
)

GROUPS = (
    ModelOptions,
    ParallelOptions,
    TrainingOptions,
    SchedulerOptions,
    DataOptions,
    CheckpointOptions,
    LoggingOptions,
    QuantizationOptions,
    CollectionOptions,
)  #: all classes of this module, in the order in which `--help` lists their groups
