"""Fill in the model flags for `--load-hf` from a config.json, and check them for `--save-hf`.

With `--load-hf`, the flags of the architecture need not be given: they are read from the checkpoint
and logged. A given flag that contradicts the checkpoint causes an error; it is not overridden. The
user still chooses the precision, the parallelism, the batch size and the schedule.
"""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.arguments.config_flags import default_of
from megatron.training.errors import UserError
from megatron.training.hf import architectures, deepseek_v2
from megatron.training.hf.architectures import DEEPSEEK_V2, Model
from megatron.training.hf.llama import LOSSES_ONLY

_FIELDS = {field.name: field for field in fields(MLATransformerConfig)}


def given_flags(parser: argparse.ArgumentParser, argv: list[str]) -> set[str]:
    """Return the names of the flags that the command line sets explicitly."""
    unset = object()
    seeded = argparse.Namespace(**{action.dest: unset for action in parser._actions})
    parser.parse_known_args(argv, seeded)
    return {name for name, value in vars(seeded).items() if value is not unset}


def converts(args: argparse.Namespace) -> bool:
    """Return whether the run only converts weights between formats, without training."""
    return args.save_hf is not None and args.train_iters == 0


def prepare(args: argparse.Namespace, given: set[str]) -> tuple[Model | None, list[str]]:
    """Fill in the flags that `--load-hf` determines; return the model's description and log lines.

    The description is None without `--load-hf`.

    Raises:
        UserError: if a flag contradicts the checkpoint.
    """
    _check_together(args)
    model, notes = None, []
    if args.load_hf is not None:
        model = architectures.read_model(args.load_hf)
        notes = _fill(args, given, model)
    if converts(args):
        _fill_conversion(args, model)
    return model, notes


def _check_together(args: argparse.Namespace) -> None:
    for flag in ("load_hf", "save_hf"):
        if getattr(args, flag) is not None and args.transformer_impl not in (None, "local"):
            raise UserError(
                f"--{flag.replace('_', '-')} supports only the local layers; remove "
                f"--transformer-impl {args.transformer_impl}"
            )
        if getattr(args, flag) is not None and args.moe_grouped_gemm:
            raise UserError(
                f"--{flag.replace('_', '-')} supports only experts with separate weights; remove "
                "--moe-grouped-gemm"
            )
    if args.load_hf is not None and args.load is not None and args.finetune:
        raise UserError(
            "--load-hf and --load with --finetune both name the weights to start from; give one"
        )
    if converts(args) and args.save is not None:
        raise UserError(
            "--save-hf with --train-iters 0 only converts weights, and --save was given too; "
            "remove --save"
        )
    if converts(args) and args.load_hf is None and args.load is None:
        raise UserError(
            "--save-hf with --train-iters 0 converts weights, but none were given; give --load or "
            "--load-hf, or iterations to train"
        )


def _fill(args: argparse.Namespace, given: set[str], model: Model) -> list[str]:
    expected = architectures.flags_of(model, args.load_hf)
    contradicting = [n for n in differing(expected, args) if n in given]
    if contradicting:
        raise UserError(
            f"--load-hf {args.load_hf} holds another model than the one that the flags describe: "
            + "; ".join(
                f"{flag_of(n)} is {_shown(getattr(args, n))} here and {_shown(expected[n])} there"
                for n in contradicting
            )
            + ". Leave these flags out (they are filled in) or give the checkpoint's values"
        )
    training = {
        "max_position_embeddings": model.config.get("max_position_embeddings"),
        "hidden_dropout": 0.0,
        "attention_dropout": model.config.get("attention_dropout") or 0.0,
        "perform_initialization": False,  # all weights are loaded from the checkpoint anyway
    }
    if model.architecture is DEEPSEEK_V2:
        training["moe_router_dtype"] = "fp32"  # transformers routes in fp32, even in bf16 models
    filled = {
        name: value
        for name, value in (expected | training).items()
        if name not in given and value is not None
    }
    changed = sorted(name for name, value in filled.items() if value != _default(args, name))
    for name, value in filled.items():
        setattr(args, name, value)
    shown = " ".join(_spelled(name, filled[name]) for name in changed)
    notes = [f"--load-hf {args.load_hf} ({model.architecture.name}) sets {shown}"]
    epsilon = expected["layernorm_epsilon"]
    if model.architecture is DEEPSEEK_V2 and epsilon != deepseek_v2.LATENT_NORM_EPSILON:
        notes.append(
            f"the latent's norm has an epsilon of {epsilon} here and of "
            f"{deepseek_v2.LATENT_NORM_EPSILON} in transformers"
        )
    return notes


def _default(args: argparse.Namespace, name: str) -> Any:
    """Return the value that a flag would have without the checkpoint."""
    value = getattr(args, name)
    return default_of(_FIELDS[name]) if value is None and name in _FIELDS else value


def _spelled(name: str, value: Any) -> str:
    """Return a flag and its value as they are written on the command line."""
    if isinstance(value, bool):
        return flag_of(name if value else f"no_{name}")
    return f"{flag_of(name)} {_shown(value)}"


