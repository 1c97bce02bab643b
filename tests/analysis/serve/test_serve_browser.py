"""Test the pages in a browser: a user opens each view, with the mouse and the keyboard."""

from __future__ import annotations

import math
import re
import signal
import threading
from contextlib import contextmanager

import pandas as pd
import pytest

from megatron.analysis.serve import follower
from megatron.analysis.serve.application import create
from megatron.analysis.serve.explorer import Explorer
from megatron.analysis.serve.gate import Gate
from tests import forks
from tests.analysis.fake_dump import RUNS
from tests.analysis.report.browser import find_browser
from tests.analysis.serve.conftest import FORMATS, wait_for
from tests.analysis.serve.panels import operands, row
from tests.subprocesses import REPO, environment
from tests.training.runs import ENTRY, MOCK_DATA, MXFP8

PATIENCE = (
    60_000  #: time to wait for a change of the page, in milliseconds; the machine may be busy
)


@contextmanager
def served(explorer, port=0, token=None):
    """Serve the pages of an explorer on a thread, and return the port."""
    import waitress

    gate = Gate(create(explorer).server, "127.0.0.1", token)
    server = waitress.create_server(gate, host="127.0.0.1", port=port, threads=8)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield int(server.effective_port)
    finally:
        server.close()
        server.task_dispatcher.shutdown(timeout=1)
        for channel in [*server._map.values()]:
            channel.close()
        thread.join(10)


@pytest.fixture(scope="module")
def browser():
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium on the PATH (nor in CHROMIUM): the pages were NOT looked at")
    api = pytest.importorskip("playwright.sync_api")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=executable, args=flags)
        yield opened
        opened.close()


class Visit:
    """A tab that records its errors and the hosts that it contacts."""

    def __init__(self, browser, **options):
        self.tab = browser.new_page(**options)
        self.tab.set_default_timeout(PATIENCE)
        self.errors: list[str] = []
        self.addresses: list[str] = []
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("console", self._note)
        self.tab.on("request", lambda request: self.addresses.append(request.url))

    def _note(self, line):
        if line.type in ("error", "warning"):
            self.errors.append(line.text)

    def see(self, selector):
        self.tab.wait_for_selector(selector)

    def scroll_to(self, selector):
        """Show a part of the page; panels far from the window are not drawn."""
        self.tab.locator(selector).scroll_into_view_if_needed()

    def faults(self):
        """Return the serious faults that axe-core finds."""
        from axe_playwright_python.sync_playwright import Axe

        violations = Axe().run(self.tab).response["violations"]
        return [
            f"{fault['id']}: {fault['nodes'][0]['html'][:200]}"
            for fault in violations
            if fault["impact"] in ("serious", "critical")
        ]


MAP = ".panel-map .heatmaplayer image"
PANELS = ("histogram", "errors", "image", "channels", "tokens", "scales", "codes", "attention")


def test_a_user_looks_at_every_view(explorer, browser):
    visit = Visit(browser, viewport={"width": 1400, "height": 900})
    tab = visit.tab
    with served(explorer) as port:
        home = f"http://127.0.0.1:{port}/"
        tab.goto(home)
        visit.see(MAP)
        visit.see(".panel-worst td")
        assert visit.faults() == []
        tab.select_option("select[data-param=stat]", "kurtosis")
        visit.see(".panel-map h2:text('Kurtosis')")
        assert "stat=kurtosis" in tab.url
        tab.select_option("select[data-param=by]", "iteration")
        visit.see("select[data-param=place]")
        tab.select_option("select[data-param=by]", "tensor")
        tab.select_option("select[data-param=with]", RUNS["bf16"])
        visit.see(".panel-map h3:text('minus')")
        tab.goto(f"{home}?format=mxfp4")
        visit.see(MAP)
        tab.focus("[data-grid=map]")
        for _ in range(3):
            tab.keyboard.press("ArrowRight")
        wait_for(lambda: "core query" in tab.text_content("#say"))
        tab.keyboard.press("Enter")
        visit.see("h2.name:text('L0 core query')")
        visit.see(".panel-histogram .plot-container")
        tab.wait_for_timeout(500)
        assert tab.locator(".panel-codes .loading").count() == 1  # far below the window
        for name in PANELS:
            visit.scroll_to(f".panel-{name}")
            visit.see(f".panel-{name} .js-plotly-plot .plot-container")
        assert visit.faults() == []
        visit.scroll_to(".panel-image")
        tab.select_option("select[data-param=img]", "errors")
        visit.see(".panel-image .cbtitle text:text('error in mxfp4')")
        tab.select_option("select[data-param=head]", "1")
        wait_for(lambda: "head=1" in tab.url)
        visit.scroll_to(".panel-image .nsewdrag")
        box = tab.locator(".panel-image .nsewdrag").bounding_box()
        tab.mouse.move(box["x"] + 20, box["y"] + 20)
        tab.mouse.down()
        tab.mouse.move(box["x"] + 200, box["y"] + 120, steps=4)
        tab.mouse.up()
        visit.see(".panel-image button:text('Whole tensor')")
        here = tab.url
        assert "&z=" in here
        with tab.expect_download() as download:
            tab.click(".panel-codes a:text('CSV')")
        assert download.value.suggested_filename == "codes.csv"
        visit.scroll_to(".panel-scales")
        tab.select_option("#select-t-tensor", label="qkv weight")
        visit.see("h2.name:text('L0 qkv weight')")
        visit.see(".panel-scales h2 ~ div .heatmaplayer image")
        tab.keyboard.press("Escape")
        visit.see(MAP)
        for view in ("Training", "Runs"):
            tab.click(f"nav a:text('{view}')")
            visit.see(".panel-numbers dd" if view == "Training" else "section pre, section table")
            assert visit.faults() == []
        assert visit.errors == []
        assert all(url.startswith((home, "data:", "blob:")) for url in visit.addresses)
    with served(explorer, port):  # after a restart, the same address shows the same view
        tab.goto(here)
        visit.scroll_to(".panel-attention")
        visit.see("select[data-param=head]")
        visit.scroll_to(".panel-image")
        visit.see(".panel-image button:text('Whole tensor')")
        assert tab.input_value("select[data-param=head]") == "1"
        assert tab.input_value("select[data-param=img]") == "errors"
    tab.close()


