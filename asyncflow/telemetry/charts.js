"use strict";
/* Charts of all pages: the lines of metrics, and the Gantt chart of what every worker did. Needs plotly.js. */
const darkness = matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const faded = (hex, alpha) => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;
const look = () => ({
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
  font: { family: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", size: 12, color: colour("--soft") },
  hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink"), size: 12 }, align: "left" },
});
const axis = (more) => ({ gridcolor: colour("--grid"), linecolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true, ...more });
const seconds = (amount) => amount < 1 ? `${(amount * 1000).toFixed(1)} ms` : `${amount.toFixed(2)} s`;

/* An element with a class and text or other elements in it: text stays text, whatever a model has written. */
function element(tag, name, ...content) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...content);
  return made;
}

/* ---- line charts ---- */

let shownCharts = [];

function drawChart(card, chart) {
  const steps = chart.traces.flatMap((trace) => trace.x);
  const few = steps.reduce((most, step) => Math.max(most, step), -Infinity) - steps.reduce((least, step) => Math.min(least, step), Infinity) < 8;
  const layout = {
    ...look(), margin: { l: 8, r: 8, t: 8, b: 8 }, hovermode: "x unified", showlegend: chart.traces.some((trace) => trace.showlegend),
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    xaxis: axis({ title: { text: "step", standoff: 4 }, tickformat: "d", ...(few ? { dtick: 1 } : {}) }), yaxis: axis({ nticks: 5, ...chart.yaxis }),
  };
  Plotly.react(card.querySelector(".plot"), chart.traces, layout, { displayModeBar: false, responsive: true });
}

/* Cards are drawn when they come into view, or all at once: a page that is opened has to draw few of them. */
const whenSeen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    target.isSeen = isIntersecting;
    if (isIntersecting && target.chart) { drawChart(target, target.chart); target.chart = null; }
  }
}, { rootMargin: "200px" });

function drawCharts(charts, { place = document.getElementById("charts"), isLazy = false } = {}) {
  if (place.id === "charts") shownCharts = charts;
  while (place.children.length > charts.length) { whenSeen.unobserve(place.lastChild); place.lastChild.remove(); }
  charts.forEach((chart, i) => {
    let card = place.children[i];
    if (!card) {
      card = element("section", "card", element("h3"), element("div", "plot"), element("p", "note"));
      place.append(card);
      if (isLazy) whenSeen.observe(card);
    }
    card.querySelector("h3").textContent = chart.title;
    card.querySelector(".note").textContent = chart.note;
    if (!isLazy || card.isSeen) drawChart(card, chart);
    else card.chart = chart;
  });
}

darkness.addEventListener("change", () => drawCharts(shownCharts));

/* ---- the Gantt chart ---- */

/* Of a chart whose levels are all here: the finest one with few enough bars in view, and the positions of those bars. A part on each
   side is drawn too, for moving. */
function inView(gantt, lo, hi) {
  const reach = (hi - lo) / 2;
  for (const [number, level] of gantt.levels.entries()) {
    const shown = [];
    for (let i = 0; i < level.start.length; i++) {
      if (level.start[i] < hi + reach && level.start[i] + level.seconds[i] > lo - reach) shown.push(i);
    }
    if (shown.length <= gantt.bars_in_view || number === gantt.levels.length - 1) return { level, shown, isFinest: number === 0 };
  }
  return { level: null, shown: [], isFinest: true };
}

const ganttHeight = (numLanes) => 76 + numLanes * (numLanes > 24 ? 14 : numLanes > 12 ? 28 : 52);
const ganttRange = (numLanes) => [numLanes - 0.42, -0.56];

/* Place and thickness of a bar, in lanes: what goes on beside a lane is a thin line below it. */
const ganttRow = (lane, numLanes) => lane >= numLanes ? [lane - numLanes + 0.4, 0.12] : [lane, 0.62];

