"""Tests of `megatron.analysis.figures`: selection, width, font size and style of one figure."""

from __future__ import annotations

import matplotlib as mpl

mpl.use("agg")

import pytest

from megatron.analysis import figures
from megatron.analysis.__main__ import main
from megatron.analysis.figures.figure_data import NothingToDrawError
from megatron.analysis.figures.page import Page, page_of
from tests.analysis.fake_dump import FORMATS, write_two_types

DOTS = "quantization_analysis/sqnr_by_tensor"


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    write_two_types(folder)
    return folder


@pytest.fixture(scope="module")
def data(dump):
    return figures.load(dump, formats=FORMATS)


def sizes(figure):
    """Return the font sizes of all texts that the figure shows."""
    return {
        text.get_fontsize() for text in figure.findobj(mpl.text.Text) if text.get_text().strip()
    }


def test_every_name_can_be_drawn_for_the_column_of_a_paper(data):
    names = figures.names(data)
    assert len(names) == len(set(names)) > 30
    for name in names:
        try:
            figure = figures.figure(data, name, width="single", style="paper")
        except NothingToDrawError:
            assert name == "overflow_analysis/special_values"
            continue
        assert figure.get_figwidth() == 3.5
        assert figure.get_suptitle() == ""
        assert figures.caption(figure)
        figure.draw_without_rendering()  # constrained layout warns if the axes do not fit
        assert max(sizes(figure)) <= 8.8 + 1e-9, name


def test_a_figure_for_the_screen_has_its_title_and_size(data):
    figure = figures.figure(data, DOTS)
    assert figure.get_suptitle().startswith("SQNR of each tensor")
    assert figure.get_figwidth() == 9.0
    assert figures.caption(figure).startswith("SQNR of each tensor. a dot is the median of")


def test_panels_that_do_not_fit_side_by_side_are_drawn_below_each_other(data):
    name = "quantization_analysis/error_by_magnitude"
    wide, narrow = (figures.figure(data, name, width=width) for width in (14, "single"))
    columns = [figure.axes[0].get_subplotspec().get_gridspec().ncols for figure in (wide, narrow)]
    assert columns == [3, 1]
    # Each row of panels has the numbers of its y-axis.
    for figure, labeled in ((wide, [True, False, False]), (narrow, [True, True, True])):
        figure.draw_without_rendering()
        shown = [
            any(tick.label1.get_visible() for tick in ax.yaxis.get_major_ticks())
            for ax in figure.axes
        ]
        assert shown == labeled


def test_a_selection_limits_what_is_drawn(dump, data):
    part = figures.load(dump, formats=["mxfp4"], select={"layer": 1, "tensor_name": "input"})
    assert set(part.tensors["layer_idx"]) == {1}
    assert set(part.tensors["tensor_name"]) == {"input"}
    assert len(part.tensors) < len(data.tensors)
    with pytest.raises(ValueError, match=r"no tensor in .* meets layer=77"):
        figures.load(dump, select={"layer": 77})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": "wide"}, "no width 'wide'; give single, double or a number of inches"),
        ({"width": 0.5}, "the width is 0.5 inches; give 1.5 to 40 inches"),
        ({"width": "nan"}, "the width is nan inches"),
        ({"font_size": 0}, "the font size is 0 points; give 4 to 40 points"),
        ({"style": "poster"}, "no style 'poster'; choose from screen, paper"),
    ],
)
def test_a_wrong_option_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        page_of(**options)


def test_a_wrong_name_is_refused(data):
    with pytest.raises(ValueError, match="no figure 'sqnr': a name begins with one of distrib"):
        figures.figure(data, "sqnr")
    with pytest.raises(ValueError, match="heatmaps has: sqnr_mxfp8, "):
        figures.figure(data, "heatmaps/sqnr")
    with pytest.raises(NothingToDrawError, match="every value is finite"):
        figures.figure(data, "overflow_analysis/special_values")


def test_the_default_page_changes_no_size():
    page = Page()
    assert page.fit(9.0, 5.0, 1, 2, categories=False) == (9.0, pytest.approx(5.0), 1, 2)
    assert page_of("double", style="paper") == page_of(style="paper")
    assert page_of("single").fit(9.0, 5.0, 1, 1, categories=True)[1] == pytest.approx(5.0)


def test_the_command_draws_for_a_paper_with_truetype_fonts(dump, tmp_path, capsys):
    options = ["--formats", "mxfp4", "--style", "paper", "--width", "single", "--image", "pdf"]
    command = ["draw", str(dump), "--output-dir", str(tmp_path), *options]
    chosen = ["--figures", "quantization_analysis", "quick", "--select", "layer=0"]
    assert main([*command, *chosen]) == 0
    pdf = (tmp_path / f"{DOTS}.pdf").read_bytes()
    assert b"/FontType 3" not in pdf
    assert b"/Type3" not in pdf
    assert b"/CIDFontType2" in pdf
    caption = (tmp_path / f"{DOTS}.caption.txt").read_text()
    assert caption.startswith("SQNR of each tensor. ")
    assert "no quick: it describes whole runs" in capsys.readouterr().out
    assert not (tmp_path / "quick_analysis.png").exists()
    assert main([*command, "--figures", "quick"]) == 2
    assert "leave out --width, --font-size and --style" in capsys.readouterr().err


def test_a_saved_figure_has_truetype_fonts(data, tmp_path):
    figure = figures.figure(data, DOTS, style="paper")
    figures.save(figure, tmp_path / "dots.pdf")
    assert b"/Type3" not in (tmp_path / "dots.pdf").read_bytes()
    with pytest.raises(ValueError, match="Format 'docx' is not supported"):
        figures.save(figure, tmp_path / "dots.docx")
