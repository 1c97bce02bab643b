"use strict";
// Everything on the page comes from the JSON in #data, which unpack.js unpacks. Its texts are set as text, never as markup.
// Plotly interprets some tags, so that every text of the data is escaped by `plain` for it.
const data = window.reportData;
const $ = (id) => document.getElementById(id);
const NARROW = 700; // width in pixels below which the cells of the map have no numbers
const narrow = () => window.innerWidth < NARROW;
// On a phone, Plotly's buttons would cover the titles.
const CONFIG = { responsive: true, displaylogo: false, ...(narrow() ? { displayModeBar: false } : {}) };
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const MAGMA = [[0, "#000004"], [0.25, "#51127c"], [0.5, "#b73779"], [0.75, "#fc8961"], [1, "#fcfdbf"]];
const DIVERGING = ["#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f"]
  .map((name, i) => [i / 10, name]);
const KINDS = { forward: "activations", weight: "weights", gradient: "gradients" };
const figures = JSON.parse($("figures").textContent); // files of figures beside the page
let opened = null; // the tensor whose details are shown

// The sections in the order of the page. A section without `formats` is drawn also if the report
// compares no format. A section with `follows` is drawn again for another format.
const SECTIONS = [
  {
    id: "verdict", link: "Verdict", heading: "Verdict", formats: true, draw: drawVerdict,
    body: `<p class="note">formats by their median SQNR; 6 dB are one bit</p><ol id="sentences"></ol>`,
  },
  { id: "warnings", link: "Warnings", heading: "Warnings", body: `<ol id="cautions"></ol>`, draw: drawWarnings },
  {
    id: "training", link: "Loss", heading: "Loss, gradient norm and what was collected", draw: drawTraining,
    body: `
      <ul id="events"></ul>
      <div id="loss" class="plot"></div>
      <p id="training-note" class="note"></p>`,
  },
  {
    id: "map", link: "Layer by tensor", heading: "Signal to quantization noise, layer by tensor", formats: true, follows: true, draw: drawHeatmap,
    body: `
      <p class="controls">
        <label>format <select id="format"></select></label>
        <label>run <select id="run"></select></label>
        <label>iteration <select id="iteration"></select></label>
        <label>tensors <select id="shown"></select></label>
        <span class="note">dB; a cell is the median of its tensors; a click opens the tensor with the
        lowest SQNR; <span id="opened-note"></span></span>
      </p>
      <div id="heatmap" class="plot" tabindex="0" role="group" aria-label="Map of layers and tensors; the arrow keys open the next cell"></div>
      <div id="detail">
        <h3 id="detail-title">Click a cell</h3>
        <p id="detail-facts" class="note"></p>
        <div class="pair">
          <div id="histogram" class="plot"></div>
          <div id="blockmap" class="plot"></div>
        </div>
        <p id="histogram-note" class="note"></p>
        <p id="block-note" class="note"></p>
        <div class="scroll"><table id="detail-table"></table></div>
      </div>`,
  },
  {
    id: "worst", link: "Worst tensors", heading: "Worst tensors first", formats: true, follows: true, draw: drawWorst,
    body: `
      <p class="controls">
        <label>layer <select id="worst-layer"></select></label>
        <label>name contains <input id="worst-text" type="search" size="14"></label>
        <span class="note" id="worst-count" aria-live="polite"></span>
      </p>
      <p class="note"><span id="worst-note"></span> click a heading to sort, a row to open it.</p>
      <div class="scroll tall" tabindex="0" role="region" aria-label="Table of the worst tensors"><table id="worst-table"></table></div>`,
  },
  {
    id: "attention", link: "Attention", heading: "Attention by layer and head", follows: true, draw: drawAttention,
    body: `
      <p class="controls" id="attention-controls">
        <label>layer <select id="attention-layer"></select></label>
        <label>head <select id="attention-head"></select></label>
      </p>
      <p id="attention-title"></p>
      <div id="attention-moved" class="plot"></div>
      <div class="pair">
        <div id="attention-map" class="plot"></div>
        <div id="attention-change" class="plot"></div>
      </div>
      <p id="attention-note" class="note"></p>`,
  },
  {
    id: "gradients", link: "Gradients", heading: "Gradients", follows: true, draw: drawGradients,
    body: `
      <p class="controls" id="gradient-controls">
        <label>number <select id="gradient-number"></select></label>
        <label>run <select id="gradient-run"></select></label>
        <label>layer <select id="gradient-layer"></select></label>
      </p>
      <div id="gradient-plot" class="plot"></div>
      <p id="gradient-note" class="note"></p>`,
  },
  {
    id: "formats", link: "Formats", heading: "Formats on the same tensors", formats: true, draw: drawFormats,
    body: `
      <p id="formats-note" class="note"></p>
      <div id="by-place" class="plot"></div>
      <div id="by-layer" class="plot"></div>`,
  },
  {
    id: "types", link: "Types", heading: "Types against each other", draw: drawTypes,
    body: `
      <p id="types-note" class="note"></p>
      <div id="by-type" class="plot"></div>`,
  },
  {
    id: "runs", link: "Runs", heading: "Runs and their audit", draw: drawRuns,
    body: `
      <div id="cards"></div>
      <div id="left-out"></div>`,
  },
  { id: "files", link: "Figures", heading: "Figures beside this page", absent: !figures.length, draw: drawFigures, body: `<ul id="file-list"></ul>` },
].filter((section) => !section.absent);

function make(tag, text, attributes = {}) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const labels = data.labels.map(plain);

function show(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
}

const percent = (share) => (share === null ? "-" : share > 0 && share < 1e-6 ? "<0.0001 %" : `${show(100 * share)} %`);
// Return an SQNR as text; it is infinite if there is no error.
const decibel = (value) => (value === "inf" ? "exact" : typeof value === "number" ? value.toFixed(1) : value ?? "-");
const layout = (more) => ({
  font: { family: "system-ui, sans-serif", size: 12, color: color("ink") },
  margin: { l: 60, r: 20, t: 34, b: 50 }, paper_bgcolor: color("page"), plot_bgcolor: color("page"),
  hovermode: "closest", showlegend: true, ...more,
});
const axis = (title, more = {}) => ({ title: { text: title }, gridcolor: color("rule"), zeroline: false, ...more });

const layerName = (layer) => (layer < 0 ? "?" : `L${layer}`);

// Return a logarithmic axis for these numbers, with ticks at powers of ten, and between them if there are few.
// It is linear if it spans so little that it would have one tick.
function logAxis(title, values, more = {}) {
  const logs = values.filter((value) => value > 0).map(Math.log10);
  const [low, high] = [Math.min, Math.max].map((f) => logs.reduce((a, b) => f(a, b), logs[0] ?? 0));
  if (high - low < 0.5) return axis(title, more);
  return axis(title, { type: "log", dtick: high - low > 2 ? Math.ceil((high - low) / 6) : "D2", exponentformat: "power", ...more });
}