def test_what_is_not_finite_or_not_studied_is_visible(explorer, browser, tmp_path, monkeypatch):
    own = operands(amax=[2.0, math.inf, 3.0], underflow=[0.031, 0.25, 0.5])
    monkeypatch.setattr(explorer.training, "statistics", {"run": own})
    study = [row(10.0), row(40.0, gemm="dgrad", nonfinite=1), row(20.0, iteration=5)]
    pd.DataFrame(study).to_parquet(tmp_path / "study.parquet")
    monkeypatch.setattr(explorer, "_study_path", tmp_path / "study.parquet")
    visit = Visit(browser, viewport={"width": 1400, "height": 900})
    tab = visit.tab
    with served(explorer) as port:
        home = f"http://127.0.0.1:{port}/"
        tab.goto(f"{home}?v=training&stat=amax")
        visit.scroll_to(".panel-statistics")
        visit.see(".panel-statistics .note:text('Red cells: not finite')")
        # the operands and, above them, the red cells
        wait_for(lambda: tab.locator(".panel-statistics .heatmaplayer image").count() == 2)
        box = tab.locator(".panel-statistics .nsewdrag").bounding_box()
        tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        visit.see(".panel-statistics .hovertext text:text('iteration 2: not finite')")
        assert visit.faults() == []
        search = f"?run={RUNS['bf16']}&stat=output_sqnr_db"
        tab.goto(f"{home}{search}&format=mxfp4")
        visit.see(".panel-map h2:text('SQNR of the results in mxfp4, iteration 1')")
        visit.see(".panel-map .note:text('1 of 2 results holds NaN or Inf')")
        tab.goto(f"{home}{search}&format=nvfp4")
        visit.see(".panel-map :text('nvfp4 was not studied in this run; studied: mxfp4.')")
        assert visit.errors == []
    tab.close()


def test_back_forward_and_reload_keep_the_position_in_a_page(explorer, browser):
    visit = Visit(browser, viewport={"width": 1400, "height": 400})
    tab = visit.tab

    def position():
        return tab.evaluate("window.scrollY")

    def scroll(to):
        tab.mouse.move(5, 200)  # beside the figures
        tab.mouse.wheel(0, to - position())
        wait_for(lambda: abs(position() - to) < 2)
        tab.wait_for_timeout(400)

    with served(explorer) as port:
        tab.goto(f"http://127.0.0.1:{port}/?format=mxfp4")
        visit.see(MAP)
        visit.see(".panel-worst td")
        scroll(240)
        tab.focus("[data-grid=map]")
        tab.keyboard.press("ArrowRight")
        tab.keyboard.press("Enter")
        visit.see("h2.name")
        wait_for(lambda: position() == 0)
        visit.see(".panel-histogram .plot-container")
        scroll(900)
        tab.select_option("select[data-param=format]", "mxfp8")
        tab.wait_for_selector(".panel-facts b:text('mxfp8')", state="attached")
        assert abs(position() - 900) < 2
        tab.go_back()
        wait_for(lambda: tab.input_value("select[data-param=format]") == "mxfp4")
        tab.select_option("select[data-param=format]", "mxfp8")
        tab.go_back()  # before the server answers
        wait_for(lambda: tab.input_value("select[data-param=format]") == "mxfp4")
        assert abs(position() - 900) < 2
        tab.reload()
        visit.see("h2.name")
        wait_for(lambda: abs(position() - 900) < 2)
        tab.go_back()
        visit.see(MAP)
        wait_for(lambda: abs(position() - 240) < 2)
        tab.go_forward()
        visit.see("h2.name")
        wait_for(lambda: abs(position() - 900) < 2)
        tab.keyboard.press("Escape")
        visit.see(MAP)
        wait_for(lambda: position() == 0)
        tab.go_back()
        visit.see("h2.name")
        wait_for(lambda: abs(position() - 900) < 2)
    assert visit.errors == []
    tab.close()


