"""Define the on-disk format of collected tensors: file names, metadata and indexes.

Each tensor has one `.pt` file, `{"tensor": Tensor, "metadata": {...}}`, which plain torch loads
with `weights_only=True`. The folder also contains a run card, `run_<run_id>.json`, and one
append-only index per rank, `index_<run_id>_rank<NN>.jsonl`. An index has one line per record, and
one line with the key `event` for anything else, such as a limit that was reached. The writer
(`megatron.collection`) and the readers (`megatron.analysis`) both import this module, and neither
imports the other. This module needs only the standard library.
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

#: Tensor names of the operands stored as codes and scales, by operation. A name consists of
#: the GEMM, the operand and the suffix `_codes`. The names are in the order of
#: `megatron.fake_quant.matmul.gemm_formats.SLOTS`.
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
#: Names of tensors with one value per query-key pair, which are collected only on request.
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
#: Names of tensors stored only with the first micro-batch of an iteration, because their values are
#: the same in all micro-batches. (With stochastic rounding, the codes differ and are stored with
#: every micro-batch.)
OF_ITERATION = ("weight", "fprop_weight_codes", "dgrad_weight_codes")
#: Fields of a record that older files may lack; null if missing.
ADDED_LATER = {"slice", "codes", "amax", "accumulate", "implementation"}
COMPONENTS = {"attention": "FA", "linear": "linear"}  #: file-name component of each layer type
TIMESTAMP = "%Y%m%d_%H%M%S"  #: `strftime` format of the time in file names
PARTIAL_SUFFIX = ".partial"  #: suffix of a file that is still being written; readers skip it

LINE_LIMIT = 1 << 18  #: maximum length of an index line, in bytes; a typical line has 900
LINES_LIMIT = 1_000_000  #: maximum number of lines in an index file (one rank of one run)
INDEX_LIMIT = 4 << 30  #: maximum size of an index file, in bytes

_BATCH = 1 << 20  #: number of bytes read from an index at a time


def operation_of(tensor_name: str) -> str:
    """Return the operation in which this tensor is collected: "forward" or "backward"."""
    if tensor_name.endswith("_codes"):
        return "forward" if "fprop_" in tensor_name else "backward"
    return "backward" if tensor_name.startswith("grad_") else "forward"


#: Form of a tensor file's name, for error messages.
FILENAME_FORM = (
    "{timestamp}_{counter}_{layer}_L{n}_{operation}_{phase}_{component}_{type}_{tensor}.pt"
)
_NAMES = "|".join(sorted({name for names in TENSOR_NAMES.values() for name in names}))
_FILENAME = re.compile(
    r"(?P<timestamp>\d{8}_\d{6})_(?P<counter>\d{4,})_(?P<layer_type>attention|linear)"
    r"_L(?P<layer_idx>-?\d+)_(?P<operation>forward|backward)_(?P<phase>pre|post)"
    r"_(?P<component>FA|linear)_(?P<quant_type>.+?)(?:_rank(?P<rank>\d{2,}))?"
    rf"_(?P<tensor_name>{_NAMES})\.pt"
)


def safe_name(quant_type: str) -> str:
    """Return a quantization type in a form that is safe in file names.

    For example, the colons in `mx:e3m4:b16:rceil` become hyphens.
    """
    return re.sub(r"[^\w.+-]", "-", quant_type)


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """The metadata of one collected tensor.

    Every field MUST be present, and fields typed `| None` MAY be null. The fields in `ADDED_LATER`
    may also be missing, as in older files, which means null.
    """

    run_id: str
    iteration: int  #: iteration number as in the log, counted from 1
    #: number of the micro-batch in the iteration, counted from 0; the same in its forward and
    #: backward pass
    micro_batch: int
    #: position of the micro-batch's first sequence in the run's sample order
    sample_idx: int | None
    counter: int  #: number of the tensor among those written by this rank, counted from 1
    timestamp: str  #: local time, YYYYmmdd_HHMMSS; a later time if the file name was already used
    layer_type: str  #: attention | linear
    layer_idx: int  #: layer number over all pipeline stages, from 0; -1 outside transformer layers
    module: str  #: dotted name in the model, with the global layer number
    operation: str  #: forward | backward
    phase: str  #: pre (enters the matmul) | post (leaves it)
    component: str  #: layer type as in the file name: FA | linear
    tensor_name: str  #: one of the names in TENSOR_NAMES
    quant_type: str  #: quantization type of the run, e.g. FA_linear_mxfp8
    #: number format to which this operand is quantized; null if it is not quantized
    format: str | None
    shape: list[int]  #: shape of this file's tensor
    dtype: str  #: name of the torch dtype, e.g. "bfloat16"
    #: one letter per dimension, with the group that shards it in brackets, e.g. "s b h[tp]".
    #: "s[cp:zigzag]" means the chunks cp and 2 * cp_size - 1 - cp out of 2 * cp_size chunks of the
    #: sequence. "g[tp:2]" means that two consecutive ranks hold the same values or, if
    #: "| partial[tp:2]" follows, that each of them holds a partial sum
    dims: str
    global_shape: list[int]  #: shape of the whole tensor over all shards, even for a slice
    rank: dict[str, int]  #: rank in world, tp, pp, dp, cp, ep and etp, and the sizes (tp_size, ...)
    recomputed: bool  #: True if the tensor comes from a recomputed forward pass
    wall_time: float  #: time in seconds since the epoch
    #: null if the file holds this rank's whole tensor; otherwise the shape of that tensor (`of`),
    #: and the first index (`start`) and the step (`step`) of the stored part in each dimension
    slice: dict[str, list[int]] | None = None
    #: for a `..._codes` tensor: `shape`, `dtype` and `axis` of the matmul's operand (with tokens as
    #: one axis, after a Hadamard transform), and its `rounding`. The file then holds `scales` in
    #: addition to `tensor`; see `megatron.fake_quant.packing`
    codes: dict[str, Any] | None = None
    #: largest magnitudes from which the tensor-wide scales of the matmul's operands were computed,
    #: by operation and slot, such as `linear_fprop_a`. A magnitude that became known only after the
    #: tensor was saved is missing. Null if these scales follow from the operands themselves
    amax: dict[str, float] | None = None
    #: names of the accumulators that summed the GEMMs of the tensor's module, by operation and
    #: GEMM, such as `linear_fprop`. Null if torch's matmul summed all of them
    accumulate: dict[str, str] | None = None
    #: class of Transformer Engine that computed the module, such as
    #: `transformer_engine.LayerNormLinear`, whose own formats are not recorded. Null for
    #: megatron-core's local layers
    implementation: str | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def filename(self) -> str:
        """Name of the tensor's file, which includes the rank if there is more than one rank."""
        rank = f"rank{self.rank['world']:02d}_" if self.rank["world_size"] > 1 else ""
        return (
            f"{self.timestamp}_{self.counter:04d}_{self.layer_type}_L{self.layer_idx}"
            f"_{self.operation}_{self.phase}_{self.component}_{safe_name(self.quant_type)}"
            f"_{rank}{self.tensor_name}.pt"
        )

    def to_metadata(self) -> dict[str, Any]:
        """Return the `metadata` of the `.pt` file, in types that `weights_only=True` accepts."""
        return asdict(self)

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> "TensorRecord":
        """Build a record from the metadata of a file or an index line; ignore unknown keys.

        Raises:
            ValueError: if the schema version differs, or a field is missing.
        """
        version = metadata.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"schema version {version!r}, but this reader understands {SCHEMA_VERSION}"
            )
        names = {field.name for field in fields(cls)}
        if missing := sorted(names - metadata.keys() - ADDED_LATER):
            raise ValueError(f"the record lacks {', '.join(missing)}")
        return cls(**{name: metadata[name] for name in names & metadata.keys()})


