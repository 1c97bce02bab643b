"""What the pages say is so: flags, links, examples, numbers."""

import re
import sys
import textwrap
from dataclasses import fields

from megatron.fake_quant import recipe
from megatron.fake_quant.recipe import load_recipe
from megatron.fake_quant.recipe_config import GEMMS
from megatron.training.collection_options import CollectionOptions
from tests.analysis.fake_dump import write_dump
from tests.links import broken_links
from tests.subprocesses import REPO, environment, run

PAGE = (REPO / "docs" / "collection.md").read_text()
RECIPES = (REPO / "docs" / "recipes.md").read_text()

FORMATS = ("mxfp8", "mxfp4", "hifp8")  #: of the experiment matrix


def test_every_flag_of_the_collection_is_explained_and_no_other():
    flags = {f"--{field.name.replace('_', '-')}" for field in fields(CollectionOptions)}
    said = set(re.findall(r"--(?:collect|control|save|tensor)-[a-z-]+", PAGE))
    assert said == flags - {"--tensor-save-dir"}


def test_links_of_all_pages_lead_somewhere():
    for page in [*(REPO / "docs").rglob("*.md"), *(REPO / "script").rglob("*.md")]:
        assert broken_links(page) == [], page


def test_the_python_of_the_analysis_page_runs(tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", (REPO / "docs" / "analysis.md").read_text(), re.S)
    write_dump(tmp_path / "enhanced_tensor_logs" / "mxfp8", layers=2)
    settings = environment() | {"PYTHONPATH": str(REPO), "MPLBACKEND": "agg"}
    done = run([sys.executable, "-c", code], cwd=tmp_path, env=settings)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "sqnr.png").read_bytes()[:4] == b"\x89PNG"


def rows_of(text: str) -> dict[str, list[str]]:
    """Rows of all Markdown tables in a text by their first cell; of equal ones the last."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0].strip(): [cell.strip() for cell in cells] for cells in lines}


def test_the_recipe_of_the_recipes_page_is_one(tmp_path):
    [text] = re.findall(r"```yaml\n(.*?)```", RECIPES, re.S)
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert [rule.name for rule in load_recipe(path).rules] == ["head", "end", "warm", "mlp", "core"]
    assert textwrap.indent(text.rstrip(), "    ") in recipe.__doc__, "the code says the same"


def test_the_recipes_page_names_every_recipe_and_operand():
    named = set(re.findall(r"`(\w+\.yaml)`", RECIPES))
    assert named == {path.name for path in (REPO / "examples" / "recipes").glob("*.yaml")}
    rows = rows_of(RECIPES)
    for operation, gemms in GEMMS.items():
        said = [f"`{gemm}`: {', '.join(operands)}" for gemm, operands in gemms.items()]
        assert rows[f"`{operation}`"][1] == "; ".join(said)
    assert {f"`{key}`" for key in ("config", "layers", "iterations")} <= rows.keys()


def test_the_performance_page_quotes_what_was_measured():
    """The ten quantizations, each number as the benchmark wrote it."""
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
    text = (results / "preprocessing.md").read_text()
    [over] = re.findall(r"on the disk: ([0-9.]+) ", text)
    assert page["tokenizing a corpus"][1] == f"{over} times the speed of `datasets.map`"
