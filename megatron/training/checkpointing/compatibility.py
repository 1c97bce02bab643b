"""What a checkpoint says of the run that wrote it, and what is refused of a run that goes on.

Weights only fit a model of the same shapes, and only mean something in a model that computes the
same. A run that goes on with other data or another format is not the run that was started: it is
refused unless the user says that it is meant.
"""

import argparse
import functools
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.fake_quant import policy
from megatron.training.data.paths import parse_blend
from megatron.training.errors import RunError, UserError
from megatron.training.hf.flags import converts, differing, flag_of
from megatron.training.hf.ranks import first_rank_does
from megatron.training.printing import print_rank_0

#: What a checkpoint's weights depend on: a run that differs in any of it cannot load them.
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
#: What its weights mean something in. They load into a model that differs in these, and that model
#: is another one; what --save-hf writes into a config.json is among them.
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
LONGEST = "max_position_embeddings"  #: written by --save-hf; follows --seq-length in a resumed run
OPTIMIZER = ("use_distributed_optimizer", "optimizer")  #: what the optimizer's state depends on
#: Numbers of the optimizer that its state in a checkpoint holds; those of the schedule are its own.
NUMBERS = (
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "sgd_momentum",
    "decoupled_lr",
    "decoupled_min_lr",
)
#: What the ranks' random states depend on.
LAYOUT = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "use_tp_pp_dp_mapping",
)
#: What of a run is compared, and the flag that says it.
RUN = {
    "format": "--custom-quant-type and its like",
    "data": "--data-path",
    "split": "--split",
    "seed": "--seed",
    "sequence length": "--seq-length",
    "type": "--bf16, --fp16 or neither",
}
_HEAD = 2**16  #: bytes of each file of the data that are looked at


def described(args: argparse.Namespace) -> dict[str, Any]:
    """What a checkpoint says of the run that writes it: plain values only.

    Raises:
        OSError: the data is no longer there.
    """
    names = (*ARCHITECTURE, *COMPUTATION, LONGEST, *LAYOUT, *OPTIMIZER, *NUMBERS)
    return {"args": {name: getattr(args, name) for name in names}, "run": _run(args)}


def _run(args: argparse.Namespace) -> dict[str, str]:
    """The values of RUN, as text."""
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
    """The effective formats; of a recipe also what it says, wherever its file lies."""
    chosen = policy.current()
    if chosen.recipe is None:
        return chosen.quant_type
    rules = [replace(rule, line=0) for rule in chosen.recipe.rules]
    return f"{chosen.quant_type} ({_digest(repr(rules).encode())})"


def _data(args: argparse.Namespace) -> str:
    """The data sets by their names and contents, so that they may lie elsewhere."""
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
    """A few digits for the contents of a pair of files: their sizes and how they start."""
    found = b""
    for suffix in (".idx", ".bin"):
        path = Path(prefix + suffix)
        with path.open("rb") as file:
            found += path.stat().st_size.to_bytes(8, "little") + file.read(_HEAD)
    return _digest(found)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def check_model(args: argparse.Namespace, common: dict[str, Any], folder: Path) -> None:
    """Refuse a checkpoint of another program or another model.

    Raises:
        UserError: names what differs.
    """
    if "progress" not in common:
        raise UserError(
            f"{folder} was not written by this program; only its own checkpoints can be loaded"
        )
    names = ARCHITECTURE
    if args.position_embedding_type == "learned_absolute":
        names += (LONGEST,)
    if converts(args) or not args.finetune:
        names += COMPUTATION
    if converts(args):
        names += (LONGEST,)
    there = {name: common["args"][name] for name in names if name in common["args"]}
    found = [
        f"{name} is {there[name]} there and {getattr(args, name)} here"
        for name in differing(there, args)
    ]
    if found:
        anew = not converts(args) and not set(differing(there, args)) - set(COMPUTATION)
        raise UserError(
            f"{folder} holds another model: {'; '.join(found)}; give the flags it was trained with"
            + (", or --finetune to start a new run from its weights" if anew else "")
        )
    if not set(COMPUTATION) <= common["args"].keys():
        print_rank_0(
            f"> an earlier version wrote {folder}: whether its rotary positions, norms, "
            "activations and routing are this model's is not known"
        )


