"use strict";
// The data, Plotly and the script of the page are compressed, because the file is often sent by mail.
async function unpack(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function run(text) {
  const script = document.createElement("script");
  script.textContent = text;
  document.body.append(script);
}

Promise.all(["data", "plotly", "script"].map(unpack)).then(([data, plotly, script]) => {
  window.reportData = JSON.parse(data);
  run(plotly);
  run(script);
});
