"""The on-disk contract: what a collected tensor is called and what stands beside it. Standard
library only.

One `.pt` file a tensor, `{"tensor": Tensor, "metadata": {...}}`, readable by stock torch with
`weights_only=True`; beside the tensors a run card `run_<run_id>.json` and one append-only index a
rank, `index_<run_id>_rank<NN>.jsonl`, a line a record, and lines with an `event` where a rank did
not write everything. Writer (`megatron.core.tensor_saver`) and
readers (`megatron.analysis`) both import this file and nothing of each other.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.bounded_files import UnusableFileError, open_regular, printable

SCHEMA_VERSION = 1

#: What each matmul of an operation multiplied, as codes and scales: GEMM and operand, in the order
#: of `megatron.fake_quant.gemm.SLOTS`.
CODES: dict[str, tuple[str, ...]] = {
    "linear": (
        "fprop_input_codes",
        "fprop_weight_codes",
        "dgrad_grad_output_codes",
        "dgrad_weight_codes",
        "wgrad_grad_output_codes",
        "wgrad_input_codes",
    ),
    "qk": (
        "qk_fprop_query_codes",
        "qk_fprop_key_codes",
        "qk_grad_query_grad_scores_codes",
        "qk_grad_query_key_codes",
        "qk_grad_key_grad_scores_codes",
        "qk_grad_key_query_codes",
    ),
    "pv": (
        "pv_fprop_probs_codes",
        "pv_fprop_value_codes",
        "pv_grad_probs_grad_output_codes",
        "pv_grad_probs_value_codes",
        "pv_grad_value_grad_output_codes",
        "pv_grad_value_probs_codes",
    ),
}
#: Written on request only: a value for each pair of a query and a key.
PAIRWISE = ("attention_scores", "attention_probs")
ON_REQUEST = (*PAIRWISE, *(name for names in CODES.values() for name in names))
#: Tensor names by layer type.
TENSOR_NAMES: dict[str, tuple[str, ...]] = {
    "attention": (
        "query",
        "key",
        "value",
        "output",
        *PAIRWISE,
        "grad_output",
        "grad_query",
        "grad_key",
        "grad_value",
        *CODES["qk"],
        *CODES["pv"],
    ),
    "linear": (
        "input",
        "weight",
        "output",
        "grad_output",
        "grad_input",
        "grad_weight",
        *CODES["linear"],
    ),
}
#: Stored with the first micro-batch of an iteration only, because they are the same in all of them;
#: codes where nothing is rounded stochastically.
OF_ITERATION = ("weight", "fprop_weight_codes", "dgrad_weight_codes")
COMPONENTS = {"attention": "FA", "linear": "linear"}  #: file-name component of each layer type
TIMESTAMP = "%Y%m%d_%H%M%S"  #: of file names
PARTIAL_SUFFIX = ".partial"  #: ends the name of a file that is still being written; readers skip it

LINE_LIMIT = 1 << 18  #: longest line of an index in bytes; a record takes some 900
LINES_LIMIT = 1_000_000  #: most lines of an index, which belongs to one rank of one run
INDEX_LIMIT = 4 << 30  #: largest index in bytes

_BATCH = 1 << 20  #: bytes of an index that are read at a time


def operation_of(tensor_name: str) -> str:
    """The pass in which a tensor of that name arises: forward or backward."""
    if tensor_name.endswith("_codes"):
        return "forward" if "fprop_" in tensor_name else "backward"
    return "backward" if tensor_name.startswith("grad_") else "forward"


_NAMES = "|".join(sorted({name for names in TENSOR_NAMES.values() for name in names}))
_FILENAME = re.compile(
    r"(?P<timestamp>\d{8}_\d{6})_(?P<counter>\d{4,})_(?P<layer_type>attention|linear)"
    r"_L(?P<layer_idx>-?\d+)_(?P<operation>forward|backward)_(?P<phase>pre|post)"
    r"_(?P<component>FA|linear)_(?P<quant_type>.+?)(?:_rank(?P<rank>\d{2,}))?"
    rf"_(?P<tensor_name>{_NAMES})\.pt"
)


def safe_name(quant_type: str) -> str:
    """A quantization type as it stands in file and folder names: `mx:e3m4:b16:rceil` has colons."""
    return re.sub(r"[^\w.+-]", "-", quant_type)


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """What is known of one collected tensor. MUST: every field is present; those typed `| None` MAY
    be null. `slice` and `codes` came later and may be missing, which means null.
    """

    run_id: str
    iteration: int  #: as the log prints it: the first is 1
    micro_batch: int  #: of the forward pass, also for a backward tensor; the first is 0
    sample_idx: (
        int | None
    )  #: position in the run's sample order of the micro-batch's first sequence
    counter: int  #: of this rank in this run; the first is 1
    timestamp: str  #: local time of collecting, YYYYmmdd_HHMMSS; later if that name was taken
    layer_type: str  #: attention | linear
    layer_idx: (
        int  #: global over pipeline stages, the first is 0; -1 outside of a transformer layer
    )
    module: str  #: dotted name in the model, with the global layer number
    operation: str  #: forward | backward
    phase: str  #: pre (enters the matmul) | post (leaves it)
    component: str  #: FA | linear
    tensor_name: str  #: see TENSOR_NAMES
    quant_type: str  #: of the run, e.g. FA_linear_mxfp8
    format: str | None  #: the number format this operand is quantized to; null if it is not
    shape: list[int]  #: of this file's tensor
    dtype: str  #: e.g. "bfloat16"
    #: a letter a dimension and the group that shards it, e.g. "s b h[tp]". "s[cp:zigzag]": of the
    #: 2 * cp_size chunks of the sequence this file has those numbered cp and 2 * cp_size - 1 - cp.
    #: "g[tp:2]": two ranks, one after the other, have the same, or with "| partial[tp:2]" parts of
    #: its sum
    dims: str
    global_shape: list[int]  #: of the logical tensor over all shards, also where this is a slice
    rank: dict[str, int]  #: world, tp, pp, dp, cp, ep, etp and their sizes (tp_size, ...)
    recomputed: bool  #: from a forward pass that activation recomputation ran again
    wall_time: float  #: seconds since the epoch
    #: null: the file has all of this rank's tensor; else it is a part of one of shape `of`, from
    #: the indices `start`, every `step`-th, a number a dimension each
    slice: dict[str, list[int]] | None = None
    #: of a `..._codes` tensor: the `shape`, `dtype` and `axis` of the operand that it stands for,
    #: as the matmul had it (tokens are one axis, a Hadamard transform is done), and its `rounding`.
    #: The file then has `scales` beside `tensor`; see `megatron.fake_quant.packing`
    codes: dict[str, Any] | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def filename(self) -> str:
        """The file's name; the rank stands in it only where there is more than one."""
        rank = f"rank{self.rank['world']:02d}_" if self.rank["world_size"] > 1 else ""
        return (
            f"{self.timestamp}_{self.counter:04d}_{self.layer_type}_L{self.layer_idx}"
            f"_{self.operation}_{self.phase}_{self.component}_{safe_name(self.quant_type)}"
            f"_{rank}{self.tensor_name}.pt"
        )

    def to_metadata(self) -> dict[str, Any]:
        """The `metadata` of the `.pt` file: plain values only, so that `weights_only=True` reads
        it.
        """
        return asdict(self)

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> "TensorRecord":
        """Read the metadata of a file or an index line; keys that this version does not know are
        left out.

        Raises:
            ValueError: another schema version, or a field is missing.
        """
        found = metadata.get("schema_version")
        if found != SCHEMA_VERSION:
            raise ValueError(
                f"schema version {found!r}, but this reader understands {SCHEMA_VERSION}"
            )
        names = {field.name for field in fields(cls)}
        if missing := sorted(names - metadata.keys() - {"slice", "codes"}):
            raise ValueError(f"the record lacks {', '.join(missing)}")
        return cls(**{name: metadata[name] for name in names & metadata.keys()})


