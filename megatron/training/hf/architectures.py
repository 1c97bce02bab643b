"""Find the Hugging Face architecture that a config.json or a command line describes."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.bounded_files import UnusableFileError, printable, read_json, refuse_special_files
from megatron.training.errors import UserError
from megatron.training.hf import deepseek_v2, llama
from megatron.training.hf.config_types import check_types
from megatron.training.hf.layouts import Layout, Source

CONFIG = "config.json"


@dataclass(frozen=True)
class Architecture:
    """A model class of the transformers library whose models this program can also build."""

    name: str  #: name of the class in transformers
    model_type: str
    flags: Callable[[dict[str, Any]], dict[str, Any]]
    config: Callable[[argparse.Namespace], dict[str, Any]]
    tensors: Callable[[dict[str, Any]], dict[str, Layout]]


LLAMA = Architecture("LlamaForCausalLM", "llama", llama.flags, llama.config, llama.tensors)
DEEPSEEK_V2 = Architecture(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    deepseek_v2.flags,
    deepseek_v2.config,
    deepseek_v2.tensors,
)
ARCHITECTURES = (LLAMA, DEEPSEEK_V2)


@dataclass
class Model:
    """A model described by its Hugging Face architecture and config.json."""

    architecture: Architecture
    config: dict[str, Any]

    @property
    def tensors(self) -> dict[str, Layout]:
        """The layout of each model tensor, by name: how it is built from checkpoint tensors."""
        return self.architecture.tensors(self.config)

    @property
    def sources(self) -> dict[str, Source]:
        """The name and shape of each tensor in the Hugging Face checkpoint, by tensor name."""
        return {s.name: s for layout in self.tensors.values() for s in layout.sources}


def read_model(folder: str) -> Model:
    """Return the architecture and config.json of the model in a checkpoint folder.

    Raises:
        UserError: if there is no config.json, or it describes a model that cannot be built here.
    """
    path = Path(folder, CONFIG)
    try:
        refuse_special_files(path.parent)
        config = read_json(path)
    except FileNotFoundError:
        raise UserError(
            f"--load-hf {folder} holds no {CONFIG}; name a folder that was written by "
            "transformers' save_pretrained"
        ) from None
    except UnusableFileError as error:
        where = printable(error.path, limit=1000)
        raise UserError(f"{where} cannot be read: {error.why}; get the file again") from error
    names = config.get("architectures") if isinstance(config, dict) else None
    for architecture in ARCHITECTURES:
        if names == [architecture.name]:
            try:
                check_types(config)
            except ValueError as error:
                raise UserError(f"{path} has {error}; get the file again") from error
            return Model(architecture, config)
    shown = "no architecture"
    if names and isinstance(names, list):
        shown = printable(" and ".join(map(str, names)))
    raise UserError(
        f"{path} names {shown}; --load-hf takes {' or '.join(a.name for a in ARCHITECTURES)}"
    )


def flags_of(model: Model, folder: str) -> dict[str, Any]:
    """Return the values of the flags that describe the model in a checkpoint.

    Raises:
        UserError: if the config.json requires an unsupported feature, or lacks a value.
    """
    where = Path(folder, CONFIG)
    try:
        return model.architecture.flags(model.config)
    except KeyError as error:
        raise UserError(f"{where} has no {error.args[0]}; get the file again") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{where} has {printable(error)}; give another checkpoint") from error


def model_of(args: argparse.Namespace) -> Model:
    """Return the architecture and config.json of the model that the flags define.

    All flags in `args` must be filled in. The config.json still lacks `vocab_size`.
    """
    architecture = DEEPSEEK_V2 if args.multi_latent_attention else LLAMA
    config = {"architectures": [architecture.name], "model_type": architecture.model_type}
    return Model(architecture, config | architecture.config(args) | {"hidden_act": "silu"})
