"""Test the conformance kit against exact rational arithmetic, and the commands that handle it."""

import itertools
import json
import math
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from gmpy2 import mpq as Fraction

from megatron.fake_quant import FORMATS, get_format
from megatron.fake_quant.__main__ import main
from megatron.fake_quant.inspect import vector_kit
from megatron.fake_quant.inspect.vector_inputs import vector_inputs
from megatron.fake_quant.inspect.vector_kit import KIT, VARIANTS, first_difference, write
from tests.fake_quant import rational
from tests.file_systems import mount_or_skip


class Definition(NamedTuple):
    """Definition of a format in rational arithmetic."""

    #: function of a block and of the maximum of the values that share its outer scale
    convert: Callable[[rational.Block, Fraction], list[Fraction]]
    size: int  #: values of a block along the axis; 0 for a row
    height: int = 1  #: rows of a block; 0 for all rows
    group: int | None = None  #: values that share an outer scale; 0 for a row; None for the tensor


MAE, MSE = rational.four_over_six(abs), rational.four_over_six(rational.square)
DEFINITIONS = {
    "mxfp8": Definition(rational.mx(rational.E4M3), 32),
    "mxfp4": Definition(rational.mx(rational.E2M1), 32),
    "mxint4": Definition(rational.mx(rational.INT4), 32),
    "nvfp4": Definition(rational.nvfp4, 16),
    "nvfp4:2d": Definition(rational.nvfp4, 16, height=16),
    "nvfp4:outer-row": Definition(rational.nvfp4, 16, group=0),
    "nvfp4:outer-1x64": Definition(rational.nvfp4, 16, group=64),
    "nvfp4:outer-1x128": Definition(rational.nvfp4, 16, group=128),
    "nvfp4:4over6-mae": Definition(MAE, 16),
    "nvfp4:4over6-mse": Definition(MSE, 16),
    "nvfp4:2d:4over6-mae": Definition(MAE, 16, height=16),
    "nvint4": Definition(rational.nvint4, 16),
    "amdfp4": Definition(rational.divided(rational.UE5M3, outer=False), 16),
    "nv:e2m1:b16:e6m2": Definition(rational.divided(rational.E6M2, outer=True), 16),
    "fp8_block": Definition(rational.fp8_float32, 128),
    "fp8_rowwise": Definition(rational.fp8_float32, 0),
    "nv:e4m3:column:fp32": Definition(rational.fp8_float32, 1, height=0),
    "mx:e2m1:column:floor": Definition(rational.mx(rational.E2M1), 1, height=0),
    "nv:e2m1:column:e4m3": Definition(rational.nvfp4, 1, height=0),
    "mx:e4m3:tensor:floor": Definition(rational.mx(rational.E4M3), 0, height=0),
    "nv:e2m1:tensor:ue5m3:outer-none": Definition(
        rational.divided(rational.UE5M3, outer=False), 0, height=0
    ),
    "fp8_e4m3": Definition(rational.fp8_tensor, 32),
    "hifp8": Definition(rational.hifp8, 32),
    "hifp4": Definition(rational.hifp4, 64),
    "mx6": Definition(rational.mx6, 16),
    "nf4": Definition(rational.nf4, 64),
    "if4": Definition(rational.if4, 16),
    "mixfp4": Definition(rational.mixfp4, 16),
    "mxfp4_macro": Definition(rational.macro_block, 128),
}
#: Formats of the kit that neither `FORMATS` nor `VARIANTS` has.
SPELLED_OUT = tuple(
    name for name in ("mx:e3m4:b16:rceil", *DEFINITIONS) if name not in {*FORMATS, *VARIANTS}
)
#: Values of a vector that are compared for formats with square blocks.
MOST_SQUARE_VALUES = 1024
STORED = {"float32": rational.float32, "bfloat16": rational.bfloat16, "float16": rational.float16}
MANY = ("edges", "nan", "infinity", "zero_block", "zero_tensor", "subnormal_block", "saturation")


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kit") / "kit"
    assert main(["vectors", str(folder), "--formats", *SPELLED_OUT]) == 0
    return folder


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def arrays(folder, name):
    file = name.replace(":", ".")
    with np.load(folder / f"{file}.npz", allow_pickle=False) as content:
        return {key: content[key] for key in content.files}


def largest(x):
    """Return the largest finite magnitude of a matrix as a fraction."""
    finite = np.abs(x[np.isfinite(x)])
    return Fraction(float(finite.max())) if finite.size else Fraction(0)


