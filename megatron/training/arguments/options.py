"""Flags that are not fields of megatron-core's configurations: one dataclass a group, one field a
flag.

Names and defaults are Megatron-LM's unless the help text says otherwise. Those of the collection
are in collection_options.py.
"""

# ruff: noqa: RUF009  (`option` is a dataclass field)

from dataclasses import dataclass

from megatron.training.arguments.option_fields import option
from megatron.training.collection_options import CollectionOptions
from megatron.training.data.tokenizer import TOKENIZER_TYPES


@dataclass(kw_only=True)
class ModelOptions:
    """Model"""

    swiglu: bool = option(False, "gated linear units with SiLU instead of GELU")
    quick_geglu: bool = option(False, "gated linear units with the quick GELU")
    squared_relu: bool = option(False, "squared ReLU instead of GELU")
    group_query_attention: bool = option(
        False, "share keys and values between heads; --num-query-groups alone also turns it on"
    )
    position_embedding_type: str = option(
        "learned_absolute",
        "how a token knows its position",
        choices=("learned_absolute", "rope", "none"),
    )
    use_rotary_position_embeddings: bool = option(
        False, "older name of --position-embedding-type rope"
    )
    rotary_seq_len_interpolation_factor: float | None = option(
        None, "linear interpolation of rotary positions for longer sequences", type=float
    )
    use_rope_scaling: bool = option(False, "the frequency scaling of Llama 3.1 and later")
    rope_scaling_factor: float = option(8.0, "factor of --use-rope-scaling", type=float)
    max_position_embeddings: int | None = option(
        None, "longest sequence the model can take (default: --seq-length)", type=int
    )
    untie_embeddings_and_output_weights: bool = option(
        False, "give the output layer weights of its own"
    )
    make_vocab_size_divisible_by: int = option(
        128, "pad the vocabulary to a multiple of this and of the tensor-parallel size", type=int
    )
    fp16_lm_cross_entropy: bool = option(False, "leave the logits in 16 bits for the loss")
    init_method_xavier_uniform: bool = option(False, "Xavier instead of normal initialization")
    use_mcore_models: bool = option(False, "accepted for older scripts; there are no other models")


@dataclass(kw_only=True)
class ParallelOptions:
    """Processes and pipeline"""

    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "layers of each stage of the interleaved pipeline schedule", type=int
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None, "stages a rank of the interleaved pipeline schedule", type=int
    )
    use_tp_pp_dp_mapping: bool = option(False, "number the ranks tp, pp, dp instead of tp, dp, pp")
    distributed_backend: str | None = option(
        None,
        "default: nccl where CUDA is available, else gloo",
        choices=("nccl", "gloo"),
    )
    distributed_timeout_minutes: int = option(10, "timeout of a collective", type=int)
    disable_gloo_process_groups: bool = option(False, "make no CPU groups besides the NCCL ones")


@dataclass(kw_only=True)
class TrainingOptions:
    """Training"""

    micro_batch_size: int | None = option(None, "sequences a micro-batch (required)", type=int)
    global_batch_size: int | None = option(
        None, "sequences an iteration (default: micro-batch size x data-parallel size)", type=int
    )
    rampup_batch_size: list[int] | None = option(
        None,
        "start, increment and samples of a growing global batch",
        type=int,
        nargs=3,
        metavar="N",
    )
    train_iters: int | None = option(None, "iterations to train (or --train-samples)", type=int)
    train_samples: int | None = option(None, "sequences to train on", type=int)
    exit_interval: int | None = option(
        None, "stop after an iteration divisible by this, saving if --save is given", type=int
    )
    exit_duration_in_mins: int | None = option(None, "stop after so many minutes", type=int)
    seed: int = option(1234, "seed of Python, numpy, torch and the order of the data", type=int)
    check_for_nan_in_loss_and_grad: bool = option(
        True, "stop at a loss that is not finite (it is always reported)"
    )


