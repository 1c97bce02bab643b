"""Read the command line: this project's flags, the script, and the arguments of the script.

Flags stand before the script. Everything after the script belongs to the script, even if it looks
like one of these flags.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.collection.flags import FLAGS, Flag
from megatron.console import ArgumentParser, about_unknown, hyphenated
from megatron.fake_quant.policy import TYPE_FLAG

#: flags that `_parser` declares itself, because their values or help differ from those in `FLAGS`
_OWN = ("save_tensors", "tensor_save_dir", "collect_plan")
EXAMPLES = """\
examples:
  python -m megatron.overlay pretrain_gpt.py --num-layers 2 ...
  python -m megatron.overlay --quant mxfp8 --save-tensors dump pretrain_gpt.py ...
  python -m megatron.overlay --quant-recipe recipe.yaml pretrain_gpt.py ...
  torchrun --nproc-per-node 2 -m megatron.overlay --quant mxfp8 pretrain_gpt.py ...
  python -m megatron.overlay --quant mxfp8 -m package.module ...

If the current folder has a package `megatron` with an __init__.py, Python finds that one first.
Then give the folder of the launcher: python REPOSITORY/megatron/overlay pretrain_gpt.py ...
"""


@dataclass(frozen=True)
class Request:
    """A command line of the launcher."""

    words: tuple[str, ...]  #: this project's flags as they were given
    script: str  #: path of the script, or name of the module
    is_module: bool  #: True if `script` is the name of a module
    arguments: tuple[str, ...]  #: arguments of the script
    options: argparse.Namespace  #: values of this project's flags

    @property
    def formats(self) -> dict[str, Any]:
        """Keyword arguments of `policy.configure`."""
        values = vars(self.options)
        names = {word.partition("=")[0] for word in self.words}
        flag = TYPE_FLAG if TYPE_FLAG in names else "--quant"
        return {name: values[key] for key, name in _FORMAT_FLAGS.items()} | {"type_flag": flag}

    @property
    def collection(self) -> dict[str, Any]:
        """Keyword arguments of `tensor_saver.configure` for the collection."""
        values = vars(self.options)
        given = {flag.name: values[flag.name] for flag in FLAGS if flag.name not in _OWN}
        folder = self.options.save_tensors
        return {
            "save_tensors": folder is not None,
            "save_dir": folder or self.options.tensor_save_dir,
            "plan": self.options.collect_plan,
            **given,
        }

    @property
    def for_run_card(self) -> dict[str, Any]:
        """Values of the flags, by the names that this project's own trainer gives the flags."""
        values = vars(self.options) | {"custom_quant_type": self.options.quant}
        values |= {"tensor_save_dir": self.collection["save_dir"]}
        values |= {"save_tensors": self.collection["save_tensors"]}
        names = [flag.name for flag in FLAGS] + ["custom_quant_type", *list(_FORMAT_FLAGS)[1:]]
        return {name: values[name] for name in names} | {"overlay_command": list(self.words)}

    @property
    def collects(self) -> bool:
        """True if tensors, a plan of the collection, or statistics of tensors are requested."""
        options = self.options
        tensors = options.save_tensors is not None or options.collect_plan
        return tensors or options.tensor_statistics is not None


#: names of the format flags in the parsed options, and the parameters of `policy.configure`
_FORMAT_FLAGS = {
    "quant": "custom_quant_type",
    "linear_quant": "linear",
    "qk_quant": "qk",
    "pv_quant": "pv",
    "quant_recipe": "recipe",
    "quant_accumulate": "accumulate",
}


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m megatron.overlay",
        usage="python -m megatron.overlay [FLAGS] SCRIPT [ARGUMENTS]\n"
        "       python -m megatron.overlay [FLAGS] -m MODULE [ARGUMENTS]",
        description="Run an unmodified training script of another source tree, with its matmuls "
        "quantized and its tensors collected by this project.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module by name")
    formats = parser.add_argument_group("number formats")
    formats.add_argument(
        "--quant",
        "--custom-quant-type",
        metavar="TYPE",
        help="formats of linear layers and attention: mxfp8, FA_mxfp8, linear_mxfp4, ...",
    )
    for operation, text in (
        ("linear", "the matmuls of linear layers"),
        ("qk", "the matmul Q K^T in attention"),
        ("pv", "the matmul P V in attention"),
    ):
        formats.add_argument(f"--{operation}-quant", metavar="FORMAT", help=f"format of {text}")
    formats.add_argument(
        "--quant-recipe", metavar="FILE", help="YAML file that sets the formats per layer"
    )
    formats.add_argument(
        "--quant-accumulate", metavar="NAME", help="accumulator of every matmul, as in hopper_fp8"
    )
    collection = parser.add_argument_group("tensor collection; a LIST has commas between its words")
    collection.add_argument(
        "--save-tensors",
        metavar="DIR",
        help="write the tensors that enter and leave the matmuls to this folder",
    )
    collection.add_argument(
        "--tensor-save-dir",
        metavar="DIR",
        help="folder of --tensor-statistics without --save-tensors",
    )
    collection.add_argument(
        "--collect-plan",
        action="store_true",
        help="print tensors and bytes of the selection, by layer, tensor, iteration and rank; then "
        "stop before the first update of the weights",
    )
    for flag in FLAGS:
        if flag.name not in _OWN:
            _add_flag(collection, flag)
    return parser