def parse_filename(name: str) -> dict[str, Any] | None:
    """What a tensor file's name says, for files without metadata; None if it is no such name.

    `layer_idx` and `counter` are ints; `rank` is an int, 0 where the name has none.
    """
    match = _FILENAME.fullmatch(name)
    if match is None:
        return None
    found: dict[str, Any] = match.groupdict()
    for key in ("layer_idx", "counter", "rank"):
        found[key] = int(found[key] or 0)
    return found


def run_card_name(run_id: str) -> str:
    """File name of the run card: arguments, versions, git, topology, seeds."""
    return f"run_{run_id}.json"


def index_name(run_id: str, rank: int) -> str:
    """File name of one rank's index: one writer a file, so that lines never interleave."""
    return f"index_{run_id}_rank{rank:02d}.jsonl"


def read_index(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one index; a last line cut short by a crash is skipped, any other bad line is
    an error.

    Raises:
        ValueError: a line that is no JSON object although more lines follow it.
    """
    return (line for line in chain.from_iterable(read_lines(path)) if "event" not in line)


def read_events(path: Path) -> list[dict[str, Any]]:
    """What one index says besides its records: `{"event": "limited" | "failed" | "dropped" | ...,
    "why": ...}`. Readers pass over events that they do not know.

    Raises:
        ValueError: as of `read_index`.
    """
    return [line for line in chain.from_iterable(read_lines(path)) if "event" in line]


def read_lines(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Every line of one index, record or event, in batches: one call of the JSON decoder for many
    lines takes two thirds of the time of one each.

    Raises:
        ValueError: as of `read_index`.
    """
    _check_size(path)
    first = 1
    rest = b""
    with open_regular(path) as file:
        content = file.read(_BATCH)
        while content:
            following = file.read(_BATCH)
            lines = (rest + content).split(b"\n")
            rest = lines.pop() if following else b""
            if not following and not lines[-1]:
                lines.pop()
            for number, line in enumerate([*lines, rest], start=first):
                if len(line) > LINE_LIMIT:
                    raise ValueError(f"{_line(path, number)}: too long (over {LINE_LIMIT} bytes)")
            if lines:
                yield _parsed(path, lines, first, last=not following)
            first += len(lines)
            content = following


def _check_size(path: Path) -> None:
    """Refuse an index with more lines or bytes than any run writes, before parsing it."""
    lines = total = 0
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > INDEX_LIMIT:
            raise UnusableFileError(path, f"an index of more than {INDEX_LIMIT >> 30} GiB")
        while content := file.read(_BATCH):
            lines += content.count(b"\n")
            total += len(content)
            if lines > LINES_LIMIT:
                raise UnusableFileError(path, f"an index of more than {LINES_LIMIT} lines")
            if total > INDEX_LIMIT:
                raise UnusableFileError(path, f"an index of more than {INDEX_LIMIT >> 30} GiB")


def _line(path: Path, number: int) -> str:
    return f"{printable(path, limit=1000)}, line {number}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for at, name in enumerate(names) if name in names[:at])
        raise ValueError(f"the key {twin[:80]!a} occurs twice")
    return found


def _parsed(path: Path, lines: list[bytes], first: int, *, last: bool) -> list[dict[str, Any]]:
    """The objects of some lines; `first` is the number of the first, `last`: no more follow."""
    with contextlib.suppress(ValueError, RecursionError):
        together: list[dict[str, Any]] = json.loads(
            b"[%b]" % b",".join(lines), object_pairs_hook=_unique
        )
        if len(together) == len(lines) and set(map(type, together)) == {dict}:
            return together
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=first):
        try:
            each = json.loads(line, object_pairs_hook=_unique)
            if not isinstance(each, dict):
                raise ValueError(f"a JSON {type(each).__name__}")
        except RecursionError:
            raise ValueError(f"{_line(path, number)}: nested too deeply to be read") from None
        except ValueError as error:
            if last and number == first + len(lines) - 1:
                break
            raise ValueError(f"{_line(path, number)}: not a JSON object ({error})") from None
        found.append(each)
    return found