// Return a legend that stands above a plot, and the pixels by which its further rows make the plot higher.
function legendAbove(names) {
  const longest = names.reduce((most, name) => Math.max(most, name.length), 0);
  const columns = Math.max(1, Math.floor((Math.min(window.innerWidth, 1280) - 130) / (48 + 7 * longest)));
  const more = 19 * Math.max(0, Math.ceil(names.length / columns) - 1);
  return { more, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" } };
}

// Return the length of a color bar; its ticks would overlap beside a map with few rows.
const barLength = (rows) => (rows < 5 ? { lenmode: "pixels", len: 115, y: 1, yanchor: "top" } : {});

// Return the color of a line; on a dark page it is lighter.
function onPage(hex) {
  if (!matchMedia("(prefers-color-scheme: dark)").matches || !/^#[0-9a-f]{6}$/i.test(hex)) return hex;
  const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgb(${parts.map((part) => Math.round(part + 0.3 * (255 - part))).join()})`;
}

// Return an axis of whole numbers.
function wholeAxis(title, numbers, more = {}) {
  const [low, high] = [Math.min, Math.max].map((f) => numbers.reduce((a, b) => f(a, b), numbers[0] ?? 0));
  return axis(title, { ...(high - low < 10 ? { dtick: 1 } : { tickformat: ",d" }), ...more });
}

function fillSelect(id, entries, changed) {
  $(id).replaceChildren(...entries.map(([value, text]) => make("option", text, { value })));
  $(id).onchange = changed;
}

// The choices in the selectors.
const formatIndex = () => Number($("format").value);
const formatName = () => data.formats[formatIndex()].name;
const chosen = () => ({ run: Number($("run").value), iteration: Number($("iteration").value) });
// The places with a column in the map: those of operands of matmuls, or those of results.
const columns = () => data.places.map((_, i) => i).filter((i) => data.results[i] === ($("shown").value === "results"));

function drawHeatmap() {
  const { run, iteration } = chosen();
  const at = 5 + 2 * formatIndex();
  const shown = columns();
  const grid = (empty) => data.layers.map(() => shown.map(() => empty));
  const [z, text, hover, tensor] = [grid(null), grid(""), grid(""), grid(null)];
  const finite = [];
  for (const cell of data.cells) {
    const [row, column] = [data.layers.indexOf(cell[2]), shown.indexOf(cell[3])];
    if (column < 0) continue;
    if (typeof cell[at] === "number") finite.push(cell[at]); // one scale for all runs
    if (cell[0] !== run || cell[1] !== iteration) continue;
    z[row][column] = cell[at];
    tensor[row][column] = cell[at + 1];
    text[row][column] = decibel(cell[at]);
    hover[row][column] = text[row][column] + (typeof cell[at] === "number" ? " dB" : "")
      + (cell[4] > 1 ? ` (${cell[4]} tensors)` : "");
  }
  const top = finite.reduce((a, b) => Math.max(a, b), finite[0] ?? 1);
  const bottom = finite.reduce((a, b) => Math.min(a, b), top);
  // the color only; the text of a cell is in `text`
  const height = (value) => (value === "inf" ? top : value === "-inf" ? bottom : value);
  const few = data.layers.length * shown.length <= 900 && !narrow();
  const trace = {
    type: "heatmap", z: z.map((row) => row.map(height)), x: shown.map((i) => labels[i]),
    y: data.layers.map(layerName), text, hovertext: hover, customdata: tensor, xgap: 1, ygap: 1, colorscale: "Viridis",
    zmin: bottom, zmax: top, colorbar: { title: { text: "dB" }, ...barLength(data.layers.length) },
    hovertemplate: "%{y} %{x}: %{hovertext}<extra></extra>",
    ...(few ? { texttemplate: "%{text}", textfont: { size: 9 } } : {}),
  };
  Plotly.react("heatmap", [trace], layout({
    height: Math.min(212 + 24 * data.layers.length, 900), margin: { l: 46, r: 10, t: 32, b: 120 },
    xaxis: { tickangle: -45, type: "category", automargin: true }, yaxis: { autorange: "reversed", type: "category" },
    shapes: mark(shown),
  }), CONFIG);
  $("heatmap").removeAllListeners?.("plotly_click");
  $("heatmap").on("plotly_click", (event) => open(event.points[0].customdata));
}

// Return a frame around the cell of the open tensor, if the map shows it.
function mark(shown) {
  const { run, iteration } = chosen();
  const [ofRun, at, layer, place] = opened === null ? [] : data.at[opened];
  const [row, column] = [data.layers.indexOf(layer), shown.indexOf(place)];
  if (ofRun !== run || at !== iteration || row < 0 || column < 0) return [];
  const line = { color: "#b3261e", width: 2.5 };
  return [{ type: "rect", x0: column - 0.5, x1: column + 0.5, y0: row - 0.5, y1: row + 0.5, line }];
}

// Open the nearest cell in the direction of an arrow key.
function step(event) {
  const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!move || opened === null) return;
  event.preventDefault();
  const grid = $("heatmap").data[0].customdata;
  const [, , layer, place] = data.at[opened];
  let [row, column] = [data.layers.indexOf(layer) + move[0], columns().indexOf(place) + move[1]];
  while (grid[row]?.[column] === null) [row, column] = [row + move[0], column + move[1]];
  open(grid[row]?.[column]);
}

// Keep the view in the address, so that a link to it can be sent.
function remember() {
  const { run, iteration } = chosen();
  const view = { run: data.runs[run].id, iteration, tensors: $("shown").value };
  if (data.formats.length) view.format = formatName();
  if (opened !== null) view.tensor = opened;
  history.replaceState(null, "", `#view:${new URLSearchParams(view)}`);
}

// Show the view in the address. Return whether there is one; parts that do not exist are ignored.
function recall() {
  if (!location.hash.startsWith("#view:")) return false;
  const view = new URLSearchParams(location.hash.slice("#view:".length));
  const format = data.formats.findIndex(({ name }) => name === view.get("format"));
  if (format >= 0) $("format").value = format;
  const tensor = /^\d+$/.test(view.get("tensor") ?? "") ? Number(view.get("tensor")) : -1;
  if (tensor >= 0 && tensor < data.at.length) {
    goTo(tensor);
    return true;
  }
  const run = data.runs.findIndex(({ id }) => id === view.get("run"));
  if (run >= 0) $("run").value = run;
  iterations();
  if (data.runs[chosen().run].iterations.includes(Number(view.get("iteration")))) $("iteration").value = view.get("iteration");
  if (kinds.includes(view.get("tensors"))) $("shown").value = view.get("tensors");
  if (data.formats.length) {
    drawForFormat();
    follow();
  }
  return true;
}

function open(tensor) {
  if (tensor === null || tensor === undefined) return;
  opened = tensor;
  remember();
  if (data.formats.length) Plotly.relayout("heatmap", { shapes: mark(columns()) });
  $("detail").dataset.tensor = tensor;
  $("detail-title").textContent = data.tensors[tensor];
  const detail = data.details[tensor];
  if (!detail) {
    $("detail-facts").textContent = "The page has details only of the tensors with the lowest SQNR and of the last iterations; "
      + "draw this run alone with --run to get more.";
    for (const id of ["histogram", "blockmap"]) Plotly.purge(id);
    $("detail-table").replaceChildren();
    for (const id of ["histogram-note", "block-note"]) $(id).textContent = "";
    return;
  }
  const facts = Object.entries(detail.facts).map(([name, value]) => `${name.replaceAll("_", " ")} ${show(value)}`);
  $("detail-facts").textContent = `${detail.module} [${detail.shape.join(" x ")}] ${detail.dtype}`
    + (detail.shards > 1 ? `, joined from ${detail.shards} files` : "") + `: ${facts.join(", ")}. ${detail.file}`
    + (detail.note ? `. Note: ${detail.note}` : "");
  drawHistogram(detail);
  drawBlockMap(detail);
  drawNumbers(detail);
}

function drawHistogram(detail) {
  const name = formatName();
  const format = detail.formats[name];
  const x = detail.values.map((_, i) => detail.first + i);
  const labels = x.map((e) => `2<sup>${e}</sup>`);
  const lost = format ? format.lost : x.map(() => 0);
  const beyond = format ? format.saturated : x.map(() => 0);
  const poisoned = format ? format.poisoned : x.map(() => 0);
  const bar = (y, label, color) => ({
    type: "bar", x, y, name: label, marker: { color }, customdata: labels,
    hovertemplate: `%{y:,} ${label}, from %{customdata}<extra></extra>`,
  });
  // hatched, because the color of a format can be any solid color
  const hatched = (trace) => ({ ...trace, marker: { color: color("page"), line: { color: color("ink"), width: 1 }, pattern: { shape: "/", size: 5, fgcolor: trace.marker.color } } });
  const traces = [
    bar(detail.values.map((n, i) => n - lost[i] - beyond[i] - poisoned[i]), "kept", data.formats[formatIndex()].color),
    bar(lost, "become zero", color("lost")), hatched(bar(beyond, "saturate", color("ink"))),
    ...(poisoned.some(Boolean) ? [bar(poisoned, "become NaN", color("ink"))] : []),
  ];
  if (format) traces.push({
    type: "scatter", mode: "lines+markers", x, y: format.error, name: "relative error", yaxis: "y2",
    line: { color: color("ink"), width: 1 }, marker: { size: 4 }, customdata: labels,
    hovertemplate: "mean relative error %{y:.2%}, from %{customdata}<extra></extra>",
  });
  $("histogram-note").textContent = histogramNote(detail, name);
  const every = Math.ceil(x.length / 9);
  const ticks = { tickvals: x.filter((e) => e % every === 0), ticktext: labels.filter((_, i) => x[i] % every === 0) };
  Plotly.react("histogram", traces, layout({
    height: 380, barmode: "stack", bargap: 0.06, title: { text: `Values by magnitude, ${plain(name)}`, font: { size: 13 }, x: 0.01 },
    xaxis: axis("magnitude, from", ticks), yaxis: axis("values in a binade"), legend: { orientation: "h", y: narrow() ? -0.32 : -0.22 },
    yaxis2: { title: { text: "mean relative error" }, overlaying: "y", side: "right", type: "log", dtick: 1, tickformat: ".3~%", showgrid: false, range: errorRange(format) },
    margin: { l: 60, r: 70, t: 34, b: 50 },
  }), CONFIG);
}

// Return a note on the values that the histogram leaves out: the lowest ones, zeros, NaN and Inf.
function histogramNote(detail, name) {
  const { zeros, nan, inf, count } = detail.facts;
  const lost = detail.formats[name]?.smaller_lost;
  const left = [];
  if (detail.smaller) left.push(`Smaller values: ${show(detail.smaller)} (${percent(detail.smaller / count)}`
    + (lost === undefined ? ")" : `; become zero in ${name}: ${show(lost)})`));
  for (const [number, what] of [[zeros, "Zeros"], [nan, "NaN"], [inf, "Inf"]]) if (number) left.push(`${what}: ${show(number)}`);
  return left.length ? `Not in the histogram. ${left.join(". ")}.` : "";
}

// Return the exponents of the decades around the errors of a format.
function errorRange(format) {
  const known = (format?.error ?? []).filter((error) => error > 0);
  if (!known.length) return [-3, 0.1];
  return [Math.floor(Math.log10(Math.min(...known))), Math.ceil(Math.log10(Math.max(...known))) + 0.1];
}

// Return the number that a positive E4M3 code stands for.
function e4m3(code) {
  const [field, mantissa] = [code >> 3, code & 7];
  return field ? (1 + mantissa / 8) * 2 ** (field - 7) : mantissa * 2 ** -9;
}

// Return ticks at scales that occur, evenly spread over the logarithmic color bar.
function scaleTicks(exponents) {
  const all = [...new Set(exponents.filter((e) => e !== null))].sort((a, b) => a - b);
  const wanted = Array.from({ length: 6 }, (_, i) => all[0] + (i / 5) * (all.at(-1) - all[0]));
  const near = (e) => all.reduce((a, b) => (Math.abs(b - e) < Math.abs(a - e) ? b : a), all[0]);
  const tickvals = [...new Set(wanted.map(near))];
  return { tickvals, ticktext: tickvals.map((e) => show(Number((2 ** e).toPrecision(3)))) };
}

const some = (numbers) => numbers.filter((_, i) => i % Math.ceil(numbers.length / 8) === 0);

function drawBlockMap(detail) {
  const own = detail.maps[formatName()];
  const name = own ? formatName() : Object.keys(detail.maps)[0];
  if (!name) {
    Plotly.purge("blockmap");
    $("block-note").textContent = "No block map: none of the formats has blocks, or parts of the tensor are missing.";
    return;
  }
  const map = detail.maps[name];
  const bytes = Uint8Array.from(atob(map.bytes), (c) => c.charCodeAt(0));
  const exponents = Array.from(new Int8Array(bytes.buffer), (e) => (e === -128 ? null : map.powers ? e : Math.log2(e4m3(e))));
  const z = Array.from({ length: map.rows }, (_, i) => exponents.slice(i * map.columns, (i + 1) * map.columns));
  const x = z[0].map((_, i) => i * map.size);
  const ticks = map.powers ? { tick0: 0, dtick: wholeStep(exponents) } : scaleTicks(exponents);
  Plotly.react("blockmap", [{
    type: "heatmap", z, colorscale: MAGMA, x, y: z.map((_, i) => i * map.every),
    customdata: z.map((row) => row.map((e) => (e === null ? "" : map.powers ? `2<sup>${e}</sup>` : show(2 ** e)))),
    colorbar: { title: { text: map.powers ? "exponent" : "scale" }, ...ticks },
    hovertemplate: "row %{y}, block from value %{x}: %{customdata}<extra></extra>",
  }], layout({
    height: 380, title: { text: `Scales of the blocks, ${plain(name)}`, font: { size: 13 }, x: 0.01 },
    xaxis: axis("index of the block's first value", { tickvals: some(x) }), yaxis: axis("row", { autorange: "reversed" }),
  }), CONFIG);
  $("block-note").textContent = (own ? "" : `${formatName()} has no scales of blocks; the map shows those of ${name}. `)
    + `Blocks along the last dimension; ${map.every === 1 ? "every row" : `one of ${map.every} rows`}, at most ${map.columns} blocks; empty: zeros, or values too small for a scale.`;
}

// Return the step between about six ticks of a color bar, all at whole numbers.
function wholeStep(numbers) {
  const known = numbers.filter((e) => e !== null);
  return Math.max(1, Math.ceil((Math.max(...known) - Math.min(...known)) / 6));
}

function drawNumbers(detail) {
  const names = Object.keys(Object.values(detail.formats)[0]?.numbers ?? {});
  const shares = new Set([
    "relative_bias", "gain", "underflow", "saturated", "clipping_error", "underflow_error", "grid_error", "axis_disagreement",
  ]);
  const head = make("tr");
  for (const name of ["format", "blocks", ...names]) head.append(make("th", name.replaceAll("_", " ")));
  const rows = Object.entries(detail.formats).map(([format, entry]) => {
    const row = make("tr");
    row.append(make("td", format), make("td", entry.axis + (entry.used_by ? ` (${entry.used_by})` : "")));
    for (const name of names) {
      const value = entry.numbers[name];
      row.append(make("td", name === "sqnr_db" ? decibel(value) : shares.has(name) ? percent(value) : show(value)));
    }
    return row;
  });
  $("detail-table").replaceChildren(head, ...rows);
}

const WORST_COLUMNS = ["tensor", "SQNR (dB)", "error by clipping", "error by underflow", "error by grid", "gain", "bias / mean magnitude"];
const sorting = { column: 1, down: false }; // the order of the table of the worst tensors

// Return the number by which a cell is sorted; unknown numbers come last.
function rank(value) {
  if (value === null || value === undefined) return sorting.down ? -Infinity : Infinity;
  return value === "inf" ? Number.MAX_VALUE : value === "-inf" ? -Number.MAX_VALUE : value;
}

function worstRows() {
  const [layer, text] = [$("worst-layer").value, $("worst-text").value.trim().toLowerCase()];
  const { column, down } = sorting;
  const rows = (data.worst[formatName()] ?? []).filter(([tensor]) =>
    (layer === "" || data.at[tensor][2] === Number(layer)) && data.tensors[tensor].toLowerCase().includes(text));
  rows.sort((a, b) => (column ? rank(a[column]) - rank(b[column]) : data.tensors[a[0]].localeCompare(data.tensors[b[0]], "en", { numeric: true })));
  return down ? rows.reverse() : rows;
}

function drawWorst() {
  $("worst-note").textContent = `${data.judged}, in ${formatName()}, the format chosen above; causes as shares of the squared error;`;
  const head = make("tr");
  WORST_COLUMNS.forEach((name, i) => {
    const cell = make("th", undefined, i === sorting.column ? { "aria-sort": sorting.down ? "descending" : "ascending" } : {});
    const button = make("button", name, { class: "sort" });
    button.onclick = () => {
      Object.assign(sorting, { column: i, down: i === sorting.column && !sorting.down });
      drawWorst();
      document.querySelectorAll("#worst-table button.sort")[i].focus();
    };
    cell.append(button);
    head.append(cell);
  });
  const [chosenRows, all] = [worstRows(), data.worst[formatName()] ?? []];
  $("worst-count").textContent = `${show(chosenRows.length)} of ${show(all.length)} rows`;
  const rows = chosenRows.map(([tensor, sqnr, ...numbers]) => {
    const row = make("tr", undefined, { class: "open", tabindex: 0 });
    for (const text of [data.tensors[tensor], decibel(sqnr), ...numbers.map(percent)]) row.append(make("td", text));
    row.onclick = () => jumpTo(tensor);
    row.onkeydown = (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      jumpTo(tensor);
    };
    return row;
  });
  $("worst-table").replaceChildren(head, ...rows);
}

// Show a tensor, and its cell in the map. `format` is set if a warning about a format links to it.
function goTo(tensor, format) {
  const [run, iteration, , place] = data.at[tensor];
  const at = data.formats.findIndex(({ name }) => name === format);
  if (at >= 0) $("format").value = at;
  $("run").value = run;
  iterations();
  $("iteration").value = iteration;
  $("shown").value = data.results[place] ? "results" : "operands";
  opened = tensor;
  if (data.formats.length) drawForFormat();
  open(tensor);
}

// Draw what depends on the format, unless it was last drawn for the same format.
let drawnFormat = null;
function drawForFormat() {
  if (drawnFormat === formatIndex()) return drawHeatmap();
  drawnFormat = formatIndex();
  for (const section of SECTIONS) if (section.follows) section.draw();
}

function jumpTo(tensor, format) {
  goTo(tensor, format);
  $("detail").scrollIntoView();
}

// Draw the map after a choice of run, iteration or kind of tensors. Open the tensor in the same cell
// as the open one, or the one with the lowest SQNR if that cell is empty.
function follow() {
  drawHeatmap();
  const { run, iteration } = chosen();
  const [at, shown] = [6 + 2 * formatIndex(), columns()];
  const [, , layer, place] = opened === null ? [] : data.at[opened];
  const here = data.cells.filter((c) => c[0] === run && c[1] === iteration && shown.includes(c[3]) && c[at] !== null);
  const height = (c) => (typeof c[at - 1] === "number" ? c[at - 1] : Infinity);
  const same = here.find((c) => c[2] === layer && c[3] === place);
  const cell = same ?? here.reduce((a, b) => (a && height(a) <= height(b) ? a : b), undefined);
  if (cell) open(cell[at]);
}

// Return one line or row of marks per format. A triangle above all numbers stands for no error.
function sqnrTraces(medians, x, mode) {
  const finite = medians.flat().filter((value) => typeof value === "number");
  const top = finite.reduce((a, b) => Math.max(a, b), finite[0] ?? 0);
  const exact = top + 0.06 * Math.max(top - finite.reduce((a, b) => Math.min(a, b), top), 1);
  return data.formats.map((format, i) => ({
    type: "scatter", mode, name: plain(format.name), line: { color: onPage(format.color), width: 1.5 }, x,
    y: medians[i].map((value) => (value === "inf" ? exact : typeof value === "number" ? value : null)),
    marker: { size: 7, color: onPage(format.color), symbol: medians[i].map((value) => (value === "inf" ? "triangle-up" : "circle")) },
    text: medians[i].map((value) => decibel(value) + (typeof value === "number" ? " dB" : "")),
    hovertemplate: "%{x}: %{text}",
  }));
}

// Return the y axis; it has no tick labels if only triangles are drawn, whose height is no SQNR.
const sqnrAxis = (medians, title) => axis(title, { showticklabels: medians.flat().some((value) => typeof value === "number") });

function drawFormats() {
  $("formats-note").textContent = `Medians over runs, iterations and layers (or places), of ${data.judged}; a triangle above all numbers means no error.`;
  const places = data.judged_places.map(plain);
  const { more, legend } = legendAbove(data.formats.map(({ name }) => name));
  Plotly.newPlot("by-place", sqnrTraces(data.by_place, places, "markers"), layout({
    height: 400 + more, xaxis: { tickangle: -45, automargin: true, type: "category" }, yaxis: sqnrAxis(data.by_place, "SQNR (dB), median"), legend,
  }), CONFIG);
  Plotly.newPlot("by-layer", sqnrTraces(data.by_layer, data.layers, "lines+markers"), layout({
    height: 320 + more, xaxis: axis("layer", { dtick: Math.ceil(data.layers.length / 20) }), yaxis: sqnrAxis(data.by_layer, "SQNR (dB), median of all tensors"),
    legend,
  }), CONFIG);
}

// Return the layers of one group of rows of `by_type` for which a condition holds, as text; it is empty if none do.
function layersWhere(rows, condition) {
  const chosen = rows.filter(condition).map(([, , layer]) => layerName(layer));
  return !chosen.length || chosen.length === rows.length ? "" : ` (${chosen.join(", ")})`;
}

// Return the note below the heading of "Types": what is drawn, in which iterations, and what is equal or not finite.
function typesNote(groups) {
  const iterations = new Set(data.compared_iterations.map(([, iteration]) => iteration));
  const when = iterations.size === 1 ? `iteration ${[...iterations][0]}` : data.compared_iterations.map((pair) => pair.join(" ")).join(", ");
  let note = `Median of ‖x - x0‖ / ‖x0‖ in the last iteration that a type shares with the run without quantization (${when}); `
    + "x0 is the same tensor in the run without quantization; dashed: gradients, dotted: weights.";
  const equal = groups.filter(({ rows }) => rows.some(([, , , value]) => value === 0))
    .map(({ name, rows }) => name + layersWhere(rows, ([, , , value]) => value === 0));
  const bad = groups.filter(({ rows }) => rows.some((row) => row[4])).map(({ name, rows }) => {
    const [infinite, all] = [4, 5].map((i) => rows.reduce((sum, row) => sum + row[i], 0));
    return `${name}${layersWhere(rows, (row) => row[4])}, ${show(infinite)} of ${show(all)} tensors`;
  });
  if (equal.length) note += ` Not drawn, because equal to the run without quantization: ${equal.join("; ")}.`;
  if (bad.length) note += ` Not finite, because a NaN or Inf differs from x0, or only x0 is zero: ${bad.join("; ")}; a triangle above all numbers: the median is not finite.`;
  return note;
}

function drawTypes() {
  if (!data.by_type.length) {
    $("types-note").textContent = "Nothing to compare: collect a run without quantization (bf16) and other runs with the same seed.";
    return;
  }
  const groups = new Map();
  for (const row of data.by_type) {
    const name = `${row[0]}, ${KINDS[row[1]]}`;
    if (!groups.has(name)) groups.set(name, { name, type: row[0], kind: row[1], rows: [] });
    groups.get(name).rows.push(row);
  }
  $("types-note").textContent = typesNote([...groups.values()]);
  const dash = { forward: "solid", gradient: "dash", weight: "dot" };
  const colors = Object.fromEntries(data.runs.map((run) => [run.type, run.color]));
  const finite = data.by_type.map(([, , , value]) => value).filter((value) => value > 0);
  const [top, bottom] = [Math.max, Math.min].map((f) => finite.reduce((a, b) => f(a, b), finite[0] ?? 1));
  const above = top * Math.max(top / bottom, 2) ** 0.08;
  const height = (value) => (value === "inf" ? above : value > 0 ? value : null);
  const drawn = [...groups.values()].map(({ name, type, kind, rows }) => ({
    type: "scatter", mode: "lines+markers", name: plain(name), line: { color: onPage(colors[type]), dash: dash[kind], width: 1.5 },
    x: rows.map((row) => row[2]), y: rows.map((row) => height(row[3])),
    marker: { size: 7, symbol: rows.map((row) => (row[3] === "inf" ? "triangle-up" : "circle")) },
    text: rows.map((row) => (row[3] === "inf" ? "not finite" : show(row[3]))), hovertemplate: "layer %{x}: %{text}",
  })).filter(({ y }) => y.some((value) => value !== null));
  const numbers = logAxis("‖x - x0‖ / ‖x0‖", finite, { showticklabels: finite.length > 0 });
  Plotly.newPlot("by-type", drawn, layout({
    height: 400, xaxis: axis("layer", { dtick: Math.ceil(data.layers.length / 20) }), yaxis: numbers,
  }), CONFIG);
}

function drawHeader() {
  $("origin").textContent = `${data.origin}, ${show(data.values)} values, in ${data.folder}. Formats are judged by ${data.judged}.`
    + (data.repeats ? ` ${data.repeats}.` : "");
  $("alarm").textContent = data.alarm;
  const [details, all] = [Object.keys(data.details).length, data.tensors.length];
  $("opened-note").textContent = `${details < all ? show(details) : "all"} of ${show(all)} tensors can be opened`;
}

function drawVerdict() {
  $("sentences").replaceChildren(...data.verdict.map(({ format, text, tensor }) => {
    const item = make("li", `${format}: ${text} `);
    if (tensor !== null) {
      const button = make("button", "show it", { class: "tensor", "aria-label": `show the lowest tensor in ${format}` });
      button.onclick = () => jumpTo(tensor, format);
      item.append(button);
    }
    return item;
  }));
}

function drawWarnings() {
  $("cautions").replaceChildren(...(data.cautions.length ? data.cautions.map((warning) => {
    const item = make("li", warning.text);
    const more = make("details");
    const named = warning.tensors.length;
    more.append(make("summary", named < warning.all ? `open one of the first ${named} of ${show(warning.all)}` : `open ${named === 1 ? "it" : `one of ${named}`}`));
    for (const tensor of warning.tensors) {
      const button = make("button", data.tensors[tensor], { class: "tensor" });
      button.onclick = () => jumpTo(tensor, warning.format);
      more.append(button);
    }
    item.append(more);
    return item;
  }) : [make("li", "none: no NaN, no Inf, no format loses more than the limits allow")]));
}

// Return the name of a run in a legend; the ID is left out if the type is enough.
function runName(run) {
  const several = data.runs.filter(({ type }) => type === run.type).length > 1;
  return several ? `${run.type} ${run.id || "(unknown run)"}` : run.type;
}

// Return the traces of one run: loss and gradient norm, with marks where tensors were collected or
// a number is not finite.
function lossTraces(run, entry) {
  const [name, shade] = [plain(runName(run)), onPage(run.color)];
  const [collected, broken] = [new Set(entry.collected), new Set(entry.broken)];
  const at = data.runs.indexOf(run);
  const traces = [];
  for (const [key, yaxis, words] of [["loss", "y", "loss"], ["grad_norm", "y2", "gradient norm"]]) {
    const y = entry[key].map((value) => (typeof value === "number" ? value : null));
    traces.push({
      type: "scatter", mode: "lines", x: entry.iteration, y, yaxis, name, legendgroup: name, showlegend: key === "loss",
      line: { color: shade, width: 1.5 }, hovertemplate: `${name}, iteration %{x}: ${words} %{y:.5g}<extra></extra>`,
    });
    const marked = entry.iteration.map((n, i) => [n, y[i]]).filter(([n, value]) => collected.has(n) && value !== null);
    traces.push({
      type: "scatter", mode: "markers", x: marked.map(([n]) => n), y: marked.map(([, value]) => value), yaxis, legendgroup: name, showlegend: false,
      customdata: marked.map(([n]) => [at, n]), marker: { size: 9, color: shade, line: { color: color("ink"), width: 1 } },
      hovertemplate: `${name}, iteration %{x}: ${words} %{y:.5g}; tensors were collected<extra></extra>`,
    });
    const known = y.filter((value) => value !== null);
    const top = known.reduce((a, b) => Math.max(a, b), known[0] ?? 1);
    const lost = entry.iteration.filter((n, i) => broken.has(n) && y[i] === null);
    if (lost.length) traces.push({
      type: "scatter", mode: "markers", x: lost, y: lost.map(() => top), yaxis, legendgroup: name, showlegend: false,
      marker: { size: 11, symbol: "x", color: color("alarm") }, hovertemplate: `${name}, iteration %{x}: ${words} is NaN or infinite<extra></extra>`,
    });
  }
  return traces;
}

function drawTraining() {
  const items = data.training.flatMap(({ notes }, i) => notes.map((note) => make("li", `${runName(data.runs[i])}: ${note}`)));
  $("events").replaceChildren(...items);
  const known = data.training.map((entry, i) => [data.runs[i], entry]).filter(([, entry]) => entry.iteration);
  const without = data.runs.filter((_, i) => !data.training[i].iteration).map(runName);
  const reason = "it was collected by an older version, or by a trainer that does not report its loss";
  if (!known.length) {
    Plotly.purge("loss");
    $("training-note").textContent = `The dump has no losses: ${reason}.`;
    return;
  }
  const marks = known.flatMap(([run, { kept }]) => kept.map((iteration) => ({ run, iteration })));
  $("training-note").textContent = "Circles: iterations with tensors; a click shows them in the map."
    + (marks.length ? " Dashed: the iteration at which a ring was written." : "")
    + (known.some(([, entry]) => entry.broken.length) ? " Crosses: NaN or infinite." : "")
    + (known.some(([, entry]) => entry.thinned) ? " Of long runs, the lowest and the highest values are drawn." : "")
    + (without.length ? ` Without losses: ${without.join(", ")}; ${reason}.` : "");
  const losses = known.flatMap(([, { loss }]) => loss).filter((value) => typeof value === "number");
  const [low, high] = [Math.min, Math.max].map((f) => losses.reduce((a, b) => f(a, b), losses[0] ?? 1));
  const norms = known.flatMap(([, entry]) => entry.grad_norm).filter((value) => typeof value === "number");
  const half = { domain: [0.45, 1] };
  const traces = known.flatMap(([run, entry]) => lossTraces(run, entry));
  const { more, legend } = legendAbove(known.map(([run]) => plain(runName(run))));
  Plotly.react("loss", traces, layout({
    height: 460 + more, xaxis: wholeAxis("iteration", known.flatMap(([, { iteration }]) => iteration), { anchor: "y2" }),
    yaxis: low > 0 && high > 10 * low ? logAxis("loss", losses, half) : axis("loss", half),
    yaxis2: logAxis("gradient norm", norms, { domain: [0, 0.37] }),
    legend, showlegend: known.length > 1,
    shapes: marks.map(({ iteration: x }) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: color("alarm"), dash: "dash", width: 1.5 } })),
  }), CONFIG);
  $("loss").removeAllListeners?.("plotly_click");
  $("loss").on("plotly_click", ({ points: [{ customdata }] }) => {
    if (!customdata || !data.formats.length) return;
    $("run").value = customdata[0];
    iterations();
    $("iteration").value = customdata[1];
    follow();
    $("map").scrollIntoView();
  });
}

