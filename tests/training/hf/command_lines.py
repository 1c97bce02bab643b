"""Command lines of `--load-hf` and values of its flags, for several test files."""

import json
from dataclasses import fields
from pathlib import Path

from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.arguments.config_flags import default_of, flag_options, flagged_fields
from megatron.training.arguments.options import ModelOptions
from megatron.training.arguments.parse_args import parse_args
from megatron.training.arguments.validation import RunConfig
from tests.published import PUBLISHED

BATCH = ("--seq-length", "64", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3")
DATA = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100")
FIELDS = flagged_fields(MLATransformerConfig) | {f.name: f for f in fields(ModelOptions)}


def folder_of(tmp_path: Path, name: str, **changes) -> str:
    """Return a folder that holds only the config.json of a published model, with changes."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name] | changes))
    return str(tmp_path)


def parse(folder: str, *options: str) -> RunConfig:
    """Parse a short command line with `--load-hf` and more options."""
    return parse_args(["--load-hf", folder, *BATCH, *DATA, *options])


def another_value(name: str) -> str:
    """Return a flag with a value that is not its default."""
    field, flag = FIELDS[name], "--" + name.replace("_", "-")
    if name in {f.name for f in fields(ModelOptions)}:
        how = {"type": field.metadata["argparse"].get("type")} | dict(field.metadata["argparse"])
        default = field.default
    else:
        how, default = flag_options(field.type), default_of(field)
    if name == "moe_router_load_balancing_type":
        return f"{flag} sinkhorn"
    if field.type is bool:
        return f"--no-{name.replace('_', '-')}" if default else flag
    if "choices" in how:
        return f"{flag} {[c for c in how['choices'] if c != default][-1]}"
    if how.get("metavar") in ("N|LIST", "N,N"):
        return f"{flag} {'[1,0,1,1]' if how['metavar'] == 'N|LIST' else '8,0'}"
    if str(how.get("metavar", "")).startswith("{"):
        return f"{flag} {how['metavar'].strip('{}').split(',')[-1]}"
    words = {int: "3", float: "0.5", str: "word", None: ""}
    return f"{flag} {words[how.get('type')]}".strip()
