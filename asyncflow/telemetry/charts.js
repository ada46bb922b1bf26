"use strict";
/* What all pages have in common, and the lines of metrics, which need plotly.js. */
const darkness = matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const faded = (hex, alpha) => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;
const look = () => ({
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
  font: { family: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", size: 12, color: colour("--soft") },
  hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink"), size: 12 }, align: "left" },
});
const axis = (more) => ({ gridcolor: colour("--grid"), linecolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true, ...more });

/* An element with a class and text or other elements in it: text stays text, whatever a model has written. */
function element(tag, name, ...content) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...content);
  return made;
}

/* ---- line charts ---- */

function drawChart(card, chart) {
  card.drawn = chart;
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

darkness.addEventListener("change", () => {
  for (const card of document.querySelectorAll("section.card")) if (card.drawn) drawChart(card, card.drawn);
});
