"""Answer queries of driver scripts such as run_tensor_collection.sh on standard output.

    python script/configs preset
    python script/configs preset data --data dataset/wiki_text_document \\
        --tokenizer model/llama3.2-1b

data     print the tokenizer and the prefix of the data, one per line; the default is Wikipedia,
         tokenized for Llama 3.2 1B
preset   print 1b or tiny: --preset, or the model that fits this machine and its data
type     print the canonical name of a quantization type, then `flag`, or `settings` if training
         reads the type from the environment and the settings file
start    print the number of iterations of the model from which a collection continues, then the
         words of the flags that load it, one per line; only 0 if no model is loaded
name     print the quantization type that results from flags of pretrain_gpt.py (--flags), the
         environment and the settings file
size     print the size of the collection of a training command (--command), and ask before a
         large one
nearest  print the options that are most similar to a word, as part of an error message

Several queries are answered one after the other.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs import trained_model
from configs.chosen_type import chosen_type
from configs.datasets import DATASETS
from configs.launch import setting
from configs.lookup import ConfigError
from configs.models import MODELS
from configs.options import whole
from configs.quantizations import AS_SET
from configs.resolve import (
    DataRequest,
    Files,
    at_home,
    cuda_devices,
    is_set,
    resolve_data,
    say,
)
from configs.run_names import Formats
from configs.trained_model import TrainedModel, continue_flags, why_random
from megatron.console import ArgumentParser, did_you_mean, run_main


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python script/configs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("queries", nargs="+", choices=ANSWERS, metavar="query")
    parser.add_argument("--tokenizer", help="tokenizer that the user gives")
    parser.add_argument("--data", help="prefix of the data that the user gives")
    parser.add_argument(
        "--tokenizer-name", default="--tokenizer-path", help="name of its option, for messages"
    )
    parser.add_argument("--data-name", default="--data-path", help="the same for the data")
    parser.add_argument("--preset", help="1b, or tiny, which may train on the default corpus")
    parser.add_argument("--type", help="quantization type as given by the user")
    parser.add_argument(
        "--start-iterations",
        type=whole,
        metavar="N",
        help="iterations of the model to continue from; 0: random weights (START_ITERATIONS if "
        f"set, otherwise {trained_model.ITERATIONS})",
    )
    parser.add_argument(
        "--given",
        default="",
        help="option that makes the driver's job differ from the default job",
    )
    parser.add_argument("--dtype", default="bf16", help="the driver's --dtype")
    parser.add_argument("--flags", default="", help="flags of pretrain_gpt.py, quoted for a shell")
    parser.add_argument("--command", default="", help="training command as a dry run prints it")
    parser.add_argument("--types", type=int, default=1, help="number of types collected in turn")
    parser.add_argument("--yes", action="store_true", help="the user agrees to a large collection")
    parser.add_argument("--word", default="", help="an unknown option")
    parser.add_argument("--options", default="", help="known options, separated by spaces")
    parser.add_argument("--dry-run", action="store_true")
    return parser


def request_of(options: argparse.Namespace) -> DataRequest:
    """Return the tokenizer and data that the user gives, and the files to use by default.

    By default, the data are Wikipedia, and the tokenizer is that of Llama 3.2 1B.
    """
    model, dataset = MODELS["llama32-1b"], DATASETS["wikipedia"]
    default = Files(
        tokenizer=at_home(model.tokenizer.path), data=at_home(dataset.prefix(model.tokenizer))
    )
    return DataRequest(
        tokenizer=options.tokenizer,
        data=options.data,
        default=default,
        corpus=options.preset != "1b",
        prepare=(
            *("bash", at_home(dataset.prepare)),
            *("--tokenizer-model", options.tokenizer or default.tokenizer),
        ),
        names=(options.tokenizer_name, options.data_name),
    )


def data(options: argparse.Namespace) -> list[str]:
    options.files = resolve_data(request_of(options), sys.executable, dry_run=options.dry_run)
    return [options.files.tokenizer, options.files.data]


def start(options: argparse.Namespace) -> list[str]:
    """Return the number of iterations of the model to continue from, and the flags that load it.

    If there is no such model, return only "0". The queries `preset` and `data` must come before
    this one.
    """
    iterations = setting(options.start_iterations, "START_ITERATIONS", whole)
    if iterations == 0:
        say("No trained model is loaded (--start-iterations 0).")
        return ["0"]
    why = f"{options.given} is given" if options.given else None
    if options.preset != "tiny":
        why = why or f"the preset is {options.preset}"
    why = why or why_random(options.files, shlex.split(options.flags), options.dtype)
    if why is not None:
        if options.start_iterations is not None:
            raise ConfigError(
                f"--start-iterations {iterations} belongs to the default job, but {why}; leave out "
                "one of the two"
            )
        say(f"No trained model is loaded, because this is not the default job: {why}.")
        return ["0"]
    model = TrainedModel(iterations or trained_model.ITERATIONS, options.files)
    return [str(model.iterations), *continue_flags(model.folder)]


def preset(options: argparse.Namespace) -> list[str]:
    """Return --preset or, by default, "1b" if a GPU and data are available, and "tiny" if not."""
    if options.preset is None:
        options.preset = _fitting_preset(options)  # the function `data` also reads this option
    return [options.preset]


def _fitting_preset(options: argparse.Namespace) -> str:
    if not cuda_devices(sys.executable, dry_run=options.dry_run):
        say("No CUDA device: the model is the tiny preset (--preset 1b for the real shape).")
        return "tiny"
    request = request_of(options)
    if request.tokenizer is None and request.data is None and not request.default.there():
        say(
            f"No data given, and {request.default.lacking()}: the model is the tiny preset "
            "(--preset 1b for the real shape, which needs the data)."
        )
        return "tiny"
    return "1b"


def quantization_type(options: argparse.Namespace) -> list[str]:
    chosen = chosen_type(options.type, sys.executable, dry_run=options.dry_run)
    return [chosen.name, "flag" if chosen.by_flag else "settings"]


def name(options: argparse.Namespace) -> list[str]:
    formats = Formats(name=AS_SET, flags=())
    return [formats.effective_name(shlex.split(options.flags), sys.executable)]


def nearest(options: argparse.Namespace) -> list[str]:
    return [did_you_mean(options.word, options.options.split())]


def size(options: argparse.Namespace) -> list[str]:
    from configs.announce import announce  # slow to import, and needed only here

    yes = options.yes or is_set("COLLECT_YES")
    words = shlex.split(options.command)
    announce(words, types=options.types, yes=yes, dry_run=options.dry_run)
    return []


ANSWERS = {
    "name": name,
    "size": size,
    "data": data,
    "preset": preset,
    "start": start,
    "type": quantization_type,
    "nearest": nearest,
}


def main() -> int:
    options = build_parser().parse_args()
    try:
        for query in options.queries:
            for line in ANSWERS[query](options):
                print(line)
    except ConfigError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return error.status
    return 0


if __name__ == "__main__":
    run_main(main)
