"""Measure the explorer, `python -m megatron.analysis serve`, in a headless browser.

A dump of the requested size is made by linking the files of a small dump as those of additional
layers and iterations. The browser runs on the same machine. Times are those that a user sees:

    address     from the command to the printed address
    layout      from opening the address to a map with its axes
    numbers     from opening the address to a map with the first numbers of the newest iteration
    index       from opening the address until all records are read
    again       from opening the address once more to a map with numbers
    click       from a click on a cell to the name, and to all figures in the window; the other
                tensors are measured in the background meanwhile
    memory      of the server and its measuring process; memory that they share counts once

Needs playwright, and Chromium in PATH or at the path in CHROMIUM. For example:

    python benchmarks/explorer.py enhanced_tensor_logs/mxfp8 --clicks 16
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import results_page

REPO = Path(__file__).resolve().parents[1]
FORMATS = ("mxfp8", "mxfp4", "nvfp4", "hifp8")
MAP = ".panel-map .heatmaplayer image"
#: CSS selector of the element that appears last in each figure or table on the page of a tensor.
#: Only the figures and tables that fit in a window of 1400 x 900 pixels are listed.
IN_WINDOW = {
    "histogram": ".panel-histogram .js-plotly-plot .barlayer path",
    "errors": ".panel-errors .js-plotly-plot .scatterlayer .trace",
    "facts": ".panel-facts table",
}
#: JavaScript that records when each element in CHECKS appears after the mouse button is pressed.
WATCH = """
(() => {
  const checks = CHECKS;
  const seen = window.clicked = { at: 0, times: {} };
  document.addEventListener("pointerdown", () => {
    seen.at = performance.now();
    seen.times = {};
  }, true);
  const look = () => {
    for (const [name, selector] of seen.at ? Object.entries(checks) : [])
      if (!(name in seen.times) && document.querySelector(selector))
        seen.times[name] = performance.now() - seen.at;
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})();
"""
CELL = """
([row, column]) => {
  const plot = document.querySelector("[data-grid=map] .js-plotly-plot");
  const { xaxis, yaxis } = plot._fullLayout;
  const top = plot.getBoundingClientRect().top + scrollY + yaxis._offset + yaxis.l2p(row);
  window.scrollTo(0, top - 400);
  const box = plot.getBoundingClientRect();
  return [box.left + xaxis._offset + xaxis.l2p(column), box.top + yaxis._offset + yaxis.l2p(row)];
}
"""


@dataclass
class Times:
    """Measurements of one server: times of steps and of clicks in seconds, and its memory."""

    steps: dict[str, float] = field(default_factory=dict)
    clicks: list[dict[str, float]] = field(default_factory=list)
    start_memory: int = 0  #: in bytes, once the index is read
    memory: int = 0  #: in bytes, at the end
    records: int = 0


def enlarge(source: Path, target: Path, records: int, layers: int) -> int:
    """Create a dump of at least `records` records by linking the files of a dump of one run.

    Returns the number of records. Layers and iterations repeat those of the source.

    Raises:
        ValueError: if the source does not contain exactly one index file.
    """
    indexes = sorted(source.rglob("index_*.jsonl"))
    if len(indexes) != 1:
        raise ValueError(
            f"{source} contains {len(indexes)} index files; give the dump of one run on one rank"
        )
    lines = [json.loads(line) for line in indexes[0].read_text().splitlines()]
    rows = [line for line in lines if "event" not in line]
    own = sorted({row["layer_idx"] for row in rows})
    iterations = sorted({row["iteration"] for row in rows})
    by_place: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        by_place.setdefault((row["iteration"], row["layer_idx"]), []).append(row)
    target.mkdir(parents=True)
    count = iteration = 0
    with (target / indexes[0].name).open("w") as out:
        while count < records:
            for layer in range(layers):
                place = iterations[iteration % len(iterations)], own[layer % len(own)]
                for row in by_place.get(place, ()):
                    count += 1
                    name = f"{count:08d}_{row['file']}"
                    (target / name).hardlink_to(indexes[0].parent / row["file"])
                    module = row["module"].replace(f"layers.{place[1]}.", f"layers.{layer}.")
                    changes = {"iteration": iteration + 1, "layer_idx": layer, "module": module}
                    changes |= {"counter": count, "file": name}
                    changes["wall_time"] = row["wall_time"] + count * 1e-3
                    out.write(json.dumps({**row, **changes}) + "\n")
            iteration += 1
        out.writelines(json.dumps(line) + "\n" for line in lines if "event" in line)
    for card in indexes[0].parent.glob("run_*.json"):
        (target / card.name).write_bytes(card.read_bytes())
    return count


def memory(pid: int) -> int:
    """Return the proportional set size (PSS) of a process and its descendants, in bytes."""
    total = 0
    for process in (pid, *children(pid)):
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        found = re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)
        total += int(found[1]) << 10 if found else 0
    return total


def children(pid: int) -> Iterator[int]:
    """Yield the IDs of all descendants of a process."""
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            yield int(child)
            yield from children(int(child))


@contextmanager
def served(folder: Path, cache: Path) -> Iterator[tuple[str, float, int]]:
    """Serve a dump; yield the address, the seconds until it was printed, and the process ID."""
    command = [sys.executable, "-m", "megatron.analysis", "serve", str(folder), "--port", "0"]
    command += ["--cache", str(cache), "--formats", *FORMATS]
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            address = re.search(r"http://\S+", server.stdout.readline())
            if address is None:
                raise RuntimeError("the server did not start; its message is above")
            yield address[0], time.monotonic() - started, server.pid
        finally:
            server.terminate()
            server.wait()


def measure(folder: Path, cache: Path, browser: Any, clicks: int) -> Times:
    """Serve a dump, and measure how long a user waits for each step and after each click."""
    found = Times()
    with served(folder, cache) as (address, seconds, pid):
        found.steps["address"] = seconds
        tab = browser.new_page(viewport={"width": 1400, "height": 900})
        tab.set_default_timeout(600_000)
        tab.add_init_script(WATCH.replace("CHECKS", json.dumps({"name": "h2.name", **IN_WINDOW})))
        opened = time.monotonic()
        tab.goto(address)
        for name, selector in (("layout", ".panel-map .xtick"), ("numbers", MAP)):
            tab.wait_for_selector(selector)
            found.steps[name] = time.monotonic() - opened
        tab.wait_for_function("!document.body.innerText.includes('reading the index')")
        found.steps["index"] = time.monotonic() - opened
        found.start_memory = memory(pid)
        time.sleep(3)
        opened = time.monotonic()
        tab.goto(address)
        tab.wait_for_selector(MAP)
        found.steps["again"] = time.monotonic() - opened
        options = "select[data-param=it] option"
        tab.wait_for_selector(options, state="attached")
        iterations = tab.eval_on_selector_all(options, "all => all.map(option => option.value)")
        for number in range(clicks):
            iteration = iterations[(7 * number + 3) % len(iterations)]
            found.clicks.append(click(tab, f"{address}?it={iteration}", number))
        found.memory = memory(pid)
        tab.close()
    return found


def click(tab: Any, address: str, number: int) -> dict[str, float]:
    """Click a cell of the map at an address; return the seconds until each part appears."""
    tab.goto(f"{address}&format={FORMATS[number % len(FORMATS)]}")
    tab.wait_for_selector(MAP)
    time.sleep(1.5)  # a user looks at the map before clicking
    grid = tab.locator("[data-grid=map]")
    rows, columns = (int(grid.get_attribute(f"data-{name}")) for name in ("rows", "columns"))
    x, y = tab.evaluate(CELL, [(5 * number + 1) % rows, 3 * number % columns])
    tab.mouse.move(x - 3, y - 3)
    tab.mouse.move(x, y)
    time.sleep(0.4)
    tab.mouse.click(x, y)
    tab.wait_for_function(f"Object.keys(clicked.times).length > {len(IN_WINDOW)}")
    times: dict[str, float] = tab.evaluate("clicked.times")
    return {name: milliseconds / 1000 for name, milliseconds in times.items()}


def page(found: Times) -> str:
    """Return the results as Markdown."""
    wholes = sorted(max(times.values()) for times in found.clicks)
    names = sorted(times["name"] for times in found.clicks)
    rows = [(step, f"{seconds:.2f} s") for step, seconds in found.steps.items()]
    for label, values in (("click: name", names), ("click: all in the window", wholes)):
        if values:
            rows.append(
                (label, f"median {statistics.median(values):.2f} s, largest {values[-1]:.2f} s")
            )
    sizes = f"{found.start_memory / 1e6:.0f} MB at first, {found.memory / 1e6:.0f} MB at the end"
    table = results_page.table(("step", "measured"), [*rows, ("memory", sizes)])
    words = [Path(word).name if Path(word).is_dir() else word for word in sys.argv[1:]]
    command = results_page.quoted("explorer.py", words)
    head = f"# Speed of the explorer\n\n`{command}`, {os.cpu_count()} cores"
    return f"{head}, {found.records:,} records, {len(found.clicks)} clicks.\n\n{table}\n"


def main() -> None:
    """Enlarge the dump that the command line names, measure the explorer, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dump", type=Path, help="dump of one run on one rank, which is enlarged")
    parser.add_argument(
        "--records",
        type=int,
        default=100_000,
        help="minimum number of records (default: %(default)s)",
    )
    parser.add_argument(
        "--layers", type=int, default=32, help="number of layers (default: %(default)s)"
    )
    parser.add_argument(
        "--clicks", type=int, default=8, help="number of clicks (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="also write the results to this Markdown file")
    options = parser.parse_args()
    sys.path.insert(0, str(REPO))
    from playwright.sync_api import sync_playwright

    from tests.analysis.report.browser import find_browser

    executable = find_browser()
    if executable is None:
        parser.error("no Chromium in PATH; install Chromium, or set CHROMIUM to its path")
    # `enlarge` makes hard links to the files of the dump, which must be on the same file system.
    with tempfile.TemporaryDirectory(dir=options.dump.resolve().parent) as scratch:
        folder = Path(scratch, "dump")
        try:
            records = enlarge(options.dump, folder, options.records, options.layers)
        except ValueError as error:
            parser.error(str(error))
        with sync_playwright() as playwright:
            flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
            browser = playwright.chromium.launch(executable_path=executable, args=flags)
            found = measure(folder, Path(scratch, "cache"), browser, options.clicks)
            browser.close()
    found.records = records
    results_page.publish(page(found), options.output)


if __name__ == "__main__":
    main()
