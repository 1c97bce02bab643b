"""What the pages say is so: flags, links, examples, numbers."""

import re
import sys
from dataclasses import fields

from megatron.training.collection_options import CollectionOptions
from tests.analysis.fake_dump import write_dump
from tests.subprocesses import REPO, environment, run

PAGE = (REPO / "docs" / "collection.md").read_text()


def test_every_flag_of_the_collection_is_explained_and_no_other():
    flags = {f"--{field.name.replace('_', '-')}" for field in fields(CollectionOptions)}
    said = set(re.findall(r"--(?:collect|control|save|tensor)-[a-z-]+", PAGE))
    assert said == flags - {"--tensor-save-dir"}


def test_links_of_all_pages_lead_somewhere():
    for page in [*(REPO / "docs").rglob("*.md"), *(REPO / "script").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            found = target.startswith("http") or (page.parent / target).exists()
            assert found, f"{page}: {target}"


def test_the_python_of_the_analysis_page_runs(tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", (REPO / "docs" / "analysis.md").read_text(), re.S)
    write_dump(tmp_path / "enhanced_tensor_logs" / "mxfp8", layers=2)
    settings = environment() | {"PYTHONPATH": str(REPO), "MPLBACKEND": "agg"}
    done = run([sys.executable, "-c", code], cwd=tmp_path, env=settings)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "sqnr.png").read_bytes()[:4] == b"\x89PNG"