def parse_filename(name: str) -> dict[str, Any] | None:
    """Return the fields in a tensor file's name, or None if the name has another form.

    `layer_idx`, `counter` and `rank` are ints; `rank` is 0 if the name has none.
    """
    match = _FILENAME.fullmatch(name)
    if match is None:
        return None
    parsed: dict[str, Any] = match.groupdict()
    for key in ("layer_idx", "counter", "rank"):
        parsed[key] = int(parsed[key] or 0)
    return parsed


def run_card_name(run_id: str) -> str:
    """Return the file name of a run card, which holds arguments, versions, topology and seeds."""
    return f"run_{run_id}.json"


def index_name(run_id: str, rank: int) -> str:
    """Return the file name of one rank's index.

    Each index has a single writer, so its lines never interleave.
    """
    return f"index_{run_id}_rank{rank:02d}.jsonl"


def read_index(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of one index file; skip a last line that a crash has truncated.

    Raises:
        ValueError: if any other line is not a JSON object.
    """
    return (line for line in chain.from_iterable(read_lines(path)) if "event" not in line)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of one index file, such as `{"event": "limited", "why": ...}`.

    The other events are `trained`, `dropped`, `failed`, `switched`, `kept`, `let_go` and
    `left_out`. Readers ignore unknown events.

    Raises:
        ValueError: as in `read_index`.
    """
    return [line for line in chain.from_iterable(read_lines(path)) if "event" in line]


def read_lines(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the parsed lines of one index file, both records and events, in batches.

    Calling the JSON decoder once for many lines takes two thirds of the time of one call per line.

    Raises:
        ValueError: as in `read_index`.
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
                yield parsed_lines(path, lines, first, last=not following)
            first += len(lines)
            content = following


def _check_size(path: Path) -> None:
    """Raise UnusableFileError if an index has more lines or bytes than any run writes."""
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
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for at, name in enumerate(names) if name in names[:at])
        raise ValueError(f"the key {twin[:80]!a} occurs twice")
    return content


def parsed_lines(path: Path, lines: list[bytes], first: int, *, last: bool) -> list[dict[str, Any]]:
    """Return the JSON objects in a batch of lines of an index.

    Args:
        path: path of the index, for error messages.
        lines: lines to parse.
        first: number of the first line in the file.
        last: whether this is the last batch; if so, an invalid last line is skipped.
    """
    with contextlib.suppress(ValueError, RecursionError):
        together: list[dict[str, Any]] = json.loads(
            b"[%b]" % b",".join(lines), object_pairs_hook=_unique
        )
        if len(together) == len(lines) and set(map(type, together)) == {dict}:
            return together
    objects: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=first):
        try:
            value = json.loads(line, object_pairs_hook=_unique)
            if not isinstance(value, dict):
                raise ValueError(f"a JSON {type(value).__name__}")
        except RecursionError:
            raise ValueError(f"{_line(path, number)}: nested too deeply to be read") from None
        except ValueError as error:
            if last and number == first + len(lines) - 1:
                break
            raise ValueError(f"{_line(path, number)}: not a JSON object ({error})") from None
        objects.append(value)
    return objects
