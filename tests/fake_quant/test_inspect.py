"""The command `python -m megatron.fake_quant`: its output, its pictures and its errors."""

import sys

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import EventCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text

from megatron.analysis.plots.style import FORMAT_COLORS
from megatron.fake_quant import FORMATS, get_format
from megatron.fake_quant.__main__ import main
from megatron.fake_quant.inspect.format_table import markdown
from megatron.fake_quant.inspect.value_grids import COLORS, picture
from tests.fake_quant.oracle import code_points
from tests.subprocesses import run

SMALL = [name for name in list(FORMATS)[:13] if name not in ("bf16", "fp16")]


@pytest.fixture
def stopped(capsys):
    """Run arguments that must fail, and return the error."""

    def stopped(*arguments: str) -> str:
        try:
            status = main(list(arguments))
        except SystemExit as error:
            status = error.code
        printed = capsys.readouterr()
        assert (status, printed.out) == (2, "")
        assert printed.err.startswith("[ERROR] ")
        assert printed.err.count("\n") == 1
        return printed.err

    return stopped


def test_list_has_every_named_format_or_those_given(capsys):
    assert main(["list"]) == 0
    assert capsys.readouterr().out == markdown(FORMATS.values()) + "\n"
    assert main(["list", "nvfp4:2d", "HIF8"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[2:]] == [
        "nvfp4:2d",
        "hifp8",
    ]


def test_describe_and_table_print_pages(capsys):
    assert main(["describe", "mxfp4"]) == 0
    assert "arXiv" not in (page := capsys.readouterr().out)
    assert "OCP Microscaling Formats" in page
    assert main(["table", "mxfp4", "--csv"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "code,bits,value",
        "0x0,0 00 0,0.0",
        "0x1,0 00 1,0.5",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["describe", "mxfp5"], "unknown format 'mxfp5', did you mean mxfp"),
        (["list", "mxfp8", "nope"], "unknown format 'nope'"),
        (["table", "hifp8:2d"], "hifp8 does not take '2d'; it takes sr, hr, inf"),
        (["table", "bf16"], "bfloat16 is a plain torch cast with 2^16 codes"),
        (["table", "fp16"], "torch.tensor(CODE, dtype=torch.uint16).view(torch.float16)"),
        (["picture", "mxfp8", "fp16"], "cannot draw fp16: thousands of values would form"),
        (["picture", "--output", "no/such/folder/x.png"], "no folder no/such/folder"),
        (["picture", "mxfp4", "--output", "x.txt"], "Format 'txt' is not supported"),
        ([], "required: COMMAND; see python -m megatron.fake_quant --help"),
        (["show"], "invalid choice: 'show'"),
        (["describe"], "required: FORMAT; see python -m megatron.fake_quant describe --help"),
    ],
)
def test_what_cannot_be_done_is_said(arguments, message, stopped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in stopped(*arguments)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_only_the_picture_is_missing(stopped, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "megatron.fake_quant.inspect.value_grids")
    assert "picture needs matplotlib, which is not installed; pip install" in stopped("picture")


def test_no_other_command_imports_matplotlib():
    lines = [
        "import sys",
        "from megatron.fake_quant.__main__ import main",
        "main(['describe', 'nvfp4'])",
        "assert 'matplotlib' not in sys.modules",
    ]
    result = run([sys.executable, "-c", "\n".join(lines)])
    assert result.returncode == 0, result.stderr


def test_a_reader_that_left_is_no_error():
    command = f"set -o pipefail; {sys.executable} -m megatron.fake_quant table hifp8 | true"
    result = run(["bash", "-c", command])
    assert (result.returncode, result.stderr) == (0, "")


def test_help_names_the_commands_and_what_a_format_can_be(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    for word in ("list", "describe nvfp4", "table hifp8 --csv", "picture mxfp8", "2d", "pow2"):
        assert word in text


def test_a_picture_is_written(tmp_path, capsys):
    output = tmp_path / "grids.png"
    assert main(["picture", "mxfp4", "hifp8:t15", "mxfp4", "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"wrote {output}\n"


@pytest.fixture(scope="module")
def default():
    """Return the picture of every main format of at most 8 bits."""
    return picture([get_format(name) for name in SMALL])


def test_one_row_of_ticks_a_format_in_its_colour(default):
    top, _ = default.axes
    rows = [artist for artist in top.collections if isinstance(artist, EventCollection)]
    assert [row.get_lineoffset() for row in rows] == list(range(len(SMALL)))
    assert [to_hex(row.get_color()) for row in rows] == [COLORS[name] for name in SMALL]
    assert [label.get_text() for label in top.get_yticklabels()] == SMALL
    e2m3 = rows[SMALL.index("mxfp6_e2m3")]
    assert e2m3.get_positions() == code_points("e2m3")[1:].tolist()


def test_one_line_of_spacing_an_element(default):
    _, bottom = default.axes
    lines = {line.get_label(): line for line in bottom.get_lines()}
    assert list(lines) == ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "int8", "hif8", "s1p2"]
    assert lines["e2m1"].get_xydata().tolist() == [[0.5, 1], [1, 1], [1, 0.5], [6, 0.5]]
    assert bottom.get_xlabel().startswith("magnitude")
    assert bottom.get_ylabel() == "spacing / value"


@pytest.mark.parametrize(
    "names",
    [
        SMALL,
        [name for name in FORMATS if name not in ("bf16", "fp16")],
        ["mx:e1m0:b4:floor"],
        ["hifp4", "mx:e3m4:b16:rceil"],
    ],
)
def test_nothing_is_clipped(names):
    figure = picture([get_format(name) for name in names])
    FigureCanvasAgg(figure).draw()
    frame = figure.bbox
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text():
            box = text.get_window_extent()
            assert frame.x0 <= box.x0, text
            assert box.x1 <= frame.x1, text
            assert frame.y0 <= box.y0, text
            assert box.y1 <= frame.y1, text


def test_every_small_format_has_a_colour_of_its_own_that_analysis_gives_it_too():
    assert COLORS.keys() == set(SMALL)
    assert COLORS.items() <= FORMAT_COLORS.items()
    assert len(set(FORMAT_COLORS.values())) == len(FORMAT_COLORS)


def test_a_variant_has_the_colour_of_its_format():
    top, _ = picture([get_format("mxfp4:2d:sr")]).axes
    assert to_hex(top.collections[0].get_color()) == COLORS["mxfp4"]