// Return the maps of one layer: one list of bytes per head.
function unpackMaps(text, side) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return Array.from({ length: bytes.length / side ** 2 }, (_, i) => bytes.subarray(i * side ** 2, (i + 1) * side ** 2));
}

// Return a map of numbers. `value` converts a byte; 0 stands for a masked pixel. Several heads are averaged.
function averageMap(maps, side, value) {
  const mean = (i) => {
    const bytes = maps.map((map) => map[i]).filter(Boolean);
    return bytes.length ? bytes.reduce((sum, byte) => sum + value(byte), 0) / bytes.length : null;
  };
  return Array.from({ length: side }, (_, row) => Array.from({ length: side }, (_, column) => mean(row * side + column)));
}

function prepareAttention() {
  const { layers = [], why } = data.attention;
  $("attention-controls").hidden = Boolean(why);
  fillSelect("attention-layer", layers.map(({ layer }, i) => [i, layerName(layer)]), () => {
    prepareHeads();
    drawAttention();
  });
  if (layers.length) prepareHeads();
}

function prepareHeads() {
  const { heads } = data.attention.layers[Number($("attention-layer").value)];
  const before = $("attention-head").value;
  fillSelect("attention-head", [["mean", heads.length > 1 ? `mean of ${heads.length}` : "mean"], ...heads.map((head, i) => [i, head])], drawAttention);
  $("attention-head").value = before !== "" && before !== "mean" && Number(before) < heads.length ? before : before === "mean" ? "mean" : 0;
}

