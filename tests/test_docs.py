"""The pages: their flags, links, examples and numbers are right."""

import re
import textwrap
from pathlib import Path

import pytest

from megatron.collection.flags import FLAGS
from megatron.fake_quant import recipe
from megatron.fake_quant.recipe import load_recipe
from megatron.fake_quant.recipe.operands import GEMMS
from tests import forks
from tests.links import broken_links
from tests.subprocesses import REPO, environment
from tests.training.runs import succeeded, train

PAGE = (REPO / "docs" / "collection.md").read_text()
RECIPES = (REPO / "docs" / "recipes.md").read_text()

FORMATS = ("mxfp8", "mxfp4", "hifp8")  #: formats of the experiment matrix


def test_every_flag_of_the_collection_is_explained_and_no_other():
    flags = {flag.option for flag in FLAGS}
    said = set(re.findall(r"--(?:collect|control|save|tensor)-[a-z-]+", PAGE))
    assert said == flags


def test_links_of_all_pages_lead_somewhere():
    for page in [*(REPO / "docs").rglob("*.md"), *(REPO / "script").rglob("*.md")]:
        assert broken_links(page) == [], page


def test_every_path_that_contributing_names_exists():
    text = (REPO / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"\b(?:megatron|script|tests|docs|\.ci)/[\w./-]*\w|[\w.-]+\.md", text)
    assert len(paths) > 40
    assert [path for path in paths if not (REPO / path).exists()] == []


def python_blocks() -> list[tuple[str, str]]:
    """Return the location and the code of each Python block of every page."""
    pages = [*sorted(REPO.glob("README*.md")), *sorted((REPO / "docs").rglob("*.md"))]
    found = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M):
            line = text[: match.start()].count("\n") + 1
            found.append((f"{page.relative_to(REPO).as_posix()}:{line}", match[1]))
    return found


@pytest.fixture(scope="module", params=["one rank", "two data-parallel ranks"])
def dumps(request, tmp_path_factory) -> Path:
    """Return the folder above a dump of two iterations and two micro-batches, with codes."""
    folder = tmp_path_factory.mktemp("pages")
    ranks = 1 if request.param == "one rank" else 2
    collect = ("--custom-quant-type", "mxfp8", "--save-tensors", "--control-iter", "2")
    collect += ("--tensor-statistics", "1")
    which = ("--collect-micro-batches", "2", "--collect-tensors", "all,codes", "--mock-data")
    where = ("--tensor-save-dir", folder / "enhanced_tensor_logs" / "mxfp8")
    short = ("--num-layers", "2", "--train-iters", "2")
    succeeded(train(*collect, *which, *where, *short, ranks=ranks))
    return folder


def test_every_page_with_python_is_found():
    pages = {place.partition(":")[0] for place, _ in python_blocks()}
    assert {"README.md", "README.zh-CN.md", "docs/analysis.md", "docs/statistics.md"} <= pages


@pytest.mark.parametrize(("place", "code"), python_blocks(), ids=lambda text: text.split("\n")[0])
def test_the_python_of_a_page_runs_on_any_dump(dumps, place, code):
    settings = environment() | {"PYTHONPATH": str(REPO), "MPLBACKEND": "agg"}
    done = forks.run("-c", code + SHOWN, cwd=dumps, env=settings)
    assert done.returncode == 0, done.stderr
    for name, width, needed in re.findall(r"^(\S+) (\S+) needs (\S+)$", done.stdout, re.M):
        assert float(width) >= float(needed), f"{name}: labels are cut off"
    if "savefig" in code:
        assert " needs " in done.stdout


#: Prints the width and height of each saved picture, and what its labels need, in inches.
SHOWN = """
import pathlib, struct, sys
for path in sorted(pathlib.Path().glob("*.png")) if "matplotlib.pyplot" in sys.modules else ():
    import matplotlib.pyplot as plt
    figure = plt.gcf()
    content = path.read_bytes()
    assert content[:4] == b"\\x89PNG"
    figure.canvas.draw()
    box = figure.get_tightbbox()
    whole = 0 <= box.x0 and 0 <= box.y0 and box.x1 <= figure.get_figwidth()
    whole = whole and box.y1 <= figure.get_figheight()
    sides = zip(struct.unpack(">II", content[16:24]), (box.width, box.height))
    for pixels, needed in sides:
        inches = pixels / figure.dpi
        print(path.name, f"{inches:.3f} needs {needed if whole else needed + 0.1:.3f}")
    path.unlink()
"""


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the rows of all Markdown tables by first cell; of equal cells, the last one counts."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0].strip(): [cell.strip() for cell in cells] for cells in lines}