@dataclass(kw_only=True)
class SchedulerOptions:
    """Learning rate and weight decay"""

    lr_decay_style: str = option(
        "linear", "", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_wsd_decay_style: str = option(
        "exponential", "", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_decay_iters: int | None = option(None, "default: --train-iters", type=int)
    lr_decay_samples: int | None = option(None, "default: --train-samples", type=int)
    lr_wsd_decay_iters: int | None = option(None, "length of the decay of WSD", type=int)
    lr_wsd_decay_samples: int | None = option(None, "length of the decay of WSD", type=int)
    lr_warmup_iters: int = option(0, "iterations of linear warm-up", type=int)
    lr_warmup_samples: int = option(0, "samples of linear warm-up", type=int)
    lr_warmup_fraction: float | None = option(
        None, "warm-up as a fraction of the decay", type=float
    )
    lr_warmup_init: float = option(0.0, "learning rate at which the warm-up starts", type=float)
    start_weight_decay: float | None = option(None, "default: --weight-decay", type=float)
    end_weight_decay: float | None = option(None, "default: --weight-decay", type=float)
    weight_decay_incr_style: str = option("constant", "", choices=("constant", "linear", "cosine"))
    override_opt_param_scheduler: bool = option(
        False,
        "take the schedule and the optimizer's numbers (learning rates, betas, epsilon, weight "
        "decay) from the command line, not from the checkpoint",
        flags=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "take the schedule and the optimizer's numbers from the checkpoint, not from the command "
        "line",
        flags=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
    )


@dataclass(kw_only=True)
class DataOptions:
    """Data and tokenizer"""

    data_path: list[str] | None = option(
        None,
        "prefix of a .bin/.idx pair, or weights and prefixes: 0.3 a 0.7 b",
        nargs="+",
        metavar="PREFIX",
    )
    train_data_path: list[str] | None = option(
        None, "the same for training only", nargs="+", metavar="PREFIX"
    )
    valid_data_path: list[str] | None = option(
        None, "the same for validation only", nargs="+", metavar="PREFIX"
    )
    test_data_path: list[str] | None = option(
        None, "the same for the test only", nargs="+", metavar="PREFIX"
    )
    split: str | None = option(
        None, "shares of training, validation and test of --data-path (default: 969,30,1)"
    )
    mock_data: bool = option(False, "made-up tokens instead of --data-path")
    data_cache_path: str | None = option(
        None,
        "folder of the sample indices (default: beside the data if that can be written)",
        metavar="DIR",
    )
    mmap_bin_files: bool = option(True, "map the .bin files instead of reading them")
    seq_length: int | None = option(None, "tokens a sequence (required)", type=int)
    num_workers: int | None = option(
        None, "data loading processes a rank (default: 2 with CUDA, else 0)", type=int
    )
    reset_position_ids: bool = option(False, "count positions from each document's start")
    reset_attention_mask: bool = option(False, "keep attention within each document")
    eod_mask_loss: bool = option(False, "no loss on end-of-document tokens")
    create_attention_mask_in_dataloader: bool | None = option(
        None,
        "build the attention mask with each sample (default: only with --reset-attention-mask; the "
        "layers make a causal mask themselves)",
    )
    tokenizer_type: str | None = option(
        None,
        "kind of the tokenizer (default: by what is at --tokenizer-model)",
        choices=TOKENIZER_TYPES,
    )
    tokenizer_model: str | None = option(
        None, "a .model, .tiktoken or tokenizer.json file, or a folder with one", metavar="PATH"
    )
    vocab_size: int | None = option(
        None, "size of the vocabulary before padding; required by NullTokenizer", type=int
    )
    eval_interval: int = option(1000, "iterations between validations", type=int)
    eval_iters: int = option(100, "iterations of a validation; 0: none", type=int)


@dataclass(kw_only=True)
class CheckpointOptions:
    """Checkpoints"""

    save: str | None = option(None, "folder to write checkpoints to", metavar="DIR")
    load: str | None = option(None, "folder to resume from", metavar="DIR")
    save_interval: int | None = option(
        None, "iterations between checkpoints; without it only the last one is written", type=int
    )
    ckpt_step: int | None = option(None, "iteration to load instead of the latest", type=int)
    save_optim: bool = option(True, "write the optimizer's state")
    save_rng: bool = option(True, "write the random states")
    load_optim: bool = option(True, "read the optimizer's state")
    load_rng: bool = option(True, "read the random states")
    finetune: bool = option(False, "load the weights only and start at iteration 0")
    allow_changed_run: bool = option(
        False,
        "resume with another number format, data, split, seed, sequence length or bf16/fp16 than "
        "the checkpoint was trained with; without it that is refused",
    )
    load_hf: str | None = option(
        None,
        "start from a Hugging Face checkpoint (safetensors of LlamaForCausalLM or "
        "DeepseekV2ForCausalLM); sets the flags of the architecture that were not given. A "
        "checkpoint in --load goes first",
        metavar="DIR",
    )
    save_hf: str | None = option(
        None,
        "write the weights in the Hugging Face format when training ends; with --train-iters 0 "
        "only convert those of --load or --load-hf",
        metavar="DIR",
    )
    ckpt_format: str = option("torch_dist", "", choices=("torch_dist",))


@dataclass(kw_only=True)
class LoggingOptions:
    """Logging"""

    log_interval: int = option(
        1, "iterations between log lines (Megatron-LM's default is 100)", type=int
    )
    log_throughput: bool = option(False, "add TFLOP/s a device to the log line")
    log_params_norm: bool = option(False, "add the norm of the parameters to the log line")
    tensorboard_dir: str | None = option(None, "folder of TensorBoard events", metavar="DIR")
    tensorboard_log_interval: int = option(1, "iterations between TensorBoard points", type=int)
    timing_log_level: int = option(
        0, "0: iteration time only; 1, 2: more timers", type=int, choices=(0, 1, 2)
    )
    timing_log_option: str = option("minmax", "", choices=("max", "minmax", "all"))


@dataclass(kw_only=True)
class QuantizationOptions:
    """Simulated number formats (not in Megatron-LM)"""

    custom_quant_type: str | None = option(
        None,
        "mxfp8, FA_mxfp8, linear_mxfp4, FA_linear_hifp8, ..., bf16 or none; wins over the "
        "environment's CUSTOM_QUANT_TYPE",
        metavar="TYPE",
    )
    linear_quant: str | None = option(None, "format of the linear layers", metavar="FORMAT")
    qk_quant: str | None = option(None, "format of Q K^T", metavar="FORMAT")
    pv_quant: str | None = option(None, "format of P V", metavar="FORMAT")
    quant_recipe: str | None = option(
        None,
        "YAML file that sets formats layer by layer and operand by operand; see examples/recipes. "
        "Wins over the environment's QUANT_RECIPE",
        metavar="FILE",
    )
    quant_audit: bool = option(
        False, "print what each matmul of the model goes through, and stop before training"
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
)  #: in the order of `--help`
