"""The command line of `--load-hf` and `--save-hf`: filled in from a config.json, or checked
against one.

With `--load-hf` a flag of the architecture need not be given: the checkpoint says it, and the log
says what was filled in. One that was given and says otherwise is refused, not overruled. Precision,
parallelism, batch and schedule stay the user's.
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
    """The options that the command line names, as against those left at their default."""
    unset = object()
    seeded = argparse.Namespace(**{action.dest: unset for action in parser._actions})
    parser.parse_known_args(argv, seeded)
    return {name for name, value in vars(seeded).items() if value is not unset}


def converts(args: argparse.Namespace) -> bool:
    """Whether weights are only taken from one format into the other: nothing is trained."""
    return args.save_hf is not None and args.train_iters == 0


def prepare(args: argparse.Namespace, given: set[str]) -> tuple[Model | None, list[str]]:
    """Fill in what `--load-hf` knows; returns its model and notes for the log.

    Raises:
        UserError: a flag contradicts the checkpoint.
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
                f"--{flag.replace('_', '-')} knows the names of the local layers only; remove "
                f"--transformer-impl {args.transformer_impl}"
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
            "--save-hf with --train-iters 0 converts weights, but none were named; give --load or "
            "--load-hf, or iterations to train"
        )


def _fill(args: argparse.Namespace, given: set[str], model: Model) -> list[str]:
    expected = architectures.flags_of(model, args.load_hf)
    contradicting = [n for n in differing(expected, args) if n in given]
    if contradicting:
        raise UserError(
            f"--load-hf {args.load_hf} holds another model than the flags say: "
            + "; ".join(
                f"{flag_of(n)} is {_shown(getattr(args, n))} here and {_shown(expected[n])} there"
                for n in contradicting
            )
            + ". Leave these flags out, they are filled in, or give the checkpoint's values"
        )
    training = {
        "max_position_embeddings": model.config.get("max_position_embeddings"),
        "hidden_dropout": 0.0,
        "attention_dropout": model.config.get("attention_dropout") or 0.0,
        "perform_initialization": False,  # every weight is read, or the run stops
    }
    if model.architecture is DEEPSEEK_V2:
        training["moe_router_dtype"] = "fp32"  # as transformers computes it, also in bf16
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
            f"the latent's norm has an epsilon of {epsilon} here, of "
            f"{deepseek_v2.LATENT_NORM_EPSILON} in transformers"
        )
    return notes


def _default(args: argparse.Namespace, name: str) -> Any:
    """What an option is without the checkpoint."""
    here = getattr(args, name)
    return default_of(_FIELDS[name]) if here is None and name in _FIELDS else here


def _spelled(name: str, value: Any) -> str:
    """An option as it would be given."""
    if isinstance(value, bool):
        return flag_of(name if value else f"no_{name}")
    return f"{flag_of(name)} {_shown(value)}"


def _fill_conversion(args: argparse.Namespace, model: Model | None) -> None:
    """What a run must be told and a conversion does not use."""
    args.save_optim = args.load_optim = args.load_rng = False
    args.mock_data = args.data_path is None and args.train_data_path is None
    defaults: dict[str, Any] = {"lr": 0.0, "micro_batch_size": 1}
    if model is not None:
        defaults["seq_length"] = args.max_position_embeddings
        if args.tokenizer_type is None:
            args.tokenizer_type = "NullTokenizer"  # of the ids 0 to vocab_size, the last included
            args.vocab_size = model.config["vocab_size"] - 1
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def describe(args: argparse.Namespace) -> Model:
    """What `--save-hf` is to write of a complete command line, if transformers can hold it.

    Raises:
        UserError: names each flag that it cannot hold.
    """
    model = architectures.described(args)
    what = f"--save-hf writes a {model.architecture.name}, which cannot hold this model: "
    try:
        expected = model.architecture.flags(model.config)
    except ValueError as error:
        raise UserError(f"{what}{error}; change the model or remove --save-hf") from error
    wrong = differing(expected, args)
    if wrong:
        pairs = (
            f"{flag_of(n)} is {_shown(getattr(args, n))} and must be {_shown(expected[n])}"
            for n in wrong
        )
        raise UserError(f"{what}{'; '.join(pairs)}. Change the flags or remove --save-hf")
    return model


def differing(expected: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """The options that are not as expected."""
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
    """How an option is spelled."""
    return "--" + name.replace("_", "-")


def _shown(value: Any) -> str:
    return str(value).replace(" ", "")


def check_vocabulary(args: argparse.Namespace, model: Model | None, tokens: int) -> int:
    """The vocabulary of the model: the tokenizer's, or the larger one of the checkpoint.

    tokens: the tokenizer's size.

    Raises:
        UserError: the tokenizer has ids that the checkpoint has no rows for.
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
    """Let the config.json of a model trained from scratch say how its texts begin and end.

    Null where the tokenizer has no such token: left out, transformers would take Llama's own.
    """
    if model is None or args.load_hf is not None:
        return
    for name in ("bos", "eos"):
        try:
            number = getattr(tokenizer, f"{name}_id")
        except (AttributeError, KeyError, TypeError, ValueError):  # as each library says it
            number = None
        model.config[f"{name}_token_id"] = None if number is None or number < 0 else int(number)


def tokenizer_file(args: argparse.Namespace) -> tuple[Path, str] | None:
    """The one file of a SentencePiece or tiktoken tokenizer, and what it is called beside weights;
    None for the other kinds.
    """
    if args.tokenizer_type not in ("SentencePieceTokenizer", "TikTokenizer"):
        return None
    path = Path(args.tokenizer_model)
    if path.is_dir():
        inside = [path / "tokenizer.model", *sorted(path.glob("*.tiktoken"))]
        path = next(file for file in inside if file.is_file())
    return path, "tokenizer.model" if args.tokenizer_type == "SentencePieceTokenizer" else path.name


def tokenizer_folder(args: argparse.Namespace) -> Path | None:
    """Where the tokenizer's files lie that belong beside exported weights."""
    if args.tokenizer_type == "HuggingFaceTokenizer":
        path = Path(args.tokenizer_model)
        return path.parent if path.is_file() else path
    return None if args.load_hf is None else Path(args.load_hf)
