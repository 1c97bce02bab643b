"""Test the command-line parser of all programs: underscores, suggestions, the form of errors."""

import pytest

from megatron.console import ArgumentParser, hyphenated, nearest


@pytest.fixture
def parser():
    parser = ArgumentParser(prog="prog")
    parser.add_argument("--tensor-dir")
    parser.add_argument("--old_name")
    parser.add_argument("rest", nargs="*")
    return parser


@pytest.mark.parametrize("words", [["--tensor_dir", "a_b"], ["--tensor_dir=a_b"]])
def test_underscores_are_hyphens_in_options_and_not_in_values(parser, words):
    assert parser.parse_args(words).tensor_dir == "a_b"
    assert parser.parse_args(["--old_name", "x"]).old_name == "x"
    assert parser.parse_args(["--old-name=x_y"]).old_name == "x_y"


def test_what_follows_two_dashes_is_left_alone(parser):
    assert parser.parse_args(["--", "--tensor_dir"]).rest == ["--tensor_dir"]


def test_subcommands_have_it_too():
    parser = ArgumentParser(prog="prog")
    parser.add_subparsers().add_parser("draw").add_argument("--output-dir")
    assert parser.parse_args(["draw", "--output_dir", "x"]).output_dir == "x"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tensor_dri", "x"], "unrecognized arguments: --tensor_dri, did you mean --tensor-dir?"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate; see prog --help"),
        (["--tensor-dir"], "argument --tensor-dir: expected one argument; see prog --help"),
    ],
)
def test_an_unknown_option_is_one_error_that_names_the_nearest(parser, capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"[ERROR] {message}")
    assert error.count("\n") == 1


def test_the_nearest_names_ignore_case_and_hyphens():
    assert nearest("FA_MXFP8", ["FA_mxfp8", "hifp4"]) == ["FA_mxfp8"]
    assert nearest("--quant_tpye", ["--quant-type", "--mode"]) == ["--quant-type"]
    assert hyphenated("--a_b=c_d") == "--a-b=c_d"
    assert hyphenated("a_b") == "a_b"
