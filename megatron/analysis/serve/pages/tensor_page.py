"""Build the page of one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from megatron.analysis.plots.style import color_of
from megatron.analysis.serve import charts
from megatron.analysis.serve.address import (
    DIFFERENCE,
    IMAGES,
    MAP,
    VALUES,
    Address,
)
from megatron.analysis.serve.catalog import Catalog
from megatron.analysis.serve.contents import NotShownError
from megatron.analysis.serve.explorer import Explorer
from megatron.analysis.serve.pages.map_page import run_name
from megatron.analysis.serve.pages.parts import (
    MOST_OPTIONS,
    Part,
    bare_panel,
    dot,
    footer,
    graph,
    html,
    link,
    message,
    not_shown,
    panel,
    select,
    table,
)
from megatron.analysis.serve.panels import PANELS, Subject
from megatron.analysis.serve.statistics import BY_NAME
from megatron.analysis.serve.statistics import VALUES as STATISTICS_OF_VALUES

TITLES = {
    "histogram": "Values by magnitude",
    "errors": "Error by magnitude",
    "image": "Tensor",
    "channels": "Channels",
    "tokens": "Tokens",
    "scales": "Block scales",
    "codes": "Codes",
    "attention": "Attention",
}
_IMAGE_NAMES = {
    "values": "values",
    "magnitudes": "magnitudes (log)",
    "errors": "error in the format",
    "difference": "second tensor minus this one",
}
#: Fields of a record that are shown, with their labels.
_FIELDS = {
    "module": "module",
    "tensor_name": "tensor",
    "operation": "pass",
    "phase": "phase",
    "quant_type": "type of the run",
    "format": "format in the run",
    "dtype": "dtype",
    "dims": "dims",
    "timestamp": "written",
}
#: Numbers of a format in the table: name, heading, and True if the number is a share.
_ERRORS = (
    ("sqnr_db", "SQNR (dB)", False),
    ("gain", "gain", True),
    ("relative_bias", "bias", True),
    ("underflow", "underflow", True),
    ("saturated", "clipped", True),
    ("headroom", "headroom (binades)", False),
)


def page(
    explorer: Explorer, address: Address, subject: Subject | None, data: dict[str, dict[str, Any]]
) -> Part:
    """Return the page; its panels load their contents themselves."""
    if subject is None:
        reading = explorer.follower.reading
        text = "Reading the index …" if reading else "The dump has no tensor with this address."
        return html.Div([message(text), link("Back to the map", address.but(view=MAP, tensor=""))])
    has_attention = subject.catalog.field(subject.tensor, "layer_type") == "attention"
    panels = [
        bare_panel("heading", data["heading"], heading(explorer, subject)),
        panel("facts", "Facts", data["facts"], wide=True),
    ]
    panels += [
        panel(
            name,
            _title(name, subject),
            data[name],
            wide=name in ("image", "attention"),
            at_once=name in ("histogram", "errors"),
        )
        for name in TITLES
        if name != "attention" or has_attention
    ]
    return html.Div(panels, className="panels")


def _title(name: str, subject: Subject) -> str:
    return "Rows" if name == "tokens" and subject.is_weight else TITLES[name]


def heading(explorer: Explorer, subject: Subject) -> list[Part]:
    """Return the name of the tensor and its selectors."""
    catalog, tensor, address = subject.catalog, subject.tensor, subject.address
    back = Address(
        view=MAP,
        run=catalog.field(tensor, "run_id") or "",
        iteration=int(catalog.iteration[tensor]),
        format=address.format,
        gemm=address.gemm,
    )
    return [
        html.Div(
            [
                link("← Map", back, key="Escape", name="back"),
                html.H2(catalog.name(tensor), className="name"),
                html.P(subject.label(tensor), className="note"),
            ],
            className="heading",
        ),
        html.Form(_controls(explorer, subject), className="controls"),
    ]


def _image_controls(subject: Subject) -> list[Part]:
    names = [name for name in IMAGES if name != DIFFERENCE or subject.beside is not None]
    choices = [(name, _IMAGE_NAMES[name]) for name in names]
    chosen = subject.address.image if subject.address.image in names else VALUES
    parts = [select("Show", "img", choices, chosen)]
    if subject.address.zoom:
        whole = {"data-param": "z", "data-value": ""}
        parts.append(html.Button("Whole tensor", type="button", **whole))
    return [html.Form(parts, className="controls")]


def _head_controls(subject: Subject) -> list[Part]:
    """Return the selectors of head and sequence; none if it is unknown how many there are."""
    found = subject.catalog.heads(subject.tensor)
    if found is None:
        return []
    (sequences, heads), address = found, subject.address
    # A damaged record may claim any shape, so the number of choices is limited.
    options = [[(str(i), str(i)) for i in range(min(n, MOST_OPTIONS))] for n in (heads, sequences)]
    parts = [
        select("Head", "head", options[0], str(address.head)),
        select("Sequence", "seq", options[1], str(address.sequence)),
    ]
    return [html.Form(parts, className="controls")]


def _controls(explorer: Explorer, subject: Subject) -> list[Part]:
    catalog, tensor, address = subject.catalog, subject.tensor, subject.address
    own = catalog.id_of(tensor)
    names = [name for name in dict.fromkeys([*explorer.formats, address.format]) if name]
    parts = [select("Format", "format", [(name, name) for name in names], address.format)]
    runs = {run["code"]: run_name(run) for run in catalog.runs}
    labels: dict[str, tuple[str, Callable[[int], str]]] = {
        "layer": ("Layer", lambda value: f"L{value}" if value >= 0 else "none"),
        "iteration": ("Iteration", str),
        "micro_batch": ("Micro-batch", str),
        "data_rank": ("Data rank", str),
        "run": ("Run", lambda value: runs.get(value, "?")),
    }
    for column, (label, named) in labels.items():
        others = catalog.variants(tensor, column)
        if len(others) > 1:
            options = [(catalog.id_of(number), named(value)) for value, number in others.items()]
            parts.append(select(label, "t", options, own, clears="z"))
    same_layer = catalog.neighbors(tensor)
    if len(same_layer) > 1:
        options = [(catalog.id_of(number), place) for place, number in same_layer.items()]
        parts.append(select("Tensor", "t", options, own, clears="z head seq"))
    compared = {"": "none"}
    if subject.beside is not None:
        compared[catalog.id_of(subject.beside)] = subject.label(subject.beside)
    for column in ("run", "iteration"):
        for number in catalog.variants(tensor, column).values():
            if number != tensor and len(compared) < 200:
                compared[catalog.id_of(number)] = subject.label(number)
    chosen = catalog.id_of(subject.beside) if subject.beside is not None else ""
    parts.append(select("Compare with", "beside", [*compared.items()], chosen))
    return parts


def facts(subject: Subject) -> list[Part]:
    """Return a tensor's record, the statistics of its values, and its errors in each format."""
    catalog, tensor = subject.catalog, subject.tensor
    own = [subject.tensor] if subject.beside is None else [subject.tensor, subject.beside]
    frame = catalog.records.frame([int(catalog.rows[number]) for number in own])
    head = ["", *(f"{name}" for name in ("value", "second")[: len(own)])]
    if len(own) > 1:
        head = ["", subject.label(tensor), subject.label(own[1])]
    rows: list[list[Part]] = []
    for name, label in _FIELDS.items():
        texts = ["" if value is None else str(value) for value in frame[name]]
        if any(texts):
            rows.append([label, *texts])
    shapes = [_shape(catalog, number, frame.iloc[i]) for i, number in enumerate(own)]
    rows.append(["shape", *shapes])
    rows.append(["file", *(str(path).rpartition("/")[2] for path in frame["path"])])
    parts: list[Part] = [
        _errors_table(subject),
        html.Div(
            [table(head, rows, label="Record"), _values_table(subject, own)], className="pair"
        ),
    ]
    for number in own:
        if why := subject.answer(number).why:
            parts.append(message(f"A replica cannot be read: {why}", alarm=True))
    return parts