def expected(x, definition, *, of_tensor, round_result):
    """Return the values of a matrix by a definition; blocks run along the last axis."""
    convert, size, height, group = definition
    size, height, values = size or x.shape[1], height or len(x), np.empty_like(x)
    for top, start in itertools.product(range(0, len(x), height), range(0, x.shape[1], size)):
        of_group = of_tensor
        if group is not None:
            first = start // group * group if group else 0
            of_group = largest(x[top, first : first + (group or x.shape[1])])
        place = slice(top, top + height), slice(start, start + size)
        block = np.zeros((height, size), x.dtype)
        rows, columns = x[place].shape
        block[:rows, :columns] = x[place]
        result = _values_of(block.ravel().tolist(), convert, of_group)
        numbers = [_number(value, round_result) for value in result]
        values[place] = np.reshape(numbers, block.shape)[:rows, :columns]
    return values


def _values_of(block, convert, of_group):
    """Return the values of a block as fractions; None stands for NaN."""
    if convert in (rational.hifp8, rational.fp8_tensor):
        return [_one_value(convert, x, of_group) for x in block]
    if not all(map(math.isfinite, block)):
        return [None] * len(block)
    if not any(block):
        return [Fraction(0)] * len(block)
    return convert([Fraction(x) for x in block], of_group)


def _one_value(convert, x, of_tensor):
    """Return the number for `x` of a format without blocks: a NaN stays, and Inf saturates."""
    if math.isnan(x):
        return None
    exact = Fraction(x) if math.isfinite(x) else rational.INFINITE * (1 if x > 0 else -1)
    return convert([exact], of_tensor)[0]


def _number(value, round_result):
    if value is None:
        return math.nan
    value = round_result(value)
    if abs(value) == rational.INFINITE:
        return math.inf if value > 0 else -math.inf
    return float(value)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_values_equal_exact_rational_arithmetic(kit, name):
    definition = DEFINITIONS[name]
    content = arrays(kit, name)
    for vector, fields in manifest(kit)["formats"][name]["vectors"].items():
        x, values = content[f"{vector}.input"], content[f"{vector}.values"]
        if fields["axis"] == 0:
            x, values = x.T, values.T
        of_tensor = largest(x)
        if definition.height > 1:
            rows = max(definition.height, MOST_SQUARE_VALUES // x.shape[1])
            x, values = x[:rows], values[:rows]
        elif vector == "scale_ends" and definition.height == 1:
            # Every third row is enough for the slowest vector.
            x, values = x[::3], values[::3]
        round_result = STORED[fields["dtype"]]
        wanted = expected(x, definition, of_tensor=of_tensor, round_result=round_result)
        np.testing.assert_array_equal(values, wanted, err_msg=f"{name} {vector}")


def test_every_named_format_has_a_vector_for_each_rule(kit):
    formats = manifest(kit)["formats"]
    assert set(formats) == {*FORMATS, *VARIANTS, *SPELLED_OUT}
    for name, entry in formats.items():
        names = set(entry["vectors"])
        several = len(get_format(name).elements) > 1
        assert {*MANY, "odd_length", "first_axis", "bfloat16"} - {"edges"} <= names
        assert "edges" in names or (several and sum(n.startswith("edges_") for n in names) == 2)
        assert all(fields["rule"] for fields in entry["vectors"].values())
        if get_format(name).one_block:
            assert {"scale_edges_0", "scale_ends_0"} <= names
        elif get_format(name).block_size is not None:
            assert {"scale_edges", "scale_ends"} <= names
        assert "error_ties" in names or not (several or "4over6" in name)


@pytest.mark.parametrize(
    ("name", "never"),
    [
        ("mxfp8", 2),  # NaN of both signs
        ("mxfp4", 0),
        ("mxint8", 1),  # the code of -2
        ("hifp8", 3),  # NaN, and Inf of both signs
        ("nf4", 0),
        ("mx6", 1),  # the code of -2
        ("nvfp4", 0),
    ],
)
def test_every_code_that_rounding_produces_is_in_the_kit(kit, name, never):
    codes = np.unique(arrays(kit, name)["edges.codes"])
    assert len(codes) == 2 ** get_format(name).element.bits - never


def test_edges_have_ties_and_both_neighbors(kit):
    x = arrays(kit, "mxfp4")["edges.input"]
    for tie in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
        below, above = (np.nextafter(np.float32(tie), np.float32(end)) for end in (0, 9))
        assert {below, tie, above, -below, -tie, -above} <= set(x.ravel().tolist())


def test_json_has_the_bits_of_the_arrays(kit):
    text = json.loads((kit / "nvfp4.json").read_text())
    content = arrays(kit, "nvfp4")
    count = 0
    for vector, fields in text["vectors"].items():
        for part in ("input", "codes", "block_scales", "tensor_scale", "values"):
            array = content[f"{vector}.{part}"]
            assert fields[part]["type"] == array.dtype.name
            assert fields[part]["shape"] == list(array.shape)
            numbers = np.array([int(bits, 16) for bits in fields[part]["bits"].split()])
            stored = array.view(np.uint32 if array.dtype == np.float32 else np.uint8)
            np.testing.assert_array_equal(numbers, stored.ravel())
            count += 1
    assert count == 5 * len(text["vectors"])


def test_codes_and_scales_decode_to_the_values(kit):
    content = arrays(kit, "mxfp4")
    magnitudes = np.array([float(x) for x in rational.E2M1])
    numbers = np.concatenate([magnitudes, -magnitudes])
    codes, scales = content["scale_ends.codes"], content["scale_ends.block_scales"]
    values = numbers[codes] * 2.0 ** (scales.astype(float) - 127)
    np.testing.assert_array_equal(values.astype(np.float32), content["scale_ends.values"])


def test_two_runs_write_the_same_bytes(kit, tmp_path):
    again = tmp_path / "again"
    write(again, map(get_format, [*FORMATS, *VARIANTS, *SPELLED_OUT]))
    files = sorted(path.name for path in kit.iterdir())
    assert files == sorted(path.name for path in again.iterdir())
    assert all((kit / file).read_bytes() == (again / file).read_bytes() for file in files)


@pytest.fixture(scope="module")
def small_kit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kit") / "small"
    write(folder, map(get_format, ["mxfp4", "nvfp4:2d"]))
    return folder


@pytest.fixture
def small(small_kit, tmp_path):
    return Path(shutil.copytree(small_kit, tmp_path / "small"))


def test_check_agrees_with_the_code_that_wrote_the_kit(kit, capsys):
    assert main(["vectors", str(kit), "--check"]) == 0
    count = len({*FORMATS, *VARIANTS, *SPELLED_OUT})
    words = rf"compared \d+ vectors of {count} formats in .*: no difference\n"
    assert re.fullmatch(words, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("codes", r"codes\[1, 2\]: the kit has 0x\w\w, the installed code gives 0x\w\w; 1 of \d+"),
        ("block_scales", r"block_scales\[1, 0\]: the kit has 0x\w\w, the installed code gives"),
        ("values", r"values\[1, 2\] for the input .* \(0x\w{8}\): the kit has .* \(0x\w{8}\), the"),
    ],
)
def test_check_names_a_planted_difference(small, capsys, part, words):
    content = arrays(small, "mxfp4")
    array = content[f"edges.{part}"]
    where = (1, 2) if array.shape[1] > 2 else (1, 0)
    array[where] = array[where] + 1
    np.savez(small / "mxfp4.npz", **content)
    assert main(["vectors", str(small), "--check"]) == 1
    error = capsys.readouterr().err
    assert re.match(rf"\[ERROR\] mxfp4, vector edges: {words}", error), error
    assert error.count("\n") == 1


