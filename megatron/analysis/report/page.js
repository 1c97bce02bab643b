"use strict";
// Everything on the page comes from the JSON in #data, which unpack.js unpacks. Its texts are set as text, never as markup.
// Plotly interprets some tags, so that every text of the data is escaped by `plain` for it.
const data = window.reportData;
const $ = (id) => document.getElementById(id);
const CONFIG = { responsive: true, displaylogo: false };
const NARROW = 700; // width in pixels below which the cells of the map have no numbers
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const MAGMA = [[0, "#000004"], [0.25, "#51127c"], [0.5, "#b73779"], [0.75, "#fc8961"], [1, "#fcfdbf"]];
const KINDS = { forward: "activations", weight: "weights", gradient: "gradients" };
let opened = null; // the tensor whose details are shown

// The sections in the order of the page. A section without `formats` is drawn also if the report
// compares no format.
const SECTIONS = [
  {
    id: "verdict", link: "Verdict", heading: "Verdict", formats: true, draw: drawVerdict,
    body: `<p class="note">formats by their median SQNR; 6 dB are one bit</p><ol id="sentences"></ol>`,
  },
  { id: "warnings", link: "Warnings", heading: "Warnings", body: `<ol id="cautions"></ol>`, draw: drawWarnings },
  {
    id: "map", link: "Layer by tensor", heading: "Signal to quantization noise, layer by tensor", formats: true, draw: drawHeatmap,
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
    id: "worst", link: "Worst tensors", heading: "Worst tensors first", formats: true, draw: drawWorst,
    body: `
      <p class="note"><span id="worst-note"></span> click a row to open it.</p>
      <div class="scroll tall"><table id="worst-table"></table></div>`,
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
];

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
  const few = data.layers.length * shown.length <= 900 && window.innerWidth >= NARROW;
  const trace = {
    type: "heatmap", z: z.map((row) => row.map(height)), x: shown.map((i) => labels[i]),
    y: data.layers.map((l) => (l < 0 ? "?" : `L${l}`)), text, hovertext: hover, customdata: tensor, xgap: 1, ygap: 1, colorscale: "Viridis",
    zmin: bottom, zmax: top, colorbar: { title: { text: "dB" } },
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
  if (data.formats.length) follow();
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
    xaxis: axis("magnitude, from", ticks), yaxis: axis("values in a binade"), legend: { orientation: "h", y: -0.22 },
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

function drawWorst() {
  $("worst-note").textContent = `${data.judged}, in ${formatName()}, the format chosen above; causes as shares of the squared error;`;
  const head = make("tr");
  const causes = ["clipping", "underflow", "grid"].map((cause) => `error by ${cause}`);
  for (const name of ["tensor", "SQNR (dB)", ...causes, "gain", "bias / mean magnitude"]) head.append(make("th", name));
  const rows = (data.worst[formatName()] ?? []).map(([tensor, sqnr, ...numbers]) => {
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
  if (data.formats.length) {
    drawHeatmap();
    drawWorst();
  }
  open(tensor);
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
    type: "scatter", mode, name: plain(format.name), line: { color: format.color, width: 1.5 }, x,
    y: medians[i].map((value) => (value === "inf" ? exact : typeof value === "number" ? value : null)),
    marker: { size: 7, color: format.color, symbol: medians[i].map((value) => (value === "inf" ? "triangle-up" : "circle")) },
    text: medians[i].map((value) => decibel(value) + (typeof value === "number" ? " dB" : "")),
    hovertemplate: "%{x}: %{text}",
  }));
}

// Return the y axis; it has no tick labels if only triangles are drawn, whose height is no SQNR.
const sqnrAxis = (medians, title) => axis(title, { showticklabels: medians.flat().some((value) => typeof value === "number") });

function drawFormats() {
  $("formats-note").textContent = `Medians over runs, iterations and layers (or places), of ${data.judged}; a triangle above all numbers means no error.`;
  const places = data.judged_places.map(plain);
  Plotly.newPlot("by-place", sqnrTraces(data.by_place, places, "markers"), layout({
    height: 400, xaxis: { tickangle: -45, automargin: true, type: "category" }, yaxis: sqnrAxis(data.by_place, "SQNR (dB), median"), legend: { orientation: "h", y: 1.12 },
  }), CONFIG);
  Plotly.newPlot("by-layer", sqnrTraces(data.by_layer, data.layers, "lines+markers"), layout({
    height: 320, xaxis: axis("layer", { dtick: Math.ceil(data.layers.length / 20) }), yaxis: sqnrAxis(data.by_layer, "SQNR (dB), median of all tensors"),
    legend: { orientation: "h", y: 1.15 },
  }), CONFIG);
}

function drawTypes() {
  if (!data.by_type.length) {
    $("types-note").textContent = "Nothing to compare: collect a run without quantization (bf16) and other runs with the same seed.";
    return;
  }
  $("types-note").textContent = "Median of ‖x - x0‖ / ‖x0‖ in the last iteration; x0 is the same tensor in the run without quantization; dashed: gradients, dotted: weights.";
  const dash = { forward: "solid", gradient: "dash", weight: "dot" };
  const colors = Object.fromEntries(data.runs.map((run) => [run.type, run.color]));
  const groups = new Map();
  for (const [type, kind, layer, value] of data.by_type) {
    const key = `${type}, ${KINDS[kind]}`;
    if (!groups.has(key)) groups.set(key, {
      type: "scatter", mode: "lines+markers", name: plain(key), x: [], y: [], line: { color: colors[type], dash: dash[kind], width: 1.5 },
    });
    groups.get(key).x.push(layer);
    groups.get(key).y.push(value > 0 ? value : null);
  }
  const drawn = [...groups.values()].filter((group) => group.y.some((value) => value !== null));
  const equal = [...groups.values()].filter((group) => !drawn.includes(group)).map((group) => group.name);
  if (equal.length) $("types-note").textContent += ` Not drawn, because equal to the run without quantization: ${equal.join("; ")}.`;
  Plotly.newPlot("by-type", drawn, layout({
    height: 400, xaxis: axis("layer", { dtick: Math.ceil(data.layers.length / 20) }), yaxis: axis("‖x - x0‖ / ‖x0‖", { type: "log" }),
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
  if (data.missing) left.push(make("p", `${data.missing} files that an index names are not there`));
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
  drawHeatmap();
  drawWorst();
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
drawHeader();
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
