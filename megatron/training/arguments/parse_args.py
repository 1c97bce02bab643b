"""Parser for the command line of `pretrain_gpt.py`.

The flags of the model, the optimizer and data parallelism are generated from megatron-core's
configuration dataclasses (config_flags.py). All other flags are declared in options.py and in
`megatron.collection.flags`. Missing values are derived in defaults.py, and validation.py reports
contradictory values as errors.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.console import ArgumentParser, nearest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.arguments import options
from megatron.training.arguments.config_flags import (
    add_config_arguments,
    default_of,
    flagged_fields,
)
from megatron.training.arguments.flag_effects import check_effects
from megatron.training.arguments.option_fields import add_options
from megatron.training.arguments.validation import RunConfig, complete
from megatron.training.errors import UserError
from megatron.training.hf import flags as hf

#: configuration classes whose fields become flags, each with the title of its flag group; if two
#: classes have the same field, the first class defines the flag
CONFIGS = {
    TransformerConfig: "Transformer (generated from megatron-core's TransformerConfig)",
    MLATransformerConfig: "Multi-latent attention (generated from megatron-core's "
    "MLATransformerConfig)",
    OptimizerConfig: "Optimizer (generated from megatron-core's OptimizerConfig)",
    DistributedDataParallelConfig: "Data parallelism (generated from megatron-core's "
    "DistributedDataParallelConfig)",
}

#: configuration fields with a generated flag, by name; if two classes have the same field, the
#: first class takes precedence
_GENERATED = {
    name: field for config in reversed(CONFIGS) for name, field in flagged_fields(config).items()
}

EXAMPLES = """\
examples:
  # a tiny Llama on the CPU with generated data and MXFP8 matmuls; collect the first iteration
  python pretrain_gpt.py --mock-data --tokenizer-type NullTokenizer --vocab-size 255 \\
      --num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 \\
      --seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3 --swiglu \\
      --normalization RMSNorm --position-embedding-type rope --disable-bias-linear \\
      --custom-quant-type mxfp8 --save-tensors --tensor-save-dir /tmp/tensors

  # real data over two ranks, checkpoints every 100 iterations
  torchrun --nproc-per-node 2 pretrain_gpt.py --tensor-model-parallel-size 2 --bf16 \\
      --data-path dataset/default/corpus_text_document --tokenizer-type SentencePieceTokenizer \\
      --tokenizer-model model/default/tokenizer.model --save checkpoints/run1 \\
      --load checkpoints/run1 --save-interval 100 ...

  # continue from published weights on four ranks; export the weights when training ends
  torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 4 --bf16 \\
      --load-hf model/llama3.2-1b --save-hf model/trained --tokenizer-type HuggingFaceTokenizer \\
      --tokenizer-model model/llama3.2-1b --seq-length 4096 --train-iters 1000 --lr 1e-5 ...

  # convert a checkpoint of this program, without training
  python pretrain_gpt.py --load checkpoints/run1 --save-hf model/run1 --train-iters 0 ...
"""


def build_parser(*, documents: bool = False) -> argparse.ArgumentParser:
    """Return the argument parser of `pretrain_gpt.py`.

    Args:
        documents: whether to read the help texts of generated flags from megatron-core's source,
            which takes a tenth of a second.
    """
    parser = ArgumentParser(
        prog="pretrain_gpt.py",
        usage="[torchrun --nproc-per-node N | python] pretrain_gpt.py [options]",
        description="Pretrain a GPT model on megatron-core, with simulated low-precision matmuls "
        "and tensor collection. Flags are Megatron-LM's.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        advice="`python pretrain_gpt.py --help` lists every option",
        error_type=UserError,  # only one rank prints a UserError
    )
    before, after = options.GROUPS[:1], options.GROUPS[1:]
    for group in before:
        add_options(parser, group)
    for config, title in CONFIGS.items():
        add_config_arguments(parser, config, title, documents=documents)
    for group in after:
        add_options(parser, group)
    return parser


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """Return all spellings of the parser's flags in alphabetical order."""
    return sorted(parser._option_string_actions)


def parse_args(argv: Sequence[str] | None = None) -> RunConfig:
    """Parse the command line, derive missing values and check the result.

    Args:
        argv: command-line arguments; those of this process by default.

    Returns:
        The configuration of the run.

    Raises:
        UserError: if an argument is unknown, invalid or without effect.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser(documents=bool({"-h", "--help"} & set(argv)))
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UserError(_unknown_argument(unknown[0], option_names(parser)))
    given = hf.given_flags(parser, argv)
    model, notes = hf.prepare(args, given)
    check_effects(args, given, partial(_default, parser))
    run = complete(args, list(CONFIGS))
    run.notes.extend(notes)
    run.hf = model
    if model is None and args.save_hf is not None:
        run.hf = hf.describe(args)
    return run


def _default(parser: argparse.ArgumentParser, name: str) -> Any:
    """Return the default value of a flag."""
    generated = _GENERATED.get(name)
    return parser.get_default(name) if generated is None else default_of(generated)


def _unknown_argument(argument: str, known: list[str]) -> str:
    """Return the error message for an unknown argument."""
    if not argument.startswith("--"):
        return f"{argument!r} belongs to no option; put a flag before it or remove it"
    flag = argument.split("=")[0]
    close = nearest(flag, known)
    advice = f"did you mean {' or '.join(close)}?" if close else "see --help for all options"
    return f"unknown option {flag}; {advice}"
