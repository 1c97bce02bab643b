"""Command-line flags that are generated from megatron-core's configuration dataclasses.

Every field of megatron-core 0.16.1 whose type can be expressed on a command line becomes a flag:
`hidden_size` is set by `--hidden-size`, and a field `x` of type bool by `--x` and `--no-x`. Flags
that Megatron-LM spells differently are listed in the metadata of the fields (`argparse_meta`) and
in `HISTORICAL`.
A generated flag that is not given stays None, so that its default can be derived from the device
and other flags. If no default is derived, the default of the dataclass applies.
"""

import argparse
import ast
import enum
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal, Union

import torch

from megatron.training.arguments.core_releases import LATER

#: configuration fields that have no generated flag, each with the reason
EXCLUDED: dict[str, str] = {
    "params_dtype": "follows from --bf16 and --fp16",
    "pipeline_dtype": "follows from --bf16 and --fp16",
    "virtual_pipeline_model_parallel_size": "follows from --num-layers-per-virtual-pipeline-stage",
    "gated_linear_unit": "follows from --swiglu and --quick-geglu",
    "quant_recipe": "an object; a recipe is read from a file",
    "mtp_standalone": "set by the pipeline layout",
    "moe_extended_tp": "deprecated in megatron-core: ignored",
    "async_tensor_model_parallel_allreduce": "deprecated in megatron-core: ignored",
    "use_custom_fsdp": "deprecated in megatron-core: --use-megatron-fsdp",
    "test_mode": "for megatron-core's own tests",
}


#: configuration fields that share their name with a flag of this program but differ in meaning
ANOTHER_MEANING = ("quant_recipe",)


@dataclass(frozen=True)
class Spelling:
    """An additional flag for a configuration field that already has a generated flag."""

    flag: str
    field: str  #: name of the field that the flag sets
    value: Any = None  #: value that the flag assigns; None if the user writes it after the flag


#: flags of Megatron-LM that are not named after the field that they set
HISTORICAL = (
    Spelling("--num-experts", "num_moe_experts"),
    Spelling("--no-bias-gelu-fusion", "bias_activation_fusion", False),
    Spelling("--no-bias-swiglu-fusion", "bias_activation_fusion", False),
    Spelling("--no-rope-fusion", "apply_rope_fusion", False),
    Spelling("--decoder-first-pipeline-num-layers", "num_layers_in_first_pipeline_stage"),
    Spelling("--decoder-last-pipeline-num-layers", "num_layers_in_last_pipeline_stage"),
    Spelling("--no-overlap-p2p-communication", "overlap_p2p_comm", False),
    Spelling("--recompute-activations", "recompute_granularity", "selective"),
    Spelling("--accumulate-allreduce-grads-in-fp32", "grad_reduce_in_fp32", True),
    Spelling("--ddp-bucket-size", "bucket_size"),
    Spelling("--ddp-average-in-collective", "average_in_collective", True),
    Spelling("--ddp-pad-buckets-for-high-nccl-busbw", "pad_buckets_for_high_nccl_busbw", True),
    Spelling("--use-torch-optimizer-for-cpu-offload", "use_torch_optimizer_for_cpu_offload", True),
    Spelling("--no-initialization", "perform_initialization", False),
)
#: Megatron-LM's defaults, which replace those of the dataclass fields. The dataclass sets
#: q_lora_rank to 512, which would compress the queries of every model.
HISTORICAL_DEFAULTS = {"q_lora_rank": None}
#: text that `--help` adds to megatron-core's description of a field
ADDED_HELP = {"cp_comm_type": "; the local layers support only all_gather, of keys and values"}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def layer_pattern(text: str) -> int | list[int]:
    """Parse an integer, or a list expression such as `([0]*1+[1]*26)`.

    A list expression consists of lists of integers, `+` and `*`. Megatron-LM evaluates the string
    as Python code; this function does not.

    Raises:
        argparse.ArgumentTypeError: if the string is neither an integer nor such an expression.
    """

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.List(elts=items):
                return [value(item) for item in items]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)
        raise ValueError(text)

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor a list such as [0]+[1]*26"
        ) from error


def int_pair(text: str) -> tuple[int, int]:
    """Parse a pair of integers, such as `128,0` or `(128, 0)`."""
    try:
        first, second = (int(part) for part in text.strip("() ").split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair such as 128,0") from error
    return first, second


def dtype(text: str) -> torch.dtype:
    """Return the dtype named by `text`: fp32, bf16 or fp16."""
    if text not in _DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[text]


class _OneOrMore(argparse.Action):
    """An argparse action that stores a single value as it is, and several values as a list.

    It is used for fields of type `str | list[str]`.
    """

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def _enum_member(kind: type[enum.Enum]):
    def member(text: str) -> enum.Enum:
        if text not in kind.__members__:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not one of {', '.join(kind.__members__)}"
            )
        return kind[text]

    return member


