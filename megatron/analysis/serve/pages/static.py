"""Turn the parts of the page that no callback changes into one component each.

Dash keeps a record of every component in the browser, and looks at all of them whenever one
changes. With a component per table cell and per choice of a selector, opening a view would take
half a second longer.
"""

# ruff: noqa: RUF012  # Dash reads these lists from the class, and declares them for instances

from __future__ import annotations

from typing import Any

from dash.development.base_component import Component

from megatron.analysis.serve.pages.parts import Part, html


class Static(Component):
    """Elements of HTML that no callback changes; `assets/explorer.js` draws them.

    Args:
        tree: an element as `[tag, properties, *children]`, or a text. The browser shows texts
            literally.
    """

    _children_props: list[str] = []
    _base_nodes: list[str] = []
    _namespace = "explorer_components"
    _type = "Static"
    _prop_names: list[str] = ["tree"]
    available_properties: list[str] = ["tree"]
    _valid_wildcard_attributes: list[str] = []
    available_wildcard_properties: list[str] = []

    def __init__(self, tree: Any):
        super().__init__(tree=tree)  # type: ignore[no-untyped-call]


def static(part: Part) -> Part:
    """Return a part in which the largest elements that no callback changes are `Static`."""
    if isinstance(part, (list, tuple)):
        return [static(child) for child in part]
    if not isinstance(part, Component):
        return part
    if _is_plain(part):
        return Static(_tree(part))
    if part._namespace == html.Div._namespace and getattr(part, "children", None) is not None:
        part.children = static(part.children)
    return part


def _is_plain(part: Part) -> bool:
    """Return whether a part consists of elements of HTML only, none of which a callback changes."""
    if isinstance(part, (list, tuple)):
        return all(map(_is_plain, part))
    if not isinstance(part, Component):
        return True
    is_html = part._namespace == html.Div._namespace and not isinstance(
        getattr(part, "id", None), dict
    )
    return is_html and _is_plain(getattr(part, "children", None))


def _tree(part: Part) -> Any:
    if not isinstance(part, Component):
        return "" if part is None else str(part)
    plain: Any = part  # Dash has few type hints
    properties = dict(plain.to_plotly_json()["props"])
    children = properties.pop("children", None)
    children = children if isinstance(children, (list, tuple)) else [children]
    return [part._type.lower(), properties, *map(_tree, children)]