def test_check_names_a_file_with_another_sha256(small, capsys):
    text = small / "nvfp4.2d.json"
    text.write_text(text.read_text().replace("3f800000", "3f800001", 1))
    assert main(["vectors", str(small), "--check"]) == 1
    assert "nvfp4.2d.json: its SHA-256 is not the one in manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mxfp6_e2m3.npz", "mxfp8.rceil.json"])
def test_check_names_a_file_that_the_manifest_does_not_list(small, capsys, name):
    (small / name).write_bytes((small / "mxfp4.json").read_bytes())
    assert main(["vectors", str(small), "--check"]) == 1
    assert f"[ERROR] {name}: not in manifest.json; remove it, or" in capsys.readouterr().err


def test_check_compares_the_json_with_the_arrays(small, capsys):
    """A changed JSON file is found even if its SHA-256 in the manifest was changed, too."""
    text, content = small / "mxfp4.json", manifest(small)
    text.write_text(text.read_text().replace("3f800000", "3f800001", 1))
    content["formats"]["mxfp4"]["files"][text.name] = sha256(text.read_bytes()).hexdigest()
    (small / "manifest.json").write_text(json.dumps(content))
    assert main(["vectors", str(small), "--check"]) == 1
    assert "mxfp4.json: its content is not that of mxfp4.npz and" in capsys.readouterr().err


def changed_manifest(**changes):
    """Return a function that changes the entry of mxfp4 in the manifest of a kit."""

    def change(folder):
        content = manifest(folder)
        content["formats"]["mxfp4"] |= changes
        (folder / "manifest.json").write_text(json.dumps(content))

    return change


def drop_a_vector(folder):
    content = manifest(folder)
    del content["formats"]["mxfp4"]["vectors"]["edges"]
    (folder / "manifest.json").write_text(json.dumps(content))