/* The same bars on a canvas, which needs no library: they are seen until that has begun. */
function sketchGantt(place, gantt, level, { lo, hi }) {
  const canvas = element("canvas", "sketch"), brush = canvas.getContext("2d"), scale = devicePixelRatio || 1;
  const numLanes = gantt.lanes.length, width = place.clientWidth, height = ganttHeight(numLanes), top = 22, bottom = height - 46;
  canvas.width = width * scale; canvas.height = height * scale;
  canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
  brush.scale(scale, scale);
  brush.font = `${numLanes > 24 ? 10 : 13}px system-ui, sans-serif`;
  const left = Math.max(...gantt.lanes.map((lane) => brush.measureText(lane).width)) + 14, right = width - 12;
  const [last, first] = ganttRange(numLanes), row = (bottom - top) / (last - first);
  const x = (moment) => Math.min(Math.max(left + (right - left) * (moment - lo) / (hi - lo), left), right), y = (lane) => top + (lane - first) * row;
  brush.fillStyle = colour("--ink"); brush.textAlign = "right"; brush.textBaseline = "middle";
  gantt.lanes.forEach((lane, i) => brush.fillText(lane, left - 6, y(i)));
  for (let i = 0; i < level.start.length; i++) {
    const from = x(level.start[i]), to = x(level.start[i] + level.seconds[i]), [middle, thickness] = ganttRow(level.lane[i], numLanes);
    if (to <= left || from >= right) continue;
    const state = gantt.states[level.state[i]];
    brush.fillStyle = state.wait ? faded(state.colour, 0.3) : state.colour;
    brush.fillRect(from, y(middle - thickness / 2), Math.max(to - from, 0.5), thickness * row);
  }
  place.replaceChildren(canvas);
}

class Gantt {
  /* `look(lo, hi)`: the level and bars to be drawn there, at once. `moved`: told of each new view. */
  constructor(gantt, lookAt, moved = () => {}) {
    this.gantt = gantt;
    this.lookAt = lookAt;
    this.moved = moved;
    this.view = { lo: gantt.first_view[0], hi: gantt.first_view[1] };
    this.hidden = new Set();
    this.plot = document.getElementById("gantt");
    this.drawLegend();
    this.draw();
    const middle = () => (this.view.lo + this.view.hi) / 2, half = () => (this.view.hi - this.view.lo) / 2;
    this.buttons = {
      all: () => this.show(0, this.gantt.wall), few: () => this.show(...this.gantt.first_view),
      back: () => this.show(this.view.lo - half(), this.view.hi - half()), forth: () => this.show(this.view.lo + half(), this.view.hi + half()),
      in: () => this.show(middle() - half() / 2, middle() + half() / 2), out: () => this.show(middle() - 2 * half(), middle() + 2 * half()),
    };
    for (const [name, act] of Object.entries(this.buttons)) document.getElementById(`gantt-${name}`).addEventListener("click", act);
    this.plot.on("plotly_doubleclick", this.buttons.all);
    this.plot.on("plotly_relayout", (change) => { if ("xaxis.range[0]" in change) this.show(change["xaxis.range[0]"], change["xaxis.range[1]"]); });
    darkness.addEventListener("change", () => this.draw());
  }

  show(lo, hi) {
    const width = Math.min(Math.max(hi - lo, 1e-5), this.gantt.wall);
    this.view.lo = Math.min(Math.max(lo, 0), this.gantt.wall - width);
    this.view.hi = this.view.lo + width;
    this.draw();
    this.moved(this.view);
  }

  hoverText(level, i) {
    const { lanes, states } = this.gantt;
    const parts = [`<b>${lanes[level.lane[i] % lanes.length]}</b> ${states[level.state[i]].label}`,
      `${seconds(level.seconds[i])}, from ${level.start[i].toFixed(3)} s`];
    const known = [["step", level.step[i], 0], ["version", level.version[i], 0], ["rows", level.rows[i], 1], ["tokens", level.tokens[i], 1]];
    const told = known.filter(([, amount, least]) => amount >= least).map(([name, amount]) => `${name} ${amount.toLocaleString("en")}`);
    if (told.length) parts.push(told.join(", "));
    if (level.count[i] > 1) parts.push(`${level.count[i]} spans`);
    return parts.join("<br>");
  }

  bars(level, shown) {
    // An edge tells neighbours of one task apart; among many thin bars it would hide them.
    const edge = { width: shown.length < 600 ? 0.7 : 0, color: colour("--card") };
    const numLanes = this.gantt.lanes.length;
    const traces = this.gantt.states.map((state) => ({
      type: "bar", orientation: "h", name: state.label, visible: !this.hidden.has(state.label), x: [], y: [], base: [], width: [], hovertext: [],
      hovertemplate: "%{hovertext}<extra></extra>",
      marker: state.wait
        ? { color: faded(state.colour, 0.18), line: { width: 0 }, pattern: { shape: "/", fgcolor: faded(state.colour, 0.75), bgcolor: faded(state.colour, 0.18), size: 6, solidity: 0.22, fillmode: "overlay" } }
        : { color: state.colour, line: edge },
    }));
    for (const i of shown) {
      const trace = traces[level.state[i]], [middle, thickness] = ganttRow(level.lane[i], numLanes);
      trace.x.push(level.seconds[i]); trace.base.push(level.start[i]);
      trace.y.push(middle); trace.width.push(thickness);
      trace.hovertext.push(this.hoverText(level, i));
    }
    return traces;
  }

