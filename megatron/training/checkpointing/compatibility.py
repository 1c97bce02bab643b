"""Describe a run in its checkpoints, and check that a checkpoint fits the run that loads it.

Weights fit only a model with the same shapes, and are valid only in a model that computes the same
function. A run that resumes with different data or another number format is no longer the same run.
Such a change is therefore an error unless the user explicitly requests it.
"""

import argparse
import functools
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.bounded_files import printable
from megatron.fake_quant import policy
from megatron.training.collective_errors import first_rank_does
from megatron.training.data.paths import parse_blend
from megatron.training.errors import RunError, UserError
from megatron.training.hf.flags import converts, differing, flag_of
from megatron.training.printing import print_rank_0

#: flags that determine the shapes of the weights; a run can load a checkpoint only if all of these
#: flags are the same as in the checkpoint
ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "padded_vocab_size",
    "position_embedding_type",
    "normalization",
    "untie_embeddings_and_output_weights",
    "add_bias_linear",
    "num_moe_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_enable_expert_bias",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "qk_layernorm",
)
#: further flags that change what the model computes. If one differs, the weights of a checkpoint
#: may still fit, but the model is a different one. `--save-hf` writes some of these flags to
#: config.json.
COMPUTATION = (
    "swiglu",
    "quick_geglu",
    "squared_relu",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "apply_residual_connection_post_layernorm",
    "add_qkv_bias",
    "qk_l2_norm",
    "attention_output_gate",
    "softmax_scale",
    "softmax_type",
    "window_size",
    "mtp_num_layers",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "no_rope_freq",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_expert_capacity_factor",
)
#: flag for the longest sequence that the model accepts. `--save-hf` writes the flag's value to
#: config.json. The default is the current `--seq-length`, even in a run that resumes.
LONGEST = "max_position_embeddings"
#: flags that must be the same as in the checkpoint if the optimizer's state is loaded
OPTIMIZER = ("use_distributed_optimizer", "optimizer")
#: hyperparameters in the optimizer's state; the scheduler's state contains those of the schedule
NUMBERS = (
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "sgd_momentum",
    "decoupled_lr",
    "decoupled_min_lr",
)
#: flags of the parallel layout; the ranks' random states are loaded only if all of these flags are
#: the same as in the checkpoint
LAYOUT = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "use_tp_pp_dp_mapping",
)
#: flags that affect the training but may differ when a run resumes; the log lists each difference
NOTED = (
    "micro_batch_size",
    "global_batch_size",
    "rampup_batch_size",
    "attention_dropout",
    "hidden_dropout",
    "clip_grad",
    "eod_mask_loss",
    "reset_attention_mask",
    "reset_position_ids",
    "calculate_per_token_loss",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_bias_update_rate",
)
#: flags that every checkpoint records; checkpoints of the current version also record those in
#: `NOTED`
RECORDED = (*ARCHITECTURE, *COMPUTATION, LONGEST, *LAYOUT, *OPTIMIZER, *NUMBERS)
#: properties of a run that must not change when the run resumes, each with the flag that sets it
RUN = {
    "format": "--custom-quant-type and similar flags",
    "data": "--data-path",
    "split": "--split",
    "seed": "--seed",
    "sequence length": "--seq-length",
    "type": "--bf16, --fp16 or neither",
}
_LONGEST = 300  #: number of characters to print of a value in a checkpoint
_HEAD = 2**16  #: number of bytes to hash at the start of each data file


def run_description(args: argparse.Namespace) -> dict[str, Any]:
    """Return the description of a run that is stored in its checkpoints.

    Returns:
        The recorded flags under `args`, and the properties in `RUN` under `run`.

    Raises:
        OSError: if the training data cannot be read.
    """
    names = (*RECORDED, *NOTED)
    return {"args": {name: getattr(args, name) for name in names}, "run": _run(args)}