def _shape(catalog: Catalog, tensor: int, row: Any) -> str:
    shape = " x ".join(map(str, row["shape"] or ()))
    files = int(catalog.files[tensor])
    return shape if files == 1 else f"{shape} in each of {files} files"


def _values_table(subject: Subject, own: Sequence[int]) -> Part:
    """Return a table of the statistics of the values."""
    answers = [subject.answer(number) for number in own]
    columns = []
    for answer in answers:
        assert answer.measured is not None
        columns.append(dict(zip(STATISTICS_OF_VALUES, answer.measured.values, strict=True)))
    rows = []
    for name in STATISTICS_OF_VALUES:
        statistic = BY_NAME[name]
        cells = [charts.with_unit(float(numbers[name]), statistic) for numbers in columns]
        rows.append([statistic.label, *cells])
    head = ["", "value", "second"][: len(own) + 1]
    return table(head, rows, label="Statistics of the values")


def _errors_table(subject: Subject) -> Part:
    rows: list[list[Part]] = []
    for name in subject.formats:
        numbers = subject.numbers(name)
        if not numbers:
            continue
        cells = [_error(numbers.get(column, math.nan), share) for column, _, share in _ERRORS]
        chosen = subject.address.format == name
        label = [dot(color_of(name)), html.B(name) if chosen else name]
        rows.append([link(label, subject.address.but(format=name)), *cells])
    if not rows:
        return message("No format was computed for these values.")
    note = f"Blocks along {'rows' if subject.axis == 'row' else 'columns'}"
    head = [note, *(heading for _, heading, _ in _ERRORS)]
    return table(head, rows, label="Errors of the formats")