  marks() {
    const { gantt, view } = this, numLanes = gantt.lanes.length;
    const steps = gantt.steps.filter(([, end]) => end >= view.lo && end <= view.hi);
    const every = Math.ceil(steps.length / 14);
    const labelled = steps.filter((_, i) => i % every === 0);
    const lines = { type: "scatter", mode: "lines", x: [], y: [], hoverinfo: "skip", showlegend: false, line: { color: colour("--ink"), width: 1, dash: "dot" }, opacity: 0.55 };
    for (const [, end] of steps.length > 120 ? labelled : steps) { lines.x.push(end, end, null); lines.y.push(-0.5, numLanes - 0.42, null); }
    const inside = gantt.installs.filter(([, end]) => end >= view.lo && end <= view.hi);
    const installs = inside.length > Math.min(80 * numLanes, 2000) ? [] : inside;
    const isRoomy = installs.length <= Math.min(24 * numLanes, 200);
    const triangles = { type: "scatter", mode: isRoomy ? "markers+text" : "markers", x: installs.map((mark) => mark[1]), y: installs.map((mark) => mark[0] - 0.4), showlegend: false,
      marker: { symbol: "triangle-down", size: 8, color: "#009E73" }, hovertemplate: "%{hovertext}<extra></extra>",
      text: installs.map(([, , version]) => version < 0 ? "" : ` v${version}`), textposition: "middle right", textfont: { size: 10, color: colour("--soft") },
      hovertext: installs.map(([lane, end, version]) => `<b>${gantt.lanes[lane]}</b> has ${version < 0 ? "new weights" : "version " + version}<br>at ${end.toFixed(3)} s`) };
    const labels = labelled.map(([step, end]) => ({ x: end, y: 1, yref: "paper", yanchor: "bottom", xanchor: "right", showarrow: false, text: step < 0 ? "step" : `step ${step}`, font: { size: 11 } }));
    return { traces: [lines, triangles], labels };
  }

  draw() {
    const { gantt, view } = this, numLanes = gantt.lanes.length;
    const { level, shown, isFinest } = this.lookAt(view.lo, view.hi);
    const bars = level ? this.bars(level, shown) : [];
    const marks = this.marks();
    const layout = {
      ...look(), height: ganttHeight(numLanes), margin: { l: 8, r: 12, t: 22, b: 8 }, barmode: "overlay", showlegend: false,
      hovermode: "closest", dragmode: "zoom", annotations: marks.labels,
      xaxis: axis({ range: [view.lo, view.hi], title: { text: "seconds since the first span", standoff: 6 }, zeroline: false, exponentformat: "none", separatethousands: true }),
      yaxis: axis({ range: ganttRange(numLanes), tickvals: gantt.lanes.map((_, i) => i), ticktext: gantt.lanes, fixedrange: true, showgrid: false, zeroline: false, tickfont: { size: numLanes > 24 ? 10 : 13, color: colour("--ink") } }),
    };
    Plotly.react(this.plot, [...bars, ...marks.traces], layout, { displayModeBar: false, responsive: true, doubleClick: false });
    document.getElementById("gantt-view").textContent = `${view.lo.toFixed(2)} s to ${view.hi.toFixed(2)} s of ${gantt.wall.toFixed(2)} s`;
    document.getElementById("gantt-level").textContent = level && level.resolution > 0
      ? `Here, spans shorter than ${seconds(level.resolution)} are grouped by task; ` + (isFinest ? "trace.json holds each one (open it in ui.perfetto.dev)." : "zoom in for more.")
      : "Every span is drawn.";
  }

  drawLegend() {
    const legend = document.getElementById("gantt-legend");
    legend.replaceChildren(...this.gantt.states.map((state) => {
      const swatch = element("span", "swatch fill" + (state.wait ? " wait" : ""));
      swatch.style.setProperty("--c", state.colour);
      const entry = element("button", "", swatch, state.label);
      entry.title = "show or hide"; entry.ariaPressed = String(!this.hidden.has(state.label));
      entry.addEventListener("click", () => {
        if (!this.hidden.delete(state.label)) this.hidden.add(state.label);
        entry.ariaPressed = String(!this.hidden.has(state.label));
        this.draw();
      });
      return entry;
    }));
  }
}