def _fill_conversion(args: argparse.Namespace, model: Model | None) -> None:
    """Set the flags that every run requires but a conversion does not use."""
    args.save_optim = args.load_optim = args.load_rng = False
    args.mock_data = args.data_path is None and args.train_data_path is None
    defaults: dict[str, Any] = {"lr": 0.0, "micro_batch_size": 1}
    if model is not None:
        defaults["seq_length"] = args.max_position_embeddings
        if args.tokenizer_type is None:
            args.tokenizer_type = "NullTokenizer"  # this type adds an end-of-document id
            args.vocab_size = model.config["vocab_size"] - 1
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def describe(args: argparse.Namespace) -> Model:
    """Return the description of the model that `--save-hf` would write.

    All flags in `args` must be filled in.

    Raises:
        UserError: if transformers cannot express the model; the message names each wrong flag.
    """
    model = architectures.model_of(args)
    problem = f"--save-hf writes a {model.architecture.name}, which cannot express this model: "
    try:
        expected = model.architecture.flags(model.config)
    except ValueError as error:
        raise UserError(f"{problem}{error}; change the model or remove --save-hf") from error
    wrong = differing(expected, args)
    if wrong:
        pairs = (
            f"{flag_of(n)} is {_shown(getattr(args, n))} and must be {_shown(expected[n])}"
            for n in wrong
        )
        raise UserError(f"{problem}{'; '.join(pairs)}. Change the flags or remove --save-hf")
    return model


def differing(expected: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """Return the names of the flags whose values differ from the expected values."""
    return [
        name
        for name, value in expected.items()
        if _comparable(name, getattr(args, name), args) != _comparable(name, value, args)
    ]


def _comparable(name: str, value: Any, args: argparse.Namespace) -> Any:
    if name == "moe_layer_freq" and value is not None and args.num_layers is not None:
        return deepseek_v2.layer_pattern(value, args.num_layers)
    if name == "moe_router_load_balancing_type":
        kinds = value if isinstance(value, list) else [value]
        return "aux_loss" if all(k is None or k in LOSSES_ONLY for k in kinds) else value
    if name == "moe_router_topk_scaling_factor" and value == 1:
        return None
    return value


def flag_of(name: str) -> str:
    """Return the command-line spelling of a flag, such as `--num-layers`."""
    return "--" + name.replace("_", "-")


def _shown(value: Any) -> str:
    return str(value).replace(" ", "")


def check_vocabulary(args: argparse.Namespace, model: Model | None, tokens: int) -> int:
    """Return the vocabulary size of the `--load-hf` checkpoint or, without one, of the tokenizer.

    Without `--load-hf`, the tokenizer's size is also stored in the config.json of the model.

    Args:
        args: the run's arguments.
        model: the model that is loaded or exported, or None if there is neither.
        tokens: vocabulary size of the tokenizer.

    Raises:
        UserError: if the tokenizer has more ids than the checkpoint's embedding has rows.
    """
    if model is None:
        return tokens
    if args.load_hf is None:
        model.config["vocab_size"] = tokens
        return tokens
    rows = model.config["vocab_size"]
    if tokens > rows:
        raise UserError(
            f"the tokenizer has {tokens} ids, but the vocabulary of --load-hf {args.load_hf} has "
            f"{rows}; give the tokenizer that belongs to the model with --tokenizer-model"
        )
    return rows


def name_special_tokens(args: argparse.Namespace, model: Model | None, tokenizer: Any) -> None:
    """Add the ids of the BOS and EOS tokens to the config.json of a model trained from scratch.

    An id is null if the tokenizer has no such token; transformers would replace a missing entry
    with Llama's default.
    """
    if model is None or args.load_hf is not None:
        return
    for name in ("bos", "eos"):
        try:
            number = getattr(tokenizer, f"{name}_id")
        except (AttributeError, KeyError, TypeError, ValueError):  # the exception varies by library
            number = None
        model.config[f"{name}_token_id"] = None if number is None or number < 0 else int(number)


def tokenizer_file(args: argparse.Namespace) -> tuple[Path, str] | None:
    """Return the path of a SentencePiece or tiktoken file, and the file's name in the export.

    Return None for other tokenizers, which have more than one file.
    """
    if args.tokenizer_type not in ("SentencePieceTokenizer", "TikTokenizer"):
        return None
    path = Path(args.tokenizer_model)
    if path.is_dir():
        inside = [path / "tokenizer.model", *sorted(path.glob("*.tiktoken"))]
        path = next(file for file in inside if file.is_file())
    return path, "tokenizer.model" if args.tokenizer_type == "SentencePieceTokenizer" else path.name


def tokenizer_folder(args: argparse.Namespace) -> Path | None:
    """Return the folder whose tokenizer files are copied to the exported checkpoint, or None."""
    if args.tokenizer_type == "HuggingFaceTokenizer":
        path = Path(args.tokenizer_model)
        return path.parent if path.is_file() else path
    return None if args.load_hf is None else Path(args.load_hf)
