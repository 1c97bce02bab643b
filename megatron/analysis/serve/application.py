"""Create the Dash application: callbacks show a view, draw a panel, and follow the run.

The URL is the only state. A selector changes the URL, and the view is then updated. A panel is
drawn again only if a part of the URL on which it depends changes, or if there are new numbers. A
panel that is far from the window is drawn when the user scrolls to it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape as html_escape
from typing import Any

import numpy as np
import pandas as pd
from dash import ALL, MATCH, ClientsideFunction, Dash, Input, Output, State, no_update
from flask import Response, request
from werkzeug.exceptions import HTTPException

from megatron.analysis.dump.tensor_files import reason
from megatron.analysis.serve.address import MAP, RUNS, TENSOR, TRAINING, Address
from megatron.analysis.serve.contents import NotShownError
from megatron.analysis.serve.explorer import Explorer
from megatron.analysis.serve.pages import map_page, runs_page, tensor_page, training_page
from megatron.analysis.serve.pages.parts import (
    DEPENDS,
    Part,
    dcc,
    html,
    link,
    message,
    not_shown,
    panel_search,
)
from megatron.analysis.serve.pages.static import static
from megatron.analysis.serve.statistics import BY_NAME
from megatron.analysis.text_table import csv_cell, shown
from megatron.bounded_files import printable

TICK = 2000  #: time between two polls of the server, in milliseconds
QUICK_TICK = 500  #: the same, while the visible tensors are being read or measured
#: panels to redraw when new statistics of tensors arrive
_FOLLOWS_NUMBERS = ("verdict", "map", "worst")
#: panels to redraw when new data of the training arrive
_FOLLOWS_TRAINING = ("curves", "statistics", "events")
#: panels to redraw when the options that the selectors offer change
_FOLLOWS_CHOICES = ("controls", "heading")
_NAMES = {MAP: "Map", TRAINING: "Training", RUNS: "Runs"}
_STORES = {"type": "panel-address", "name": ALL}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{%title%}</title>
<link rel="preload" as="script" href="/_dash-component-suites/plotly/package_data/plotly.min.js">
{%favicon%}
{%css%}
</head>
<body>
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>"""


def create(explorer: Explorer) -> Dash:
    """Return the Dash application; its attribute `server` is the WSGI application."""
    name = shown(explorer.folder.name)
    app = Dash(
        __name__,
        title=html_escape(f"{name}: explorer").replace("{", "(").replace("}", ")"),
        update_title="",
        serve_locally=True,
        suppress_callback_exceptions=True,
        index_string=_PAGE,
    )
    app.layout = _layout(name)
    views = _Views(explorer)
    app.callback(
        Output("view", "children"),
        Output("shown", "data"),
        Output("links", "children"),
        Output(_STORES, "data"),
        Input("url", "search"),
        Input("stale", "data"),
        State("shown", "data"),
        State(_STORES, "id"),
        State(_STORES, "data"),
    )(views.show)
    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction("explorer", "request"),
        Output("requested", "data"),  # with an output, Dash also calls the function for a new page
        Input(_STORES, "data"),
        Input({"type": "panel-near", "name": ALL}, "data"),
        State(_STORES, "id"),
        State({"type": "panel-request", "name": ALL}, "data"),
        State({"type": "panel-request", "name": ALL}, "id"),
    )
    app.callback(
        Output({"type": "panel", "name": MATCH}, "children"),
        Input({"type": "panel-request", "name": MATCH}, "data"),
        State({"type": "panel-request", "name": MATCH}, "id"),
    )(views.panel)
    app.callback(
        Output("status", "children"),
        Output("stale", "data"),
        Output("tick", "interval"),
        Output(_STORES, "data", allow_duplicate=True),
        Input("tick", "n_intervals"),
        State("stale", "data"),
        State("url", "search"),
        State(_STORES, "id"),
        State(_STORES, "data"),
        prevent_initial_call="initial_duplicate",
    )(views.follow)
    app.callback(
        Output("url", "search"),
        Input("pick", "data"),
        State("url", "search"),
        prevent_initial_call=True,
    )(views.open_cell)
    app.server.add_url_rule("/csv", "csv", views.download)
    app.server.before_request(views.prefer_page)
    app.server.register_error_handler(Exception, _failed)
    return app