def flags_of_launcher() -> set[str]:
    """Return the names of all long flags of the launcher."""
    return {name for name in _parser()._option_string_actions if name.startswith("--")}


def _add_flag(group: Any, flag: Flag) -> None:
    text = flag.help.replace("%", "%%").replace("before training stops", "while training goes on")
    if flag.type is bool:
        group.add_argument(flag.option, action="store_true", help=text)
    elif flag.many:
        group.add_argument(flag.option, type=_words, metavar="LIST", help=text)
    else:
        group.add_argument(
            flag.option, type=flag.type, default=flag.default, metavar=flag.metavar, help=text
        )


def _words(text: str) -> list[str]:
    return text.split(",")


def parse(words: Sequence[str]) -> Request:
    """Return the request of a command line, or exit with an error message.

    Args:
        words: command-line arguments without the launcher's own name.
    """
    parser = _parser()
    count = _before_script(parser, words)
    given = _given(parser, words[:count])
    options = parser.parse_args(words[:count])
    rest = list(words[count:])
    if rest[:1] == ["--"]:
        del rest[0]
    if not rest:
        what = "module" if options.is_module else "script"
        parser.error(f"no {what} is given after the flags")
    _check_collection(parser, options, given)
    _make_absolute(options)
    return Request(tuple(words[:count]), rest[0], options.is_module, tuple(rest[1:]), options)


def _before_script(parser: ArgumentParser, words: Sequence[str]) -> int:
    """Return the number of words before the script: flags of this project, and their values."""
    known = parser._option_string_actions
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] != "--":
        name, equals, _ = words[position].partition("=")
        action = known.get(name) or known.get(hyphenated(name))
        if action is None:
            parser.error(about_unknown(words[position : position + 1], known))
        position += 1 if equals or action.nargs == 0 else 2
    return min(position, len(words))


def _given(parser: ArgumentParser, words: Sequence[str]) -> set[str]:
    """Return the names of the options that are given on the command line.

    Exit with a message if a flag is given twice, because the first one would be ignored, or if its
    value is empty, as from a shell variable that is not set.
    """
    known = parser._option_string_actions
    given: set[str] = set()
    position = 0
    while position < len(words):
        name, equals, value = words[position].partition("=")
        action = known.get(name) or known[hyphenated(name)]
        position += 1
        if action.nargs != 0 and not equals:
            value = words[position] if position < len(words) else name  # argparse reports it
            position += 1
        if action.nargs != 0 and not value.strip():
            parser.error(f"{name} is empty; give a value, or leave the flag out")
        if action.dest in given:
            flags = " or ".join(action.option_strings)
            parser.error(f"{flags} is given twice; give it once")
        given.add(action.dest)
    return given


def _make_absolute(options: argparse.Namespace) -> None:
    """Make the folders of the collection absolute, because the script may change its folder."""
    for name in ("save_tensors", "tensor_save_dir"):
        if getattr(options, name) is not None:
            setattr(options, name, str(Path(getattr(options, name)).absolute()))


def _check_collection(
    parser: ArgumentParser, options: argparse.Namespace, given_names: set[str]
) -> None:
    """Exit with a message if a flag of the collection has no effect."""
    if options.save_tensors is not None and options.tensor_save_dir is not None:
        parser.error("--save-tensors names the folder already; remove --tensor-save-dir")
    if options.save_tensors is not None or options.collect_plan:
        return
    given = [
        flag.option
        for flag in FLAGS
        if flag.name not in _OWN and flag.name != "tensor_statistics" and flag.name in given_names
    ]
    if options.tensor_save_dir is not None and options.tensor_statistics is None:
        given.append("--tensor-save-dir")
    if given:
        parser.error(f"{given[0]} has no effect without --save-tensors DIR; add it")