function drawAttention() {
  const { why, layers, source, tokens, all_layers: allLayers, recomputed } = data.attention;
  if (why) {
    $("attention-note").textContent = `No attention maps: ${why}.`;
    return;
  }
  const entry = layers[Number($("attention-layer").value)];
  const choice = $("attention-head").value;
  const name = data.formats.length ? formatName() : null;
  const operands = recomputed ? "query, key and the probabilities" : "the probabilities";
  $("attention-note").textContent = `${source}; first sequence, ${show(tokens)} tokens`
    + `${allLayers > layers.length ? `, ${layers.length} of ${allLayers} layers` : ""}`
    + `${entry.all_heads > entry.heads.length ? `, ${entry.heads.length} of ${entry.all_heads} heads` : ""}. `
    + "Each pixel is the mean of its visible pairs; 1 means uniform attention over all visible keys."
    + (entry.mask_known ? "" : " The mask of this layer is not known: probabilities of zero count as masked.")
    + (name ? ` Difference: ${operands} quantized to ${name}, minus the probabilities without quantization, in the same unit.` : "");
  drawMaps(entry, choice, name);
  if (!name) {
    for (const id of ["attention-moved", "attention-change"]) Plotly.purge(id);
    return;
  }
  drawMoved(layers, name);
}

function drawMaps(entry, choice, name) {
  const { side, heads } = entry;
  const chosenMaps = (text) => unpackMaps(text, side).filter((_, i) => choice === "mean" || i === Number(choice));
  const at = Array.from({ length: side }, (_, i) => Math.floor((i * data.attention.tokens) / side));
  const what = choice === "mean" ? "mean of the heads" : `head ${heads[Number(choice)]}, ${show(entry.entropy[Number(choice)])} bits`;
  const draw = (id, z, title, colorbar, reach, hover) => Plotly.react(id, [{
    type: "heatmap", z, x: at, y: at, colorscale: DIVERGING, zmin: -reach, zmax: reach, hoverongaps: false, colorbar, ...hover,
  }], layout({
    height: 380, title: { text: title, font: { size: 13 }, x: 0.01 }, plot_bgcolor: color("shade"),
    xaxis: axis("key", { showgrid: false }), yaxis: axis("query", { autorange: "reversed", showgrid: false }),
  }), CONFIG);
  const linear = averageMap(chosenMaps(entry.maps), side, (byte) => 2 ** (((byte - 1) / 254) * 10 - 5));
  const text = linear.map((row) => row.map((value) => (value === null ? "" : show(value))));
  const logs = linear.map((row) => row.map((value) => (value === null ? null : Math.log2(value))));
  const most = logs.flat().filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  const reach = Math.min(Math.max(Math.ceil(most[Math.floor(0.99 * (most.length - 1))] ?? 1), 1), 5);
  const tickvals = Array.from({ length: 2 * reach + 1 }, (_, i) => i - reach);
  const ticks = { tickvals, ticktext: tickvals.map((e) => (e < 0 ? `1/${2 ** -e}` : String(2 ** e))) };
  draw("attention-map", logs, `${layerName(entry.layer)}, ${what}: probability / uniform`, ticks, reach,
    { customdata: text, hovertemplate: "query %{y}, key %{x}: %{customdata} times uniform<extra></extra>" });
  if (!name) return;
  const { maps, most: largest } = entry.formats[name];
  const change = averageMap(chosenMaps(maps), side, (byte) => Math.sign(byte - 128) * ((byte - 128) / 127) ** 2 * largest);
  const sizes = change.flat().filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  const end = sizes[Math.floor(0.99 * (sizes.length - 1))] || largest || 1; // an outlier does not hide the rest
  draw("attention-change", change, `difference in ${plain(name)}${largest ? "" : ": none"}`, {}, end,
    { hovertemplate: "query %{y}, key %{x}: %{z:.3g}<extra></extra>" });
}

