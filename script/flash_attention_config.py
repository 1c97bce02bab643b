#!/usr/bin/env python3
"""Print or run a training command with given formats for the attention matmuls, Q K^T and P V.

    python3 script/flash_attention_config.py --list
    python3 script/flash_attention_config.py --model llama31-8b --dataset wikipedia \\
        --fa-quantization qk_mxfp8
    python3 script/flash_attention_config.py --model llama32-1b --dataset dolma --preset tiny \\
        --fa-quantization qk_mxfp8,pv_hifp8 --linear-quantization mxfp4 --dry-run

qk_X quantizes the operands of Q K^T and of its gradient matmuls, pv_X does so for P V, and qk_pv_X
for both. The linear layers stay in high precision unless --linear-quantization sets a format. All
other options are the same as in script/train_config.py, whose `--quantization FA_X` equals qk_X
here.

Exit status: the exit status of the training; 1 a file is missing; 2 wrong option.
"""

from __future__ import annotations

import argparse

from configs.cli import run_program
from configs.lookup import ConfigError, pick, spelled
from configs.options import add_actions, add_cluster, add_experiment, training_parser
from configs.quantizations import attention_choices, formats
from configs.run_names import Formats
from megatron.console import run_main

OFF = "none"


def build_parser() -> argparse.ArgumentParser:
    parser = training_parser(
        __doc__,
        "flash_attention_config.py --model M --dataset D --fa-quantization Q [options] [-- flags]",
    )
    add_actions(parser)
    add_experiment(parser)
    parser.add_argument(
        "--fa-quantization", metavar="Q", help=f"{', '.join(attention_choices())}; or qk_X,pv_Y"
    )
    parser.add_argument(
        "--linear-quantization", metavar="X", default=OFF, help=f"{', '.join(formats())} (none)"
    )
    add_cluster(parser)
    return parser


def attention_formats(text: str) -> dict[str, str]:
    """Return the formats of Q K^T and P V from a string such as `qk_mxfp8,pv_hifp8`.

    The keys of the result are "qk" and "pv"; the value for an unquantized matmul is "none".

    Raises:
        ConfigError: if a name is unknown, or two names set the format of the same matmul.
    """
    chosen: dict[str, str] = {}
    for given in text.split(","):
        name = spelled(given, attention_choices())
        part = pick("attention quantization", name, attention_choices(), "; or qk_X,pv_Y")
        for operation, fmt in part.items():
            if operation in chosen:
                raise ConfigError(
                    f"--fa-quantization {text} sets the format of {operation} twice; set it once"
                )
            chosen[operation] = fmt
    return {"qk": OFF, "pv": OFF} | chosen


def formats_of(attention: str, linear: str) -> Formats:
    linear = spelled(linear, [*formats(), OFF])
    attention = ",".join(spelled(each, attention_choices()) for each in attention.split(","))
    pick("format", linear, dict.fromkeys([*formats(), OFF]))
    flags = ["--linear-quant", linear]
    for operation, fmt in attention_formats(attention).items():
        flags += [f"--{operation}-quant", fmt]
    name = attention if linear == OFF else f"{attention}_linear_{linear}"
    return Formats(name=name, flags=flags)


def list_choices() -> str:
    lines = ["attention quantizations"]
    words = {"qk": "Q K^T", "pv": "P V"}
    for name, chosen in attention_choices().items():
        where = [f"{fmt} in {words[operation]}" for operation, fmt in chosen.items()]
        lines.append(f"  {name:16} {' and '.join(where) or 'no quantization'}")
    lines.append(f"  {'qk_X,pv_Y':16} one format in Q K^T, another in P V")
    lines.append(f"linear quantizations\n  {', '.join(formats())}, none (default)")
    lines.append("For models, datasets and training configurations: script/train_config.py --list")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    return run_program(
        build_parser(),
        argv,
        prints={"list": list_choices},
        required="fa-quantization",
        formats_of=lambda options: formats_of(options.fa_quantization, options.linear_quantization),
    )


if __name__ == "__main__":
    run_main(main)