def _layout(name: str) -> Part:
    return html.Div(
        [
            html.A("Skip to the content", href="#view", className="skip"),
            dcc.Location(id="url", refresh=False),
            dcc.Interval(id="tick", interval=QUICK_TICK),
            dcc.Store(id="pick"),
            dcc.Store(id="shown"),
            dcc.Store(id="stale"),
            dcc.Store(id="requested"),
            html.Header(
                [
                    html.H1(name),
                    html.Nav(id="links", **{"aria-label": "Views"}),
                    html.Div(id="status", className="status"),
                ]
            ),
            html.Main(message("Loading …"), id="view", tabIndex=-1),
            html.P(
                [
                    html.Span("Keys: arrows and Enter in the map, [ ] iteration, { } layer, "),
                    html.Span("Esc back to the map, / first selector"),
                ],
                className="note keys",
            ),
            html.Div(id="say", className="hidden", **{"aria-live": "polite"}),
        ],
        id="page",
    )


class _Views:
    """The callbacks of the application."""

    def __init__(self, explorer: Explorer):
        self.explorer = explorer

    def prefer_page(self) -> None:
        """Make background work wait while a page is opened, but not while the page polls."""
        if request.method == "GET":
            self.explorer.priority.request()

    def show(
        self,
        search: str | None,
        stale: Any,
        current: Any,
        ids: list[dict[str, str]],
        stored: list[Any],
    ) -> tuple[Any, Any, Any, list[Any]]:
        """Show a view, or update those panels of the current view whose address or data changed."""
        address = self.explorer.resolved(search)
        key = self._key(address, search)
        if key == current:
            names = [entry["name"] for entry in ids]
            changed = self._changed(address, names, stored)
            if stale is None or stale == current:
                self.explorer.priority.request()
            return no_update, no_update, _links(address), changed
        self.explorer.priority.request()
        data = {name: self._data(name, address) for name in DEPENDS}
        return self._page(address, search, data), key, _links(address), [no_update] * len(ids)

    def _key(self, address: Address, search: str | None) -> str:
        """Return a key that two pages share if they have the same panels."""
        explorer = self.explorer
        if address.view == MAP:
            empty = not len(explorer.catalog)
            awaits = explorer.awaits(search)
            return f"{MAP} {empty} {awaits or (empty and explorer.follower.reading)}"
        if address.view == TRAINING:
            return f"{TRAINING} {len(explorer.training.statistics) > 0}"
        if address.view == RUNS:
            return f"{RUNS} {explorer.catalog.version} {explorer.follower.reading}"
        tensor = explorer.catalog.find(address.tensor)
        if tensor is None:
            return f"{TENSOR} {explorer.follower.reading}"
        return f"{TENSOR} {explorer.catalog.field(tensor, 'layer_type')}"

    def _choices(self) -> list[int]:
        """Return numbers that change whenever the choices of the selectors change."""
        catalog = self.explorer.catalog
        iterations = sum(len(run["iterations"]) for run in catalog.runs)
        return [len(catalog.runs), iterations, len(catalog.places)]

    def _page(self, address: Address, search: str | None, data: dict[str, dict[str, Any]]) -> Part:
        explorer = self.explorer
        if address.view == TENSOR:
            page = tensor_page.page(explorer, address, explorer.subject(address), data)
        elif address.view == TRAINING:
            page = training_page.page(explorer, data)
        elif address.view == RUNS:
            page = runs_page.page(explorer)
        elif explorer.awaits(search):
            page = message("Reading the index …")
        else:
            page = map_page.page(explorer, address, data)
        return static(page)

    def _data(self, name: str, address: Address) -> dict[str, Any]:
        """Return a panel's part of the URL and a version; a change of either redraws the panel."""
        version: list[Any] = []
        if name in _FOLLOWS_NUMBERS and address.view == MAP:
            version = self.explorer.version(address)
        elif name in _FOLLOWS_CHOICES:
            version = self._choices()
        elif name in _FOLLOWS_TRAINING:
            version = [self.explorer.training.version, len(self.explorer.follower.events)]
            version.append(self.explorer.follower.reading)
            if name == "events":
                version.append(self.explorer.unusable)
        elif name == "numbers":
            newest = [*self.explorer.rates][-1:]
            version = [self.explorer.training.version, *map(list, newest)]
            version.append(self.explorer.follower.reading)
        return {"search": panel_search(name, address), "version": version}

    def _changed(self, address: Address, names: Sequence[str], stored: Sequence[Any]) -> list[Any]:
        data = [self._data(name, address) for name in names]
        return [new if new != old else no_update for new, old in zip(data, stored, strict=True)]

    def panel(self, data: dict[str, Any], identity: dict[str, str]) -> Any:
        """Return the content of a panel, or a message that states why it cannot be shown."""
        name, search = identity["name"], str(data.get("search", ""))
        try:
            content: Part = self._panel(name, search)
        except NotShownError as error:
            content = not_shown(error)
        except Exception as error:  # a damaged file must not stop the server
            content = message(_failure(f"{name} {search}", error), alarm=True)
        return static(content)

    def _panel(self, name: str, search: str) -> list[Part]:
        explorer, address = self.explorer, Address.parse(search)
        if name in ("numbers", "curves", "statistics", "events"):
            return _training_panel(name, explorer, address, search)
        if address.view == TENSOR:
            address = address.but(format=address.format or (explorer.formats or [""])[0])
            subject = explorer.subject(address)
            if subject is None:
                raise NotShownError("the dump has no tensor with this address")
            if name == "heading":
                return tensor_page.heading(explorer, subject)
            explorer.priority.request()
            explorer.look_at(np.array([subject.tensor]), "")
            return tensor_page.tensor_panel(name, subject, search)
        if name == "controls":
            return [map_page.controls(explorer, address)]
        if name == "verdict":
            return map_page.verdict(explorer, address)
        if name == "worst":
            return map_page.worst(explorer, address, search)
        return map_page.map_panel(explorer, address, search)

    def follow(
        self,
        _: int | None,
        stale: Any,
        search: str | None,
        ids: list[dict[str, str]],
        stored: list[Any],
    ) -> tuple[Any, Any, int, list[Any]]:
        """Return what is new since the last poll, and the time until the next one."""
        address = self.explorer.resolved(search)
        key = self._key(address, search)
        names = [entry["name"] for entry in ids]
        following = (*_FOLLOWS_NUMBERS, *_FOLLOWS_TRAINING, *_FOLLOWS_CHOICES, "numbers")
        changed = self._changed(address, names, stored)
        changed = [
            data if name in following else no_update
            for name, data in zip(names, changed, strict=True)
        ]
        explorer = self.explorer
        is_awaited = explorer.follower.reading or explorer.measurer.visible_left
        tick = QUICK_TICK if is_awaited else TICK
        return self._status(), no_update if key == stale else key, tick, changed

    def _status(self) -> Part:
        explorer, measurer = self.explorer, self.explorer.measurer
        catalog = explorer.catalog
        newest_only = explorer.follower.newest_only
        texts = [f"{len(catalog):,} tensors{' of the newest iteration' if newest_only else ''}"]
        if explorer.follower.reading:
            texts.append("reading the index")
        left = max(measurer.total - measurer.done, 0)
        if left and explorer.follower.reading:  # more tensors will follow
            texts.append(f"{measurer.done:,} measured")
        elif left and measurer.rate:
            time_left = duration(left / measurer.rate)
            texts.append(f"{measurer.done:,} measured, {measurer.rate:.0f}/s, {time_left} left")
        elif left:
            texts.append(f"{measurer.done:,} measured")
        if count := explorer.unusable:
            texts.append(f"{count:,} unusable file{'s' if count > 1 else ''}")
        parts: list[Part] = [html.Span(" · ".join(texts))]
        if left:
            share = measurer.done / max(measurer.total, 1)
            bar = html.Div(style={"width": f"{100 * share:.1f}%"})
            parts.append(html.Div(bar, className="bar", **{"aria-hidden": "true"}))
        return static(parts)

    def open_cell(self, pick: dict[str, Any] | None, search: str | None) -> Any:
        """Return the address of the tensor behind a cell of the map."""
        explorer = self.explorer
        explorer.priority.request()
        address = explorer.resolved(search)
        try:
            row, column = int((pick or {})["row"]), int((pick or {})["column"])
            if (pick or {}).get("grid") == "other" and address.other:
                address = address.but(run=address.other, other="")
                address = address.resolved(explorer.catalog, explorer.formats)
            found = map_page.shown_map(explorer, address)
            if min(row, column) < 0:
                return no_update
            tensor = int(found.tensors[row, column])
        except (KeyError, TypeError, ValueError, IndexError, NotShownError):
            return no_update
        if tensor < 0:
            return no_update
        return address.but(view=TENSOR, tensor=explorer.catalog.id_of(tensor)).search()

    def download(self) -> Response:
        """Return the numbers of a panel as CSV."""
        explorer = self.explorer
        name = request.args.get("panel", "")
        search = request.query_string.decode("ascii", "replace")
        address = Address.parse(search)
        if name not in DEPENDS:
            return Response("There is no such panel.\n", 404, mimetype="text/plain")
        try:
            if address.view == TENSOR:
                subject = explorer.subject(address)
                if subject is None:
                    raise NotShownError("the dump has no tensor with this address")
                table = tensor_page.numbers_of(name, subject)
            elif name in ("curves", "statistics"):
                table = training_page.numbers_of(name, explorer)
            else:
                if explorer.awaits(search):
                    raise NotShownError("the index is still being read; try again later")
                resolved = explorer.resolved(search)
                table = map_page.numbers_of(explorer, resolved)
            content = _csv(table)
        except NotShownError as error:
            return Response(f"{printable(error, limit=1000)}\n", 404, mimetype="text/plain")
        except Exception as error:  # a damaged file must not stop the server
            return Response(f"{_failure(f'csv {search}', error)}\n", 500, mimetype="text/plain")
        headers = {"Content-Disposition": f"attachment; filename={name}.csv"}
        return Response(content, mimetype="text/csv", headers=headers)


def duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours, such as `25 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.0f} h"


def _failure(where: str, error: Exception) -> str:
    """Print a warning about a view that cannot be computed, and return a message for the page."""
    why = printable(f"{where}: {type(error).__name__}: {reason(error)}", limit=2000)
    print(f"[WARNING] {why}", file=sys.stderr)
    return f"This cannot be shown ({type(error).__name__})."


def _failed(error: Exception) -> Response | HTTPException:
    """Answer a request that raised an error, without a traceback in the terminal.

    The pages of the explorer send no such requests.
    """
    if isinstance(error, HTTPException):
        return error
    return Response(f"{_failure(request.path, error)}\n", 500, mimetype="text/plain")


def _training_panel(name: str, explorer: Explorer, address: Address, search: str) -> list[Part]:
    if name == "numbers":
        return training_page.numbers(explorer)
    if name == "curves":
        return training_page.curves(explorer, search)
    if name == "statistics":
        return training_page.statistics(explorer, address, search)
    return training_page.events(explorer)


def _links(address: Address) -> Part:
    """Return the links to the views; the current one is marked."""
    parts = []
    for view, name in _NAMES.items():
        current = address.view == view or (view == MAP and address.view == TENSOR)
        target = address.but(view=view, tensor="", beside="", zoom="")
        if BY_NAME[target.statistic].of_format is False and view != MAP:
            target = target.but(statistic=Address().statistic)
        parts.append(link(name, target, name="current" if current else ""))
    return static(parts)


def _csv(table: pd.DataFrame) -> str:
    """Return a table as CSV, with texts that no spreadsheet interprets as formulas."""
    table, safe = table.reset_index(drop=True), {}
    for number in range(table.shape[1]):
        values = table.iloc[:, number]
        if not pd.api.types.is_numeric_dtype(values):
            values = [csv_cell(v) if isinstance(v, str) else v for v in values]
        safe[number] = values
    names = [csv_cell(str(column)) for column in table.columns]
    text: str = pd.DataFrame(safe).to_csv(index=False, header=names, lineterminator="\n")
    return text