def flag_options(field_type: Any) -> dict[str, Any] | None:
    """Return the keyword arguments with which `add_argument` declares a flag of type `field_type`.

    Return None if values of the type cannot be given on a command line (callables, objects).
    """
    origin = typing.get_origin(field_type)
    parts = [p for p in typing.get_args(field_type) if p is not type(None)]
    if origin in (Union, types.UnionType):
        if len(parts) == 1:
            return flag_options(parts[0])
        if int in parts:
            return {"type": layer_pattern, "metavar": "N|LIST"}
        scalar = next((p for p in parts if p in (str, float)), None)
        as_list = any(typing.get_origin(p) is list for p in parts)
        if scalar is None:
            return None
        return {"type": scalar, "nargs": "+", "action": _OneOrMore} if as_list else {"type": scalar}
    if origin is Literal:
        return {"type": type(parts[0]), "choices": parts}
    if origin is list and parts[0] in (int, str, float):
        return {"type": parts[0], "nargs": "+"}
    if origin is tuple and parts == [int, int]:
        return {"type": int_pair, "metavar": "N,N"}
    if field_type is bool:
        return {"action": argparse.BooleanOptionalAction}
    if field_type in (int, float, str):
        return {"type": field_type}
    if field_type is torch.dtype:
        return {"type": dtype, "metavar": "{" + ",".join(_DTYPES) + "}"}
    if isinstance(field_type, type) and issubclass(field_type, enum.Enum):
        names = "{" + ",".join(field_type.__members__) + "}"
        return {"type": _enum_member(field_type), "metavar": names}
    return None


def default_of(field: Field) -> Any:
    """Return the default of a configuration field; Megatron-LM's default takes precedence."""
    if field.name in HISTORICAL_DEFAULTS:
        return HISTORICAL_DEFAULTS[field.name]
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None


@functools.cache
def flagged_fields(config: type) -> Mapping[str, Field]:
    """Return the fields of `config` that have a generated flag, by name."""
    return types.MappingProxyType(
        {
            f.name: f
            for f in fields(config)
            if f.init
            and not f.name.startswith("_")
            and f.name not in EXCLUDED
            and f.name not in LATER
            and flag_options(f.type) is not None
        }
    )


def add_config_arguments(
    parser: argparse.ArgumentParser, config: type, title: str, *, documents: bool
) -> None:
    """Add an argument group with one flag for each field of `config` that has no flag yet.

    Args:
        parser: parser to which the flags are added.
        config: configuration dataclass of megatron-core.
        title: title of the group in `--help`.
        documents: whether to read the help texts from megatron-core's source.
    """
    group = parser.add_argument_group(title)
    taken = {action.dest for action in parser._actions}
    help_of = _field_documents(config) if documents else {}
    for name, field in flagged_fields(config).items():
        if name in taken:
            continue
        options = flag_options(field.type)
        options.setdefault("metavar", _metavar(options))
        if options["metavar"] is None:
            del options["metavar"]
        help_text = help_of.get(name, "") + ADDED_HELP.get(name, "")
        text = f"{help_text} (default: {_shown(default_of(field))})".strip()
        flag = "--" + name.replace("_", "-")
        aliases = list(field.metadata.get("argparse_meta", {}).get("arg_names", ()))
        extra = [] if field.type is bool else [alias for alias in aliases if alias != flag]
        group.add_argument(flag, *extra, dest=name, default=None, help=text, **options)
        if field.type is bool:
            for alias in aliases:
                _add_spelling(group, Spelling(alias, name, not field.default), parser)
        for spelling in HISTORICAL:
            if spelling.field == name:
                _add_spelling(group, spelling, parser, options)


def _add_spelling(group, spelling: Spelling, parser, options: dict | None = None) -> None:
    if spelling.flag in parser._option_string_actions:
        return
    text = f"Megatron-LM's name for --{spelling.field.replace('_', '-')}"
    if spelling.value is None:
        group.add_argument(
            spelling.flag, dest=spelling.field, default=None, help=text, **(options or {})
        )
        return
    group.add_argument(
        spelling.flag,
        dest=spelling.field,
        action="store_const",
        const=spelling.value,
        default=None,
        help=f"{text} ({_shown(spelling.value)})",
    )


def config_kwargs(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """Return the values of the flags as keyword arguments for the constructor of `config`.

    Fields whose flag is None are omitted, so that the default of the dataclass applies.
    """
    return {
        f.name: value
        for f in fields(config)
        if f.init
        and f.name not in ANOTHER_MEANING
        and (value := getattr(args, f.name, None)) is not None
    }


def fill_defaults(args: argparse.Namespace, configs: list[type]) -> None:
    """Set each flag that is still None to the default of its configuration field.

    If several classes have the same field, the first class takes precedence.
    """
    for config in configs:
        for name, field in flagged_fields(config).items():
            if getattr(args, name, None) is None:
                setattr(args, name, default_of(field))


def _metavar(options: dict[str, Any]) -> str | None:
    if "choices" in options or options.get("action") is argparse.BooleanOptionalAction:
        return None
    return {int: "N", float: "X"}.get(options.get("type"), "VALUE")


def _shown(value: Any) -> str:
    return value.name if isinstance(value, enum.Enum) else str(value).removeprefix("torch.")


def _field_documents(config: type) -> dict[str, str]:
    """Return the first sentence of the docstring of each field, by field name.

    The docstrings are read from the source code of `config` and its base classes.
    """
    documents: dict[str, str] = {}
    for base in reversed(config.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for field, text in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                sentence = " ".join(str(text.value.value).split()).split(". ")[0].rstrip(".")
                documents[field.target.id] = sentence.replace("%", "%%")
    return documents