def _run(args: argparse.Namespace) -> dict[str, str]:
    """Return the properties of this run that must not change when it resumes, as strings."""
    return {
        "format": _format(),
        "data": _data(args),
        "split": str(args.split),
        "seed": str(args.seed),
        "sequence length": str(args.seq_length),
        "type": _type(args),
    }


def _type(args: argparse.Namespace) -> str:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def _format() -> str:
    """Return the quantization type in effect, followed by a digest of the recipe if there is one.

    The digest does not depend on the path of the recipe file.
    """
    formats = policy.current()
    if formats.recipe is None:
        return formats.quant_type
    rules = [replace(rule, line=0) for rule in formats.recipe.rules]
    return f"{formats.quant_type} ({_digest(repr(rules).encode())})"


def _data(args: argparse.Namespace) -> str:
    """Return the names, weights and content digests of the data sets, without their folders."""
    parts = []
    for split in ("", "train", "valid", "test"):
        blend = getattr(args, f"{split}_data_path" if split else "data_path")
        if blend:
            prefixes, weights = parse_blend(blend)
            named = [f"{Path(prefix).name} ({_contents(prefix)})" for prefix in prefixes]
            if weights is not None:
                named = [f"{w:g} {name}" for w, name in zip(weights, named, strict=True)]
            parts.append(f"{split} {' '.join(named)}".strip())
    return ", ".join(parts) or "made up (--mock-data)"


@functools.cache
def _contents(prefix: str) -> str:
    """Return a short digest of the sizes and first bytes of a pair of .idx and .bin files."""
    content = b""
    for suffix in (".idx", ".bin"):
        path = Path(prefix + suffix)
        with path.open("rb") as file:
            content += path.stat().st_size.to_bytes(8, "little") + file.read(_HEAD)
    return _digest(content)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def check_model(args: argparse.Namespace, common: dict[str, Any], folder: Path) -> None:
    """Check that a checkpoint was written by this program and holds the model of this run.

    Raises:
        UserError: if the checkpoint does not fit; the message names each difference.
    """
    if "progress" not in common:
        raise UserError(
            f"{folder} was not written by this program; only its own checkpoints can be loaded"
        )
    if missing := [name for name in RECORDED if name not in common["args"]]:
        raise UserError(
            f"{folder} does not record {', '.join(missing)}; only complete checkpoints of this "
            "program can be loaded"
        )
    names = ARCHITECTURE
    if args.position_embedding_type == "learned_absolute":
        names += (LONGEST,)
    if converts(args) or not args.finetune:
        names += COMPUTATION
    if converts(args):
        names += (LONGEST,)
    there = {name: common["args"][name] for name in names}
    differences = [
        f"{name} is {there[name]} there and {getattr(args, name)} here"
        for name in differing(there, args)
    ]
    if differences:
        may_finetune = not converts(args) and set(differing(there, args)) <= set(COMPUTATION)
        raise UserError(
            f"{folder} holds another model: {'; '.join(differences)}; give the flags it was "
            "trained with"
            + (", or --finetune to start a new run from its weights" if may_finetune else "")
        )


def check_run(args: argparse.Namespace, common: dict[str, Any], folder: Path) -> None:
    """Check that properties such as the data and the seed are the same as in the checkpoint.

    `RUN` lists these properties. Changes of the flags in `NOTED` are permitted and printed. Must be
    called on all ranks.

    Raises:
        UserError: on all ranks, if a property differs and `--allow-changed-run` is not given; the
            message shows both values.
    """
    first_rank_does(lambda: _compare_runs(args, common["run"], folder))
    there = {name: common["args"][name] for name in NOTED if name in common["args"]}
    if changes := _changes(there, args):
        print_rank_0(f"> changed since the checkpoint: {'; '.join(changes)}")