function drawMoved(layers, name) {
  const slots = layers.reduce((most, { heads }) => Math.max(most, heads.length), 0);
  const [z, sums] = ["moved", "sum_change"].map((number) =>
    layers.map(({ formats }) => formats[name][number].map((value) => (typeof value === "number" ? 100 * value : null))));
  const signed = (value) => `${value > 0 ? "+" : ""}${Number(value.toPrecision(2))} %`;
  const known = sums.flat().filter((value) => value !== null);
  const [least, most] = [Math.min, Math.max].map((f) => known.reduce((a, b) => f(a, b), known[0] ?? 0));
  $("attention-title").textContent = `Attention that ${name} moves to other keys: how much the keys gain that get more, as a share of a query's attention; a click shows the head.`
    + (known.length ? ` The sum of a query's probabilities changes by ${signed(least)} to ${signed(most)}, depending on the head, because quantized probabilities need not add up to 1.` : "");
  Plotly.react("attention-moved", [{
    type: "heatmap", z, x: Array.from({ length: slots }, (_, i) => i), y: layers.map(({ layer }) => layerName(layer)), xgap: 1, ygap: 1,
    colorscale: "Viridis", zmin: 0, zmax: z.flat().reduce((a, b) => Math.max(a, b), 0) || 1, colorbar: { title: { text: "%" }, ...barLength(layers.length) }, text: z.map((row) => row.map((value) => (value === null ? "" : value.toPrecision(2)))),
    customdata: layers.map(({ heads }, row) => heads.map((head, i) => [head, sums[row][i] === null ? "-" : signed(sums[row][i])])), hoverongaps: false,
    ...(layers.length * slots <= 200 ? { texttemplate: "%{text}", textfont: { size: 10 } } : {}),
    hovertemplate: "%{y} head %{customdata[0]}: %{text} % of a query's attention moves to other keys; sum of its probabilities: %{customdata[1]}<extra></extra>",
  }], layout({
    height: Math.min(130 + 24 * layers.length, 420), margin: { l: 46, r: 10, t: 34, b: 44 },
    xaxis: axis("head", { tickvals: layers[0].heads.map((_, i) => i), ticktext: layers[0].heads, showgrid: false }),
    yaxis: { autorange: "reversed", type: "category" },
  }), CONFIG);
  $("attention-moved").removeAllListeners?.("plotly_click");
  $("attention-moved").on("plotly_click", ({ points: [{ pointNumber: [layer, head] }] }) => {
    $("attention-layer").value = layer;
    prepareHeads();
    $("attention-head").value = head;
    drawAttention();
  });
}

