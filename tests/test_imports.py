"""Imports run one way: tensor_record <- fake_quant <- collection <- core <- training.

`analysis` stands on tensor_record and fake_quant alone. `overlay` stands on core and never on
training, whose place the package of another source tree takes.
"""

import ast
import sys
from pathlib import Path

import pytest

from tests.subprocesses import REPO, run

#: imports from this project that each part may use
ALLOWED = {
    "megatron.console": set(),
    "megatron.bounded_files": set(),
    "megatron.forks": set(),
    "megatron.optional_packages": set(),
    "megatron.tensor_record": {"megatron.bounded_files"},
    "megatron.cpu_matmul": set(),
    "megatron.cpu_backend": {"megatron.cpu_matmul"},
    "megatron.fake_quant": {
        "megatron.fake_quant",
        "megatron.cpu_matmul",
        "megatron.tensor_record",
        "megatron.bounded_files",
        "megatron.console",
    },
    "megatron.collection": {
        "megatron.collection",
        "megatron.fake_quant",
        "megatron.tensor_record",
        "megatron.bounded_files",
        "megatron.optional_packages",
    },
    "megatron.core": {
        "megatron.core",
        "megatron.collection",
        "megatron.fake_quant",
        "megatron.tensor_record",
        "megatron.bounded_files",
    },
    "megatron.training": {
        "megatron.training",
        "megatron.core",
        "megatron.collection",
        "megatron.fake_quant",
        "megatron.tensor_record",
        "megatron.cpu_backend",
        "megatron.bounded_files",
        "megatron.optional_packages",
        "megatron.console",
    },
    "megatron.overlay": {
        "megatron.overlay",
        "megatron.core",
        "megatron.collection",
        "megatron.fake_quant",
        "megatron.cpu_backend",
        "megatron.console",
    },
    "megatron.analysis": {
        "megatron.analysis",
        "megatron.cpu_matmul",
        "megatron.fake_quant",
        "megatron.tensor_record",
        "megatron.bounded_files",
        "megatron.optional_packages",
        "megatron.console",
    },
}
#: Third-party packages that a part may import, besides the standard library. If several names fit a
#: module, the longest one counts.
ONLY = {
    "megatron.bounded_files": set(),
    "megatron.console": set(),
    "megatron.forks": set(),
    "megatron.optional_packages": set(),
    "megatron.tensor_record": set(),
    "megatron.cpu_matmul": {"torch"},
    "megatron.fake_quant": {"torch"},
    "megatron.fake_quant.recipe.yaml_nodes": {"yaml"},
    "megatron.fake_quant.fused": {"torch", "numpy", "numba", "triton"},
    "megatron.fake_quant.inspect.value_grids": {"torch", "numpy", "matplotlib"},
    "megatron.fake_quant.inspect.vector_kit": {"torch", "numpy"},
    "megatron.collection": {"torch", "numpy"},
    "megatron.collection.statistics.parquet_files": {"pyarrow"},
}


def modules() -> list[Path]:
    return sorted((REPO / "megatron").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Return every module that a file imports, even inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            found.add(node.module)
            if node.module == "megatron":
                found |= {f"megatron.{alias.name}" for alias in node.names}
    return found


def test_a_module_found_by_its_name_alone_is_one():
    """Scripts import modules from their folder; two files with one name would hide each other."""
    found: dict[str, Path] = {}
    for folder in ("benchmarks", "script", "script/collect", "script/data", "script/visualization"):
        for path in map(Path.resolve, (REPO / folder).glob("*.py")):  # a link counts as its target
            assert found.get(path.stem, path) == path, f"{path}, {found[path.stem]}: same name"
            assert path.stem not in sys.stdlib_module_names, f"{path} hides the standard library's"
            found[path.stem] = path


def part(module: str) -> str:
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("path", modules(), ids=lambda p: p.relative_to(REPO).as_posix())
def test_imports_run_one_way(path):
    name = path.relative_to(REPO).with_suffix("").as_posix().replace("/", ".")
    here = part(name.removesuffix(".__init__"))
    if here == "megatron":
        return
    for module in imported(path):
        if module.split(".")[0] == "megatron" and module != "megatron":
            assert part(module) in ALLOWED[here], f"{name} imports {module}"
        elif module != "megatron" and (limits := [p for p in ONLY if f"{name}.".startswith(p)]):
            root = module.split(".")[0]
            allowed = ONLY[max(limits, key=len)] | sys.stdlib_module_names
            assert root in allowed, f"{name} imports {module}"


def test_formats_need_only_torch_until_they_are_large():
    """Importing numba takes half a second, and matplotlib takes longer."""
    code = (
        "import sys, torch\n"
        "from megatron.fake_quant import fake_quantize\n"
        "fake_quantize(torch.ones(32), 'mxfp8')\n"
        "print([m for m in ('numba', 'triton', 'matplotlib') if m in sys.modules])\n"
    )
    result = run([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_a_dump_is_read_without_the_engine():
    """Importing core or torch's compiler takes seconds, but reading a dump needs neither."""
    code = (
        "import sys, megatron.analysis.quick, megatron.analysis.drawing\n"
        "import megatron.analysis.study, megatron.analysis.verification\n"
        "engine = ('megatron.core', 'megatron.collection', 'megatron.training', 'torch._dynamo')\n"
        "print([m for m in sys.modules if m.startswith(engine)])\n"
    )
    result = run([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_a_command_handles_an_interruption_before_it_imports_packages():
    """Importing pandas takes a quarter of a second; Ctrl-C then must not print a traceback."""
    code = (
        "import sys, megatron.analysis.__main__\n"
        "print([m for m in ('numpy', 'pandas', 'torch', 'matplotlib') if m in sys.modules])\n"
    )
    result = run([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_what_tests_share_is_not_in_test_files():
    """Otherwise a change of one test file would change the meaning of another."""
    for path in sorted((REPO / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level or node.module.startswith("tests")):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                modules = {name for name in names if (path.parent / f"{name}.py").exists()}
                found = [name for name in modules | set(names[:-1]) if name.startswith("test_")]
                assert not found, f"{path} imports {found[0]}"
