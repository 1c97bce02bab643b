/* Selectors and keys change the URL; the server answers with the view that it names. */
(() => {
  "use strict";
  const parameters = () => new URLSearchParams(window.location.search);

  function open(search, top) {
    keep();
    leaving = "";
    const { pathname, hash } = window.location;
    window.history.pushState({ scroll: top ? 0 : window.scrollY }, "", pathname + search + hash);
    if (top) window.scrollTo(0, 0);
    window.dispatchEvent(new PopStateEvent("popstate")); // Dash reads the address
  }

  /* A page gets its height after the browser has tried to restore the position in it. Therefore,
     each entry of the history keeps its position, which is restored while the page grows. */
  const PATIENCE = 4000; // in milliseconds; the user's own scrolling ends the restoring earlier
  let goal = null, deadline = 0, timer = 0;
  let leaving = ""; // address of the map in which the user has clicked a cell

  function keep() {
    if (goal === null) window.history.replaceState({ ...window.history.state, scroll: window.scrollY }, "");
  }

  function restorePosition(state) {
    goal = state && Number.isFinite(state.scroll) ? state.scroll : null;
    deadline = performance.now() + PATIENCE;
    scroll();
  }

  function scroll() {
    if (leaving && window.location.href !== leaving) { leaving = ""; window.scrollTo(0, 0); }
    if (goal === null) return;
    if (performance.now() > deadline) goal = null;
    else if (document.documentElement.scrollHeight - window.innerHeight >= goal) window.scrollTo(0, goal);
  }

  window.history.scrollRestoration = "manual";
  restorePosition(window.history.state);
  window.addEventListener("popstate", (event) => { if (event.isTrusted) { leaving = ""; restorePosition(event.state); } });
  window.addEventListener("scroll", () => { clearTimeout(timer); timer = setTimeout(keep, 200); }, { passive: true });
  window.addEventListener("pagehide", keep);
  for (const name of ["wheel", "touchstart", "pointerdown", "keydown"]) {
    document.addEventListener(name, () => { goal = null; }, { capture: true, passive: true });
  }

  function go(query) {
    const text = query.toString();
    open(text ? `?${text}` : "", false);
  }

  /* Elements that no callback changes: texts, or [tag, properties, ...children]. */
  function element(tree) {
    if (!Array.isArray(tree)) return tree;
    const [tag, properties, ...children] = tree;
    const ref = tag === "select" ? (field) => choose(field) : undefined; // a new function is called again
    return window.React.createElement(tag, { ...properties, ref }, ...children.map(element));
  }
  const choose = (field) => { if (field) field.value = field.dataset.chosen; };
  /* A selector may show a choice for which the user did not wait. Events of scripts are not trusted. */
  window.addEventListener("popstate", (event) => {
    if (event.isTrusted) document.querySelectorAll("select[data-chosen]").forEach(choose);
  });
  window.explorer_components = { Static: ({ tree }) => element(tree) };

  function set(name, value, clears) {
    const query = parameters();
    for (const other of (clears || "").split(" ").filter(Boolean)) query.delete(other);
    if (value === "") query.delete(name);
    else query.set(name, value);
    go(query);
  }

  document.addEventListener("change", (event) => {
    const field = event.target.closest("select[data-param]");
    if (field) set(field.dataset.param, field.value, field.dataset.clears);
  });
  document.addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-param]");
    if (button) set(button.dataset.param, button.dataset.value, "");
    const download = event.target.closest("button[data-download]");
    if (download) save(download);
    const anchor = event.target.closest("a[data-view]");
    if (anchor && !(event.ctrlKey || event.metaKey || event.shiftKey || event.altKey)) {
      event.preventDefault();
      open(anchor.getAttribute("href").replace(/^\?$/, ""), true);
    }
  });

  function save(button) {
    const section = button.closest("section");
    const name = section.querySelector("h2").textContent.replace(/[^\w.-]+/g, "_");
    for (const plot of section.querySelectorAll(".js-plotly-plot")) {
      const { width, height } = plot.getBoundingClientRect();
      window.Plotly.downloadImage(plot, {
        format: button.dataset.download, filename: name, width: Math.round(width), height: Math.round(height),
        scale: button.dataset.download === "png" ? 2 : 1,
      });
    }
  }

  /* Maps: the arrow keys move a frame, Enter and a click open the tensor. */
  const cursors = new Map(); // by the name of the map: row and column of the frame
  let count = 0;

  function pick(grid, row, column) {
    count += 1;
    keep();
    leaving = window.location.href;
    window.dash_clientside.set_props("pick", { data: { grid: grid.dataset.grid, row, column, count } });
  }

  function frame(grid, row, column) {
    cursors.set(grid.dataset.grid, [row, column]);
    const plot = grid.querySelector(".js-plotly-plot");
    const ink = getComputedStyle(document.documentElement).getPropertyValue("--alarm").trim();
    window.Plotly.relayout(plot, {
      shapes: [{ type: "rect", x0: column - 0.5, x1: column + 0.5, y0: row - 0.5, y1: row + 0.5, line: { color: ink, width: 3 } }],
    });
    const trace = plot.data[0];
    const texts = trace.hovertext || [];
    document.getElementById("say").textContent = texts[row] ? texts[row][column] : "";
    const axis = plot._fullLayout.xaxis;
    const x = axis._offset + axis.l2p(column);
    if (x < grid.scrollLeft + 60 || x > grid.scrollLeft + grid.clientWidth - 60) grid.scrollLeft = x - grid.clientWidth / 2;
  }

  const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const grid = event.target.closest && event.target.closest("[data-rows]");
    if (grid) {
      const [rows, columns] = [Number(grid.dataset.rows), Number(grid.dataset.columns)];
      let [row, column] = cursors.get(grid.dataset.grid) || [0, -1];
      if (event.key in STEPS) {
        row = Math.min(Math.max(row + STEPS[event.key][0], 0), rows - 1);
        column = Math.min(Math.max(column + STEPS[event.key][1], 0), columns - 1);
      } else if (event.key === "Home") column = 0;
      else if (event.key === "End") column = columns - 1;
      else if (event.key === "Enter" && column >= 0) return pick(grid, row, column);
      else return keys(event);
      event.preventDefault();
      return frame(grid, row, column);
    }
    keys(event);
  });

  const STEPPED = { "[": ["iteration", -1], "]": ["iteration", 1], "{": ["layer", -1], "}": ["layer", 1] };

  function keys(event) {
    if (event.target.closest && event.target.closest("select, input, textarea")) return;
    if (event.key === "/") {
      const field = document.querySelector("#view select");
      if (field) { event.preventDefault(); field.focus(); }
    } else if (event.key === "Escape") {
      const back = document.querySelector('[data-key="Escape"] a');
      if (back) back.click();
    } else if (event.key in STEPPED) {
      const [label, step] = STEPPED[event.key];
      const field = document.querySelector(`select[id$="-${label}"]`);
      const at = field ? field.selectedIndex + step : -1;
      if (at >= 0 && at < field.options.length) set(field.dataset.param, field.options[at].value, field.dataset.clears);
    }
  }

  /* Plots: a click on a map opens a tensor, a zoom into an image asks for its pixels. */
  function watch(plot) {
    if (plot.dataset.watched || !plot.on) return;
    plot.dataset.watched = "yes";
    const grid = plot.closest("[data-rows]");
    if (grid) {
      plot.on("plotly_click", (event) => {
        const point = event.points[0];
        pick(grid, Math.round(point.y), Math.round(point.x));
      });
    }
    const zoom = plot.closest("[data-zoom]");
    if (zoom) {
      plot.on("plotly_relayout", (event) => {
        if (event["xaxis.autorange"] || event["yaxis.autorange"]) return set(zoom.dataset.zoom, "", "");
        if (!("xaxis.range[0]" in event || "yaxis.range[0]" in event)) return;
        const { xaxis, yaxis } = plot._fullLayout;
        const ends = [...yaxis.range, ...xaxis.range].map((end) => Math.max(Math.round(end + 0.5), 0));
        const [top, bottom] = ends.slice(0, 2).sort((a, b) => a - b);
        const [left, right] = ends.slice(2).sort((a, b) => a - b);
        set(zoom.dataset.zoom, [top, Math.max(bottom, top + 1), left, Math.max(right, left + 1)].join("-"), "");
      });
      plot.on("plotly_doubleclick", () => { set(zoom.dataset.zoom, "", ""); return false; });
    }
  }

  /* New numbers replace a figure or a selector. The focus returns to what replaced it. */
  let focused = "";
  document.addEventListener("focusin", (event) => {
    const at = event.target;
    focused = at.dataset.grid ? `[data-grid="${at.dataset.grid}"]` : at.id ? `#${CSS.escape(at.id)}` : "";
  });
  document.addEventListener("pointerdown", () => { focused = ""; });

  function restore() {
    if (!focused || document.activeElement !== document.body) return;
    const at = document.querySelector(focused);
    if (!at || (at.dataset.grid && !at.querySelector(".js-plotly-plot .heatmaplayer"))) return;
    at.focus({ preventScroll: true });
    const cursor = at.dataset.grid && cursors.get(at.dataset.grid);
    if (cursor) frame(at, ...cursor);
  }

  /* Below the first figures, a panel is requested when it is near the window, and not before these
     figures are drawn: each takes the browser a tenth of a second. */
  const near = new Map(); // by the name of the panel; unknown until the page has a layout
  const seen = new WeakSet();
  let changes = 0;
  const LOADING = "[data-at-once] :is(.loading, [data-dash-is-loading=true])";
  const MOST_STEPS = 40; // of 50 ms, in case one of the first figures is slow

  function note(name, isNear) {
    if (near.get(name) === isNear) return;
    near.set(name, isNear);
    if (isNear) announce(name, MOST_STEPS);
  }

  function announce(name, steps) {
    if (!near.get(name)) return;
    if (steps && document.querySelector(LOADING)) { setTimeout(() => announce(name, steps - 1), 50); return; }
    changes += 1;
    window.dash_clientside.set_props({ type: "panel-near", name }, { data: changes });
  }

  const visibility = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (target.isConnected) note(target.dataset.panel, isIntersecting);
      else if (!document.querySelector(`[data-panel="${target.dataset.panel}"]`)) near.delete(target.dataset.panel);
    }
  }, { rootMargin: "300px" });

  window.addEventListener("beforeprint", () => {
    for (const section of document.querySelectorAll("[data-panel]")) note(section.dataset.panel, true);
  });

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    explorer: {
      request(addresses, nears, ids, requests, requestIds) {
        const { set_props: setProps } = window.dash_clientside;
        const requested = new Map(requestIds.map(({ name }, i) => [name, JSON.stringify(requests[i])]));
        ids.forEach(({ name }, i) => {
          const isFar = near.has(name) ? !near.get(name) : nears[i] === false;
          if (isFar || JSON.stringify(addresses[i]) === requested.get(name)) return;
          if (nears[i] === false) { announce(name, MOST_STEPS); return; } // the element of another page, used again
          const id = { type: "panel-request", name }, data = addresses[i];
          if (!requested.has(name)) setProps({ type: "panel-slot", name }, { children: { type: "Store", namespace: "dash_core_components", props: { id } } });
          setProps(id, { data });
        });
        return window.dash_clientside.no_update;
      },
    },
  });

  const observer = new MutationObserver(() => {
    for (const section of document.querySelectorAll("[data-panel]")) {
      if (!seen.has(section)) { seen.add(section); visibility.observe(section); }
    }
    for (const plot of document.querySelectorAll("[data-rows] .js-plotly-plot, [data-zoom] .js-plotly-plot")) watch(plot);
    restore();
    scroll();
  });
  observer.observe(document.documentElement, { childList: true, subtree: true, attributes: true, attributeFilter: ["class"] });
})();