// Line styles by the name of the gradient; the colors distinguish the modules.
const DASHES = {
  grad_output: "solid", grad_input: "dash", grad_weight: "dot", grad_query: "dashdot", grad_key: "longdash", grad_value: "longdashdot",
};
const MODULE_COLORS = ["#2a6f97", "#d1495b", "#3a8f5c", "#b8860b", "#7b4fa3", "#4d4d4d", "#d9770f", "#17a2a8"];
const ALL_LAYERS = -2; // the layer of a row of gradients that stands for all layers
const GRADIENT_NUMBERS = [
  ["rms", "rms, median", true], ["amax", "largest magnitude", true], ["underflow", "share that becomes zero", false], ["sqnr", "SQNR (dB), median", false],
];

function prepareGradients() {
  $("gradient-controls").hidden = !data.gradients.length;
  const numbers = GRADIENT_NUMBERS.slice(0, data.formats.length ? 4 : 2);
  fillSelect("gradient-number", numbers.map(([id, text]) => [id, text]), drawGradients);
  const runs = new Set(data.gradients.map(([run]) => run));
  fillSelect("gradient-run", data.runs.map((run, i) => [i, `${run.type} (${run.id || "unknown run"})`]).filter(([i]) => runs.has(i)), drawGradients);
  const layers = [...new Set(data.gradients.map((row) => row[2]))].filter((layer) => layer !== ALL_LAYERS).sort((a, b) => a - b);
  fillSelect("gradient-layer", [["", "all"], ...layers.map((l) => [l, layerName(l)])], drawGradients);
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

function drawGradients() {
  if (!data.gradients.length) {
    $("gradient-note").textContent = "No gradients were collected; collect backward operations too.";
    return;
  }
  const [id, title, logarithmic] = GRADIENT_NUMBERS.find(([name]) => name === $("gradient-number").value);
  const ofFormat = id === "underflow" || id === "sqnr";
  const column = { rms: 4, amax: 5, underflow: 6, sqnr: 7 }[id] + (ofFormat ? 2 * formatIndex() : 0);
  const layer = $("gradient-layer").value;
  const rows = data.gradients.filter((row) => row[0] === Number($("gradient-run").value) && (layer === "" || row[2] === Number(layer)));
  const several = new Set(rows.map((row) => row[1])).size > 1;
  const groups = new Map();
  for (const row of rows) {
    if (typeof row[column] !== "number") continue;
    const [place, x] = [row[3], several ? row[1] : row[2]];
    if (!groups.has(place)) groups.set(place, new Map());
    const points = groups.get(place);
    points.set(x, [...(points.get(x) ?? []), row[column]]);
  }
  const middle = id === "amax" ? (values) => values.reduce((a, b) => Math.max(a, b)) : median;
  const parts = [...new Set(data.gradients.map((row) => data.places[row[3]].replace(/ [^ ]*$/, "")))];
  const traces = [...groups].sort(([a], [b]) => a - b).map(([place, points]) => {
    const x = [...points.keys()].sort((a, b) => a - b);
    const [part, tensor] = [data.places[place].replace(/ [^ ]*$/, ""), data.places[place].split(" ").at(-1)];
    const shade = onPage(MODULE_COLORS[parts.indexOf(part) % MODULE_COLORS.length]);
    return {
      type: "scatter", mode: "lines+markers", name: labels[place], x, y: x.map((n) => middle(points.get(n))),
      marker: { size: 6, color: shade }, line: { width: 1.5, color: shade, dash: DASHES[tensor] ?? "solid" },
      hovertemplate: `${several ? "iteration" : "layer"} %{x}: %{y:.4g}`,
    };
  });
  const where = ofFormat ? ` in ${formatName()}, the format chosen above` : "";
  $("gradient-note").textContent = (several ? "" : "One iteration was collected, so the gradients are shown by layer. ")
    + (several && layer === "" ? `Over all layers${id === "amax" ? ": the largest" : ": the median"}${where}.` : where && `Values${where}.`);
  const { more, legend } = legendAbove(traces.map(({ name }) => name));
  Plotly.react("gradient-plot", traces, layout({
    height: 400 + more, xaxis: wholeAxis(several ? "iteration" : "layer", traces.flatMap(({ x }) => x)),
    yaxis: logarithmic ? logAxis(title, traces.flatMap(({ y }) => y)) : axis(title, id === "underflow" ? { tickformat: ".3~%", rangemode: "tozero" } : {}),
    legend,
  }), CONFIG);
}

// List the figures by folder. The program that draws them writes their names into the page.
function drawFigures() {
  const folders = [...new Set(figures.map(folderOf))];
  $("file-list").replaceChildren(...folders.map((folder) => {
    const item = make("li", folder ? `${folder}: ` : "");
    for (const path of figures.filter((each) => folderOf(each) === folder)) {
      const href = `./${path.split("/").map(encodeURIComponent).join("/")}`;
      item.append(make("a", path.slice(folder ? folder.length + 1 : 0), { href }), " ");
    }
    return item;
  }));
}

const folderOf = (path) => path.slice(0, Math.max(path.lastIndexOf("/"), 0));

function drawRuns() {
  $("cards").replaceChildren(...data.runs.map((run) => {
    const card = make("details");
    card.append(make("summary", `${run.type}: ${run.id || "(unknown run)"}, ${show(run.tensors)} tensors, ${run.ending}`));
    const table = make("table");
    for (const [name, value] of run.facts) {
      const row = make("tr");
      row.append(make("td", name.replaceAll("_", " ")), make("td", value));
      row.lastChild.style.textAlign = "left";
      table.append(row);
    }
    card.append(table, make("pre", run.audit.join("\n") || "The run card has no audit."));
    return card;
  }));
  const left = data.left_out.map((line) => make("p", `left out: ${line}`));
  if (data.missing) left.push(make("p", `${data.missing} files listed in an index are missing`));
  $("left-out").replaceChildren(...left);
}

function iterations() {
  const run = data.runs[Number($("run").value)];
  fillSelect("iteration", run.iterations.map((i) => [i, i]), follow);
  $("iteration").value = run.iterations.at(-1);
}

for (const { id, link, heading, body } of SECTIONS) {
  const section = make("section", undefined, { id });
  section.innerHTML = `<h2>${heading}</h2>${body}`;
  $("sections").append(section);
  $("links").append(make("a", link, { href: `#${id}` }), " ");
}
fillSelect("format", data.formats.map((format, i) => [i, format.name]), () => {
  drawForFormat();
  remember();
  if (opened !== null) open(opened);
});
fillSelect("run", data.runs.map((run, i) => [i, `${run.type} (${run.id || "unknown run"})`]), () => {
  iterations();
  follow();
});
const kinds = ["operands", "results"].filter((name) => data.results.includes(name === "results"));
fillSelect("shown", kinds.map((name) => [name, `${name} of matmuls`]), follow);
iterations();
fillSelect("worst-layer", [["", "all"], ...data.layers.map((l) => [l, layerName(l)])], drawWorst);
$("worst-text").oninput = drawWorst;
prepareAttention();
prepareGradients();
drawHeader();
if (data.formats.length) drawnFormat = formatIndex();
for (const section of SECTIONS) if (data.formats.length || !section.formats) section.draw();
$("heatmap").onkeydown = step;
const lowest = data.formats.length ? data.worst[formatName()]?.[0] : undefined;
if (!recall() && lowest) goTo(lowest[0]);
window.addEventListener("hashchange", recall);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const section of SECTIONS) if (data.formats.length || !section.formats) section.draw();
  if (opened !== null) open(opened);
});
document.body.dataset.ready = "yes";
