#!/usr/bin/env python3
"""Print or run the training command of one experiment in the matrix.

    python3 script/train_config.py --list
    python3 script/train_config.py --model llama31-8b --dataset wikipedia --quantization bf16
    python3 script/train_config.py --model deepseek2_lite --dataset dolma \\
        --quantization FA_linear_mxfp8 --nproc-per-node 8 --ep 8 --dry-run
    python3 script/train_config.py --model llama32-1b --dataset wikipedia \\
        --quantization linear_mxfp4 --training-config fast --preset tiny -- --seed 7

A quantization names matmuls and a format: FA_mxfp8 quantizes Q K^T, linear_mxfp8 the linear layers,
FA_linear_mxfp8 both of these, and mxfp8 both of these and P V. Flags after -- are passed to
pretrain_gpt.py and take precedence. The tables are in script/configs/; docs/experiments.md
describes them.

Exit status: the exit status of the training; 1 a file is missing; 2 wrong option.
"""

from __future__ import annotations

import argparse

from configs.cli import run_program
from configs.datasets import DATASETS
from configs.lookup import pick, spelled
from configs.models import MODELS
from configs.options import add_actions, add_cluster, add_experiment, training_parser
from configs.quantizations import AS_SET, accepted
from configs.resolve import at_home, has_data
from configs.run_names import Formats
from configs.scripts import write_scripts
from configs.trainings import TRAININGS
from megatron.console import run_main


def build_parser() -> argparse.ArgumentParser:
    parser = training_parser(
        __doc__,
        "train_config.py --model M --dataset D --quantization Q [options] [-- flags]",
    )
    add_actions(parser)
    parser.add_argument(
        "--write-scripts", action="store_true", help="regenerate the scripts in script/<model>/"
    )
    add_experiment(parser)
    parser.add_argument("--quantization", metavar="Q", help=", ".join(accepted()))
    add_cluster(parser)
    return parser


def formats_of(name: str) -> Formats:
    """Return the training flags for the quantization type `name`, and its part of the run name.

    Raises:
        ConfigError: if the quantization is unknown.
    """
    more = (
        "; give any other after --, as in `--quantization settings -- --custom-quant-type nvfp4:2d`"
    )
    name = spelled(name, accepted())
    pick("quantization", name, accepted(), more)
    return Formats(name=name, flags=() if name == AS_SET else ("--custom-quant-type", name))


def list_tables() -> str:
    """Return text that lists all models, datasets, quantization types and other accepted names."""
    lines = ["models"]
    for name, model in MODELS.items():
        count = model.full.architecture.parameters()
        lines.append(
            f"  {name:16} {model.title}, {count:,} parameters; tokenizer {model.tokenizer.path}"
        )
    lines.append("datasets")
    for name, dataset in DATASETS.items():
        for prefix in dict.fromkeys(dataset.prefix(m.tokenizer) for m in MODELS.values()):
            state = "" if has_data(at_home(prefix)) else " (not made yet)"
            lines.append(f"  {name:16} {prefix}{state}")
    lines.append("quantizations")
    lines += [f"  {name:16} {about}" for name, about in accepted().items()]
    lines.append("training configurations")
    lines += [f"  {name:16} {training.about}" for name, training in TRAININGS.items()]
    lines.append("presets")
    lines.append("  full             the published model")
    lines.append("  tiny             a small model of the same architecture, 4 layers of 256")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    return run_program(
        build_parser(),
        argv,
        prints={"list": list_tables, "write_scripts": write_scripts},
        required="quantization",
        formats_of=lambda options: formats_of(options.quantization),
    )


if __name__ == "__main__":
    run_main(main)