def _error(value: float, share: bool) -> str:
    if math.isnan(value):
        return charts.UNKNOWN
    if math.isinf(value):
        return "exact" if value > 0 else "-∞"
    if share:
        return f"{100 * value + 0.0:.3g} %"
    return f"{round(value, 2) + 0.0:.2f}"  # the sum has no negative zero


def tensor_panel(name: str, subject: Subject, search: str) -> list[Part]:
    """Return the content of a panel of the tensor."""
    title = html.H2("Facts" if name == "facts" else _title(name, subject))
    if name == "facts":
        return [title, *facts(subject)]
    controls = _image_controls(subject) if name == "image" else []
    controls = _head_controls(subject) if name == "attention" else controls
    try:
        shown = PANELS[name](subject)
    except NotShownError as error:
        return [title, *controls, not_shown(error)]
    assert shown.figure is not None
    label = f"{_title(name, subject)} of {subject.catalog.name(subject.tensor)}"
    figure: Part = graph(name, shown.figure, label)
    if shown.second is not None:
        second = graph(f"{name}-second", shown.second, f"{label}: change in the format")
        figure = html.Div([figure, second], className="curves")
    if name == "image":
        figure = html.Div(figure, **{"data-zoom": "z"})
    return [title, *controls, figure, footer(name, shown.note, search)]


def numbers_of(name: str, subject: Subject) -> pd.DataFrame:
    """Return the numbers of a panel, for the download."""
    if name == "facts":
        answer = subject.answer()
        rows = [{"format": fmt, "axis": axis, **own} for (fmt, axis), own in answer.formats.items()]
        return pd.DataFrame(rows)
    table_of_panel = PANELS[name](subject).table
    assert table_of_panel is not None
    named = table_of_panel.index.name is not None or not isinstance(
        table_of_panel.index, pd.RangeIndex
    )
    return table_of_panel.reset_index() if named else table_of_panel