def test_the_recipe_of_the_recipes_page_is_one(tmp_path):
    [text] = re.findall(r"```yaml\n(.*?)```", RECIPES, re.S)
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert [rule.name for rule in load_recipe(path).rules] == ["head", "end", "warm", "mlp", "core"]
    assert textwrap.indent(text.rstrip(), "    ") in recipe.__doc__, "the docstring differs"


def test_the_recipes_page_names_every_recipe_and_operand():
    named = set(re.findall(r"`(\w+\.yaml)`", RECIPES))
    assert named == {path.name for path in (REPO / "examples" / "recipes").glob("*.yaml")}
    rows = rows_of(RECIPES)
    for operation, gemms in GEMMS.items():
        said = [f"`{gemm}`: {', '.join(operands)}" for gemm, operands in gemms.items()]
        assert rows[f"`{operation}`"][1] == "; ".join(said)
    assert {f"`{key}`" for key in ("config", "layers", "iterations")} <= rows.keys()


def slowest_of(page: Path) -> tuple[float, tuple[float, str], float]:
    """Return the largest bfloat16 times over those of a copy to reused memory.

    The first is that of mxfp8, the second is that of other formats with one candidate per block,
    with its name, and the third is that of formats with two candidates.
    """
    found = re.findall(
        r"^\| `(\S+)` \| bf16 \| \S+ \| [0-9.]+ \| [0-9.]+ \| [0-9.]+ \| ([0-9.]+) \|",
        page.read_text(),
        re.M,
    )
    assert len(found) > 60
    ratios = [(float(ratio), name) for name, ratio in found]
    two = re.compile("4over6|if4|mixfp4")
    return (
        max(ratio for ratio, name in ratios if name == "mxfp8"),
        max(each for each in ratios if not two.search(each[1])),
        max(ratio for ratio, name in ratios if two.search(name)),
    )


def test_the_performance_page_quotes_what_was_measured():
    """Each number of the ten quantizations is as the benchmark wrote it."""
    results = REPO / "docs" / "results"
    page = rows_of((REPO / "docs" / "performance.md").read_text())
    head = "## The quantizations of the experiment matrix"
    training = rows_of((results / "training.md").read_text().partition(head)[2])
    storage = rows_of((results / "storage.md").read_text())
    types = [f"{where}_{name}" for where in ("FA", "linear", "FA_linear") for name in FORMATS]
    for name in ("bf16", *types):
        step, quartiles, memory, bits, weights = page[name][1:]
        assert [step, quartiles, memory] == [training[name][i] for i in (2, 3, 5)]
        stored = storage[name.rpartition("_")[2] if "linear_" in name else "bf16"]
        assert [bits, weights] == [stored[4], stored[2]]
    analysis = rows_of((results / "analysis.md").read_text().partition("## Tiny")[0])
    [two] = [row for row in analysis.values() if row[:2] == ["ours", "2"]]
    said = page["full statistics of a dump, 6 formats"][1]
    assert said == f"{two[6]} GB/s on two cores, {two[7]} times plain torch and numpy"
    text = (REPO / "docs" / "performance.md").read_text()
    said = re.search(
        r"up to ([0-9.]+) times as long as that\scopy in mxfp8, up to ([0-9.]+) times in "
        r"other formats \((\w+)\), and up to ([0-9.]+) times if",
        text,
    )
    assert said is not None
    slowest = slowest_of(results / "formats.md")
    assert list(said.groups()) == [
        f"{slowest[0]:.1f}",
        f"{slowest[1][0]:.1f}",
        slowest[1][1],
        f"{slowest[2]:.1f}",
    ]
    text = (results / "preprocessing.md").read_text()
    [over] = re.findall(r"on the disk: ([0-9.]+) ", text)
    assert page["tokenizing a corpus"][1] == f"{over} times the speed of `datasets.map`"