def test_a_phone_shows_everything_without_overflow(explorer, browser):
    visit = Visit(browser, viewport={"width": 390, "height": 800}, color_scheme="dark")
    tab = visit.tab
    catalog = explorer.catalog
    with served(explorer) as port:
        for search in (
            "",
            f"?v=tensor&t={catalog.id_of(0)}&format=mxfp4",
            "?v=training",
            "?v=runs",
        ):
            tab.goto(f"http://127.0.0.1:{port}/{search}")
            visit.see("main section table, main section dd")
            tab.wait_for_timeout(300)
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390, search
        tab.goto(f"http://127.0.0.1:{port}/")
        visit.see(MAP)
        assert visit.faults() == []
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 24)"
        text = tab.locator(".panel-map .xtick text").first
        assert text.evaluate("e => getComputedStyle(e).fill") == "rgb(230, 230, 230)"
    assert visit.errors == []
    tab.close()


def test_a_link_with_the_token_opens_the_explorer_from_another_page(explorer, browser):
    visit = Visit(browser)
    tab = visit.tab
    with served(explorer, token="a-token-of-the-test") as port:
        home = f"http://127.0.0.1:{port}/"
        links = (
            '<link rel="icon" href="data:,">'
            f'<a id="first" href="{home}?v=map&token=a-token-of-the-test">first</a>'
            f'<a id="later" href="{home}?v=runs">later</a>'
        )
        page = {"body": links, "content_type": "text/html"}
        tab.route("http://wiki.example/*", lambda route: route.fulfill(**page))
        for link, seen in (("first", MAP), ("later", "section pre, section table")):
            tab.goto("http://wiki.example/notes.html")
            tab.click(f"#{link}")
            visit.see(seen)
            assert "token" not in tab.url
    assert [error for error in visit.errors if "favicon" not in error] == []
    tab.close()


def test_a_run_is_followed_while_it_trains(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(follower, "WALK_PERIOD", 0.5)
    dump, logs = tmp_path / "dump", tmp_path / "events"
    dump.mkdir()
    explorer = Explorer(dump, FORMATS, cache=None, logs=[logs], in_process=True)
    explorer.start()
    visit = Visit(browser)
    tab = visit.tab

    def number(selector, pattern):
        """Return a number that the page shows; 0 if it does not show any."""
        found = re.search(pattern, tab.text_content(selector) or "")
        return int(found[1].replace(",", "")) if found else 0

    def tensors():
        return number("#status", r"([\d,]+) tensors")

    with served(explorer) as port:
        tab.goto(f"http://127.0.0.1:{port}/")
        visit.see("main p:text('has no tensors yet')")
        save = ("--save-tensors", "--tensor-save-dir", dump, "--control-iter", "0")
        words = ("--train-iters", "12", "--log-interval", "1", "--tensorboard-dir", logs)
        run = forks.start(
            *(ENTRY, *MOCK_DATA, *MXFP8, *words, *save), env=environment(PYTHONPATH=REPO)
        )
        try:
            wait_for(lambda: any(dump.glob("*.pt")))
            run.send_signal(signal.SIGSTOP)
            visit.see(MAP)  # without a reload
            wait_for(lambda: tensors() > 0)
            early = tensors()
            run.send_signal(signal.SIGCONT)
            wait_for(lambda: tensors() > early)
            tab.click("nav a:text('Training')")
            visit.see(".panel-curves .scatterlayer .trace")
            run.communicate()
            assert run.returncode == 0
        finally:
            run.kill()
        wait_for(lambda: number(".panel-numbers", r"Iteration(\d+)") == 12)
        total = sum(1 for _ in dump.glob("*.pt"))
        wait_for(lambda: tensors() == total)
    explorer.close()
    assert visit.errors == []
    tab.close()
