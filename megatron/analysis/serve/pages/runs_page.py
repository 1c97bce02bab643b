"""Build the page of the runs: facts of the run cards, and the format of each matmul."""

from __future__ import annotations

from megatron.analysis.plots.style import color_of
from megatron.analysis.report.cards import audit, facts
from megatron.analysis.serve.address import MAP, Address
from megatron.analysis.serve.explorer import Explorer
from megatron.analysis.serve.pages.map_page import run_name
from megatron.analysis.serve.pages.parts import Part, dot, html, link, message, table

MOST_RUNS = 200  #: maximum number of runs on the page


def page(explorer: Explorer) -> Part:
    """Return one section per run, newest first."""
    catalog = explorer.catalog
    newest = catalog.runs[::-1]
    sections: list[Part] = []
    so_far = " so far; reading the index" if explorer.follower.reading else ""
    if len(newest) > MOST_RUNS:
        sections.append(message(f"The newest {MOST_RUNS} of {len(newest):,} runs."))
    for number, run in enumerate(newest[:MOST_RUNS]):
        card = catalog.cards.get(run["id"], {})
        iterations = run["iterations"]
        ends = (str(iterations[0]), str(iterations[-1]))
        span = " to ".join(dict.fromkeys(ends))
        rows: list[list[Part]] = [
            ["end", run["ending"]],
            ["tensors", f"{run['tensors']:,}{so_far}"],
            ["collected iterations", f"{len(iterations):,} ({span}){so_far}"],
            *([name, text] for name, text in facts(card) if name != "status"),  # "end" shows more
        ]
        heading = f"heading-run-{number}"
        parts = [
            html.H2([dot(color_of(run["type"])), run_name(run)], id=heading),
            link("Map of this run", Address(view=MAP, run=run["id"])),
            table(["", ""], rows, label=f"Facts of run {number + 1}"),
        ]
        if lines := audit(card):
            parts.append(html.Pre("\n".join(lines), tabIndex=0))
        attributes = {"aria-labelledby": heading}
        sections.append(html.Section(parts, className="panel wide", **attributes))
    if not sections:
        reading = explorer.follower.reading
        sections = [message("Reading the index …" if reading else "No runs so far.")]
    return html.Div(sections, className="panels")