def compress(folder):
    np.savez_compressed(folder / "mxfp4.npz", **{"edges.input": np.zeros(1 << 20, np.float32)})


def overlap(folder):
    """Write an archive in which two arrays have the same bytes, as in a zip bomb."""
    path = folder / "mxfp4.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("edges.input.npy", bytes(4096))
        archive.infolist()[0].header_offset = 0
        archive.filelist.append(archive.infolist()[0])


@pytest.mark.parametrize(
    ("damage", "status", "words"),
    [
        (compress, 2, "its arrays are compressed; those of a kit are not"),
        (overlap, 2, "its arrays are larger than the file"),
        (drop_a_vector, 1, "mxfp4.npz: the vector edges is not in manifest.json"),
        (changed_manifest(vectors={}), 2, "a kit without vectors, or one that was not completed"),
        (
            changed_manifest(vectors={"edges": {"dtype": [1], "axis": 1}}),
            2,
            "its formats are missing or invalid",
        ),
        (
            changed_manifest(vectors={"edges": {"dtype": "float32", "axis": 1, "shape": [1]}}),
            1,
            "and manifest.json states a different one",
        ),
        (
            lambda folder: (folder / "manifest.json").write_text(
                json.dumps({"kit": KIT, "version": 1, "formats": {}})
            ),
            2,
            "a kit without vectors",
        ),
    ],
)
def test_check_refuses_a_damaged_kit(small, capsys, damage, status, words):
    damage(small)
    assert main(["vectors", str(small), "--check"]) == status
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("[ERROR] ")
    assert error.count("\n") == 1


def test_an_interrupted_kit_is_replaced(tmp_path, monkeypatch):
    def interrupt(fmt):
        if fmt.name == "mxfp4":
            raise KeyboardInterrupt
        return vector_inputs(fmt)

    monkeypatch.setattr(vector_kit, "vector_inputs", interrupt)
    formats = [get_format("hifp8"), get_format("mxfp4")]
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "kit", formats)
    with pytest.raises(ValueError, match="a kit without vectors, or one that was not completed"):
        first_difference(tmp_path / "kit")
    monkeypatch.undo()
    write(tmp_path / "kit", formats)
    assert first_difference(tmp_path / "kit")[0] is None


def test_a_kit_is_replaced_and_other_files_stay(small):
    (small / "notes.txt").write_text("mine")
    write(small, [get_format("hifp8")])
    files = sorted(path.name for path in small.iterdir())
    assert files == ["hifp8.json", "hifp8.npz", "manifest.json", "notes.txt"]
    assert first_difference(small)[0] is None


def test_folders_that_are_no_kit_are_refused(tmp_path, capsys):
    other, file = tmp_path / "other", tmp_path / "file"
    other.mkdir()
    (other / "data").touch()
    file.touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "manifest.json").write_text(json.dumps({"kit": KIT, "version": 2}))
    for arguments, words in (
        ((other,), "is not empty and has no conformance kit; name a folder that does not exist"),
        ((file,), "is a file; name a folder"),
        ((tmp_path / "no" / "kit",), "make it first"),
        ((other, "--check"), "has no conformance kit, because manifest.json is missing; write one"),
        ((tmp_path / "broken", "--check"), "not JSON"),
        ((tmp_path / "newer", "--check"), "a kit of version 2, but this code reads version 1"),
        ((tmp_path / "kit", "--only", "mxfp4:sr"), "rounds at random, so it has no fixed vectors"),
        ((tmp_path / "kit", "--only", "mxfp9"), "unknown format 'mxfp9'"),
    ):
        assert main(["vectors", *map(str, arguments)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("[ERROR] ")
        assert printed.err.count("\n") == 1
        assert words in printed.err
    assert [path.name for path in other.iterdir()] == ["data"]
    assert not (tmp_path / "kit").exists()


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["vectors", "--help"])
    assert ended.value.code == 0
    assert "example: python -m megatron.fake_quant vectors kit --formats" in capsys.readouterr().out


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path, capsys):
    """The next call replaces the incomplete kit, and until then, `--check` refuses it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount_or_skip(disk, "size=64k")
    kit = disk / "kit"
    try:
        assert main(["vectors", str(kit), "--only", "mxfp4"]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"[ERROR] cannot write the kit to {kit}: No space left on device")
        assert "run the same command again, which replaces it" in message
        assert main(["vectors", str(kit), "--check"]) == 2
        assert "one that was not completed; write it anew" in capsys.readouterr().err
        subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        assert main(["vectors", str(kit), "--only", "mxfp4"]) == 0
        assert main(["vectors", str(kit), "--check"]) == 0
    finally:
        subprocess.run(["umount", disk], check=True)
