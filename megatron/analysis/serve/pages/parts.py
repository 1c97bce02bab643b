"""Components that several pages share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dash

from megatron.analysis.serve.address import Address
from megatron.analysis.serve.charts import Figure
from megatron.bounded_files import printable

Part = Any  #: a Dash component, or a text
#: Dash's components, as Any, because their type hints lack the attributes `data-*` and `aria-*`.
html: Any = dash.html
dcc: Any = dash.dcc

MOST_OPTIONS = 2000  #: maximum number of choices of a selector
GRAPH_CONFIG = {"displayModeBar": False, "responsive": True, "doubleClick": "reset"}
#: Fields of the address on which each panel depends; a change of other fields does not redraw it.
_MAP = ("view", "run", "other", "format", "statistic", "gemm", "by", "iteration", "place", "show")
_TENSOR = ("view", "tensor", "beside", "format", "gemm")
DEPENDS = {
    "controls": _MAP,
    "heading": _TENSOR,
    "verdict": _MAP,
    "map": _MAP,
    "worst": _MAP,
    "facts": _TENSOR,
    "histogram": _TENSOR,
    "errors": _TENSOR,
    "image": (*_TENSOR, "image", "zoom"),
    "channels": ("view", "tensor", "beside"),
    "tokens": ("view", "tensor", "beside"),
    "scales": ("view", "tensor", "format"),
    "codes": ("view", "tensor", "format", "gemm"),
    "attention": ("view", "tensor", "format", "head", "sequence"),
    "numbers": ("view",),
    "curves": ("view",),
    "statistics": ("view", "statistic"),
    "events": ("view",),
}


def panel_search(name: str, address: Address) -> str:
    """Return the part of an address on which a panel depends, as a query."""
    default = Address()
    depends = DEPENDS[name]
    changes = {
        field: getattr(default, field)
        for field in Address.__dataclass_fields__
        if field not in depends
    }
    return address.but(**changes).search()


def panel(
    name: str, label: str, data: dict[str, Any], *, wide: bool = False, at_once: bool = True
) -> Part:
    """Return a section whose content is loaded separately, so that no panel waits for another.

    The section stays when its content changes, so that the keyboard focus is not lost.

    Args:
        name: name of the panel.
        label: name for screen readers.
        data: part of the URL on which the panel depends, and its version.
        wide: use the whole width of the page.
        at_once: load the content with the page, and not when the section comes near the window.
    """
    loading = html.P("Loading …", className="message loading")
    return html.Section(
        [
            html.Div(loading, id={"type": "panel", "name": name}, className="body"),
            *_stores(name, data, at_once=at_once),
        ],
        className=f"panel panel-{name}{' wide' if wide else ''}",
        **{"aria-label": label, ("data-at-once" if at_once else "data-panel"): name},
    )


def bare_panel(name: str, data: dict[str, Any], content: Part) -> Part:
    """Return a panel without a frame, for selectors and headings, which need no loading."""
    return html.Div(
        [
            html.Div(content, id={"type": "panel", "name": name}),
            *_stores(name, data, at_once=True),
        ],
        className="bare wide",
    )


def _stores(name: str, data: dict[str, Any], *, at_once: bool) -> list[Part]:
    """Return the stores in which the browser keeps the state of a panel.

    Dash requests the content from the server when the store of the request appears or changes. The
    script of the page adds that store when the panel comes near the window, and from then on copies
    the address to it.
    """
    request = dcc.Store(id={"type": "panel-request", "name": name}, data=data)
    return [
        dcc.Store(id={"type": "panel-address", "name": name}, data=data),
        dcc.Store(id={"type": "panel-near", "name": name}, data=at_once),
        html.Div(request if at_once else None, id={"type": "panel-slot", "name": name}),
    ]


def select(
    label: str,
    parameter: str,
    options: Sequence[tuple[str, str]],
    value: str,
    *,
    clears: str = "",
) -> Part:
    """Return a labeled selector that changes a parameter of the URL.

    Args:
        label: text in front of the selector.
        parameter: name of the parameter.
        options: value and text of each choice; if there are too many, some near the chosen one.
        value: chosen value.
        clears: other parameters to remove after a change, separated by spaces.
    """
    name = f"select-{parameter}-{label.lower().replace(' ', '-')}"
    if len(options) > MOST_OPTIONS:
        chosen = next((i for i, (key, _) in enumerate(options) if key == value), len(options))
        first = min(max(chosen - MOST_OPTIONS // 2, 0), len(options) - MOST_OPTIONS)
        options = options[first : first + MOST_OPTIONS]
        label = f"{label} (some of many)"
    choices = [html.Option(text, value=key) for key, text in options]
    keys = [key for key, _ in options]
    chosen_key = value if value in keys else (keys or [""])[0]
    attributes = {"data-param": parameter, "data-clears": clears, "data-chosen": chosen_key}
    return html.Div(
        [html.Label(label, htmlFor=name), html.Select(choices, id=name, **attributes)],
        className="field",
    )


def switch(label: str, parameter: str, *, on: bool, value: str) -> Part:
    """Return a toggle button that sets or removes a parameter of the URL."""
    return html.Button(
        label,
        type="button",
        className="switch",
        **{
            "aria-pressed": "true" if on else "false",
            "data-param": parameter,
            "data-value": "" if on else value,
        },
    )


def link(text: Part, address: Address, *, key: str = "", name: str = "") -> Part:
    """Return a link to another view.

    Args:
        text: text of the link.
        address: address that the link opens.
        key: key on the keyboard that opens the link.
        name: class of the link.
    """
    anchor = html.A(text, href=address.search(), className=name, **{"data-view": ""})
    return html.Span(anchor, **{"data-key": key}) if key else anchor


def message(text: str, *, alarm: bool = False) -> Part:
    """Return a line of text to show in place of a figure."""
    return html.P(text, className="message alarm" if alarm else "message")


def not_shown(error: Exception) -> Part:
    """Return the reason why a view cannot be shown."""
    return message(printable(f"Not shown: {error}", limit=1000))


def graph(name: str, figure: Figure, label: str) -> Part:
    """Return a component that shows a figure; `label` describes it to screen readers."""
    height = figure["layout"].get("height", 300)
    return html.Div(
        dcc.Graph(
            id={"type": "graph", "name": name},
            figure=figure,
            config=GRAPH_CONFIG,
            style={"height": f"{height}px"},
        ),
        className="plot",
        role="img",
        **{"aria-label": label},
    )


def footer(name: str, note: str, search: str, *, figure: bool = True) -> Part:
    """Return the note below a panel, with its download links."""
    buttons = [
        html.Button(kind.upper(), type="button", **{"data-download": kind})
        for kind in (("svg", "png") if figure else ())
    ]
    numbers = html.A("CSV", href=f"csv{search}&panel={name}", download=f"{name}.csv")
    return html.Div(
        [html.P(note, className="note"), html.Div([*buttons, numbers], className="downloads")],
        className="footer",
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Part]], *, label: str) -> Part:
    """Return a table that scrolls inside its own frame."""
    return html.Div(
        html.Table(
            [
                html.Thead(html.Tr([html.Th(text, scope="col") for text in head])),
                html.Tbody([html.Tr([html.Td(cell) for cell in row]) for row in rows]),
            ]
        ),
        className="scroll",
        tabIndex=0,
        role="region",
        **{"aria-label": label},
    )


def size(number: float) -> str:
    """Return a number of bytes as text."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f} bytes"


def dot(color: str) -> Part:
    """Return a dot in the color of a format or run."""
    return html.Span(className="dot", style={"backgroundColor": color}, **{"aria-hidden": "true"})