def check_run(args: argparse.Namespace, common: dict[str, Any], folder: Path) -> None:
    """Refuse to go on with other data, another format, seed, sequence length or type. Collective.

    Raises:
        UserError: names both values, on all ranks alike.
    """
    if "run" not in common:
        print_rank_0(
            f"> an earlier version wrote {folder}: whether its {', '.join(RUN)} are this run's is "
            "not known"
        )
        return
    first_rank_does(lambda: _compare_runs(args, common["run"], folder))


def _compare_runs(args: argparse.Namespace, there: dict[str, str], folder: Path) -> None:
    try:
        here = _run(args)
    except OSError as error:
        raise RunError(f"the data cannot be read: {error}; mend that and start again") from error
    found = [
        f"{name} is {there[name]} there and {here[name]} here ({flag})"
        for name, flag in RUN.items()
        if name in there and there[name] != here[name]
    ]
    if not found:
        return
    if not args.allow_changed_run:
        raise UserError(
            f"{folder} belongs to another run: {'; '.join(found)}; give what it was trained with, "
            "--finetune to start a new run from its weights, or --allow-changed-run to go on "
            "all the same"
        )
    print_rank_0(f"> --allow-changed-run: {'; '.join(found)}")


def check_optimizer(args: argparse.Namespace, common: dict[str, Any], folder: Path) -> None:
    """Refuse an optimizer's state that does not fit this run's.

    Raises:
        UserError: names both.
    """
    if not common["has_optim"]:
        raise UserError(
            f"{folder} was written with --no-save-optim; give --no-load-optim or --finetune"
        )
    for name in OPTIMIZER:
        there, here = common["args"][name], getattr(args, name)
        if there != here:
            raise UserError(
                f"{folder} was written with {flag_of(name)} {there}, this run has {here}; use the "
                "same or give --no-load-optim"
            )
    there, here = common.get("run", {}).get("type"), _type(args)
    if there not in (None, here):
        raise UserError(
            f"{folder} has the optimizer of a run in {there}, whose state does not fit one in "
            f"{here}; give the same type or --no-load-optim"
        )
    there, here = common["args"]["expert_model_parallel_size"], args.expert_model_parallel_size
    if args.num_moe_experts and (there > 1) != (here > 1):  # one optimizer, or experts apart
        raise UserError(
            f"{folder} was written with --expert-model-parallel-size {there}, this run has {here}: "
            "experts that are spread over ranks have an optimizer of their own, whose state cannot "
            "be moved into the one for all; give --no-load-optim, or another size above 1"
        )
    _check_numbers(args, common, folder)


def _check_numbers(args: argparse.Namespace, common: dict[str, Any], folder: Path) -> None:
    """Of what would be replaced by the checkpoint's numbers, or replace them, something is said."""
    found = [
        f"{flag_of(name)} is {common['args'][name]} there and {getattr(args, name)} here"
        for name in NUMBERS
        if common["args"].get(name, getattr(args, name)) != getattr(args, name)
    ]
    if not found:
        return
    if args.override_opt_param_scheduler:
        print_rank_0(f"> overriding the optimizer's numbers: {'; '.join(found)}")
    elif args.use_checkpoint_opt_param_scheduler:
        print_rank_0(f"> taking the checkpoint's numbers of the optimizer: {'; '.join(found)}")
    else:
        raise UserError(
            f"the optimizer of {folder} has other numbers: {'; '.join(found)}; give "
            "--override-opt_param-scheduler to take the command line's or "
            "--use-checkpoint-opt_param-scheduler to take the checkpoint's"
        )


def random_states_fit(args: argparse.Namespace, common: dict[str, Any]) -> bool:
    """Whether the random states are to be read.

    Raises:
        UserError: they were asked for and are not there.
    """
    if not args.load_rng or args.finetune:
        return False
    if not common["has_rng"]:
        raise UserError("the checkpoint was written with --no-save-rng; give --no-load-rng")
    if all(common["args"].get(name, getattr(args, name)) == getattr(args, name) for name in LAYOUT):
        return True
    print_rank_0("> the checkpoint has another parallel layout: random states start anew")
    return False