def _changes(there: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """Return a description of each flag whose value differs from that in the checkpoint."""
    return [
        f"{flag_of(name)} is {_shown(there[name])} there and {getattr(args, name)} here"
        for name in differing(there, args)
    ]


def _shown(value: Any) -> str:
    """Return a value of the checkpoint as text that can be printed."""
    return printable(value, limit=_LONGEST)


def _compare_runs(args: argparse.Namespace, there: dict[str, str], folder: Path) -> None:
    try:
        here = _run(args)
    except OSError as error:
        raise RunError(f"the data cannot be read: {error}; fix that and start again") from error
    differences = [
        f"{name} is {_shown(there.get(name))} there and {here[name]} here ({flag})"
        for name, flag in RUN.items()
        if there.get(name) != here[name]
    ]
    if not differences:
        return
    if not args.allow_changed_run:
        raise UserError(
            f"{folder} belongs to another run: {'; '.join(differences)}; give the flags that it "
            "was trained with, --finetune to start a new run from its weights, or "
            "--allow-changed-run to resume anyway"
        )
    print_rank_0(f"> --allow-changed-run: {'; '.join(differences)}")


def check_optimizer(args: argparse.Namespace, common: dict[str, Any], folder: Path) -> None:
    """Check that the optimizer state in a checkpoint fits the optimizer of this run.

    Raises:
        UserError: if the state is missing or does not fit; the message names the difference.
    """
    if not common["has_optim"]:
        raise UserError(
            f"{folder} was written with --no-save-optim; give --no-load-optim or --finetune"
        )
    for name in OPTIMIZER:
        there, here = common["args"][name], getattr(args, name)
        if there != here:
            raise UserError(
                f"{folder} was written with {flag_of(name)} {there}, but this run has {here}; use "
                "the same value or give --no-load-optim"
            )
    there, here = common["run"].get("type"), _type(args)
    if there != here:
        raise UserError(
            f"{folder} has the optimizer state of a run in {there}, which does not fit a run in "
            f"{here}; give the same dtype or --no-load-optim"
        )
    there, here = common["args"]["expert_model_parallel_size"], args.expert_model_parallel_size
    # With expert parallelism, the experts have a separate optimizer. Otherwise, there is only one
    # optimizer.
    if args.num_moe_experts and (there > 1) != (here > 1):
        raise UserError(
            f"{folder} was written with --expert-model-parallel-size {there}, but this run has "
            f"{here}: experts that are spread over ranks have a separate optimizer, whose state "
            "cannot be merged into that of the other weights; give --no-load-optim, or another "
            "size above 1"
        )
    _check_numbers(args, common, folder)


def _check_numbers(args: argparse.Namespace, common: dict[str, Any], folder: Path) -> None:
    """Check that the hyperparameters equal the checkpoint's, unless a flag decides between them.

    Raises:
        UserError: if hyperparameters differ, and neither `--override-opt_param-scheduler` nor
            `--use-checkpoint-opt_param-scheduler` is given.
    """
    differences = _changes({name: common["args"][name] for name in NUMBERS}, args)
    if not differences:
        return
    if args.override_opt_param_scheduler:
        print_rank_0(f"> overriding the optimizer's hyperparameters: {'; '.join(differences)}")
    elif args.use_checkpoint_opt_param_scheduler:
        print_rank_0(f"> using the checkpoint's hyperparameters: {'; '.join(differences)}")
    else:
        raise UserError(
            f"the optimizer of {folder} has different hyperparameters: {'; '.join(differences)}; "
            "give --override-opt_param-scheduler to take those of the command line or "
            "--use-checkpoint-opt_param-scheduler to take those of the checkpoint"
        )


def random_states_fit(args: argparse.Namespace, common: dict[str, Any]) -> bool:
    """Return whether to load the random states from the checkpoint.

    Raises:
        UserError: if random states are requested, but the checkpoint does not contain any.
    """
    if not args.load_rng or args.finetune:
        return False
    if not common["has_rng"]:
        raise UserError("the checkpoint was written with --no-save-rng; give --no-load-rng")
    if all(common["args"][name] == getattr(args, name) for name in LAYOUT):
        return True
    print_rank_0("> the checkpoint has another parallel layout: random states are initialized anew")
    return False
