"use strict";
/* The live page: what is new of a run comes as server-sent events; parts of the Gantt chart, charts and samples are asked for.
   The key is in the address behind "#", which browsers send to nobody; from there it goes into this tab's own storage. */
const byId = (id) => document.getElementById(id);
const address = new URLSearchParams(location.hash.slice(1));
if (address.get("key")) {
  sessionStorage.setItem("key", address.get("key"));
  address.delete("key");
  history.replaceState(null, "", `#${address}`);
}
const key = sessionStorage.getItem("key") || "";
const MOST_BARS = 2500, QUIET_MS = 1000;
/* plotly.js takes a second to begin, in which the page answers nobody: it does so when a chart that needs it comes into view, or when
   nobody has touched the page for a while. */
let beginPlotly, touched = 0;
const plotly = new Promise((resolve) => {
  beginPlotly = () => {
    beginPlotly = () => {};
    const script = element("script");
    script.src = "plotly.js";
    script.addEventListener("load", resolve);
    document.head.append(script);
  };
});

const whenNear = new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting)) beginPlotly(); }, { rootMargin: "200px" });

/* What is above the charts is there. */
function letPlotlyBegin() {
  whenNear.observe(byId("charts"));
  touched = performance.now();
  const onceQuiet = () => { const left = touched + QUIET_MS - performance.now(); if (left <= 0) beginPlotly(); else setTimeout(onceQuiet, left); };
  onceQuiet();
  letPlotlyBegin = () => {};
}

for (const kind of ["pointermove", "pointerdown", "wheel", "keydown"]) addEventListener(kind, () => { touched = performance.now(); }, { passive: true });
let runs = [], run = null, listening = null, gantt = null, part = null, numSamples = 0, groupSteps = null;

function ask(path, params = {}, signal = undefined) {
  const pairs = Array.isArray(params) ? params : Object.entries(params);
  const query = new URLSearchParams(pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined));
  return fetch(`api/${path}?${query}`, { headers: { Authorization: `Bearer ${key}` }, cache: "no-store", signal });
}

async function answer(path, params) {
  const response = await ask(path, params);
  const content = await response.json();
  if (!response.ok) throw new Error(content.error ? content.error.message : response.statusText);
  return content;
}

let saidLast = ["connecting", ""];

function say(text, kind = "") {
  if (kind !== "lost") saidLast = [text, kind];
  byId("status").textContent = text;
  byId("status").className = kind;
}

/* ---- what is new ---- */

/* Hand on what comes of a path, until it is stopped; a connection that is lost is made again. */
async function follow(path, params, take, stopped) {
  let isLost = false;
  while (!stopped.signal.aborted) {
    try {
      const response = await ask(path, params, stopped.signal);
      if (!response.ok) {
        say((await response.json()).error.message, "lost");
        if (response.status < 500) return;
      } else {
        if (isLost) say(...saidLast);
        isLost = false;
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        for (let pending = "";;) {
          const { value, done } = await reader.read();
          if (done) break;
          const messages = (pending + value).split("\n\n");
          pending = messages.pop();
          for (const message of messages) {
            const data = message.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
            if (data) take(JSON.parse(data));
          }
        }
      }
    } catch (error) {
      if (stopped.signal.aborted) return;
    }
    say("the connection is lost: trying again", "lost");
    isLost = true;
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

function listen(name) {
  listening?.abort();
  follow("events", { run: name }, changed, listening = new AbortController());
}

let drawnSteps = "";

function changed(parts) {
  byId("page").hidden = false;
  for (const name of ["header", "now", "times", "unscored", "config"]) {
    if (name in parts && byId(name).html !== parts[name]) {
      byId(name).html = parts[name];
      const isOpen = byId(name).querySelector("details")?.open;
      byId(name).innerHTML = parts[name];
      if (isOpen) byId(name).querySelector("details").open = true;
    }
  }
  if ("advice" in parts) {
    byId("advice").hidden = !parts.advice.length;
    byId("advice").querySelector("ul").replaceChildren(...parts.advice.map((line) => element("li", "", line)));
  }
  if ("facts" in parts) {
    const { title, is_live: isLive, steps, wall, share, samples, groups, first_view: firstView, num_damaged: numDamaged } = parts.facts;
    document.title = `${title} - AsyncFlow`;
    const reading = share < 1 ? `; reading its spans: ${Math.floor(100 * share)}%` : "";
    say((isLive ? "live" : "not running") + reading + (numDamaged ? `; ${numDamaged} lines cannot be read` : ""), isLive ? "live" : "");
    if (drawnSteps !== steps) { drawnSteps = steps; showCharts(); }
    if (samples !== numSamples) { numSamples = samples; samplesCame(); }
    if (groups.join() !== groupSteps) { groupSteps = groups.join(); showGroupSteps(groups); }
    present(wall, firstView, isLive);
  }
}

async function showCharts() {
  const asked = run, charts = await answer("charts", { run });
  await plotly;
  if (asked === run) drawCharts(charts, { isLazy: true });
}

/* ---- the Gantt chart ---- */

let width = null, asking = false, wanted = null;

function present(wall, firstView, isLive) {
  const isEmpty = !wall;
  byId("no-spans").hidden = !isEmpty;
  byId("gantt-place").hidden = isEmpty;
  if (isEmpty) { letPlotlyBegin(); return; }
  if (width === null) width = Math.max(firstView[1] - firstView[0], 1e-3);
  if (gantt) gantt.gantt.wall = wall;
  const isMoved = byId("follow").checked ? gantt?.view.hi !== wall : !gantt;
  if (isMoved || isLive) fetchPart(byId("follow").checked || !gantt ? { lo: Math.max(0, wall - width), hi: wall } : gantt.view);
}

/* Ask for the part in view and as much on each side; of several wishes the last one counts. */
async function fetchPart(view) {
  wanted = { lo: view.lo, hi: view.hi };
  if (asking) return;
  asking = true;
  try {
    while (wanted) {
      const { lo, hi } = wanted;
      wanted = null;
      const reach = (hi - lo) / 2;
      const asked = run;
      const found = await answer("gantt", { run, start: lo - reach, end: hi + reach, most: MOST_BARS });
      if (asked !== run) continue;
      part = { ...found, lo: lo - reach, hi: hi + reach };
      if (!gantt) {
        gantt = new Gantt(found, loaded, moved);
        gantt.view = { lo, hi };
        letPlotlyBegin();
      }
      const isSame = gantt.gantt.states.length === found.states.length;
      gantt.gantt = found;
      if (!isSame) gantt.drawLegend();
      if (byId("follow").checked) gantt.view = { lo, hi };
      gantt.draw();
    }
  } catch (error) {
    say(error.message, "lost");
  } finally {
    asking = false;
  }
}

/* The chart has been moved: while it is dragged, more is asked for where the part that is here ends. */
function moved({ lo, hi }, isDragged) {
  byId("follow").checked = hi >= gantt.gantt.wall;
  width = hi - lo;
  if (!isDragged || lo < part.lo || hi > part.hi) fetchPart({ lo, hi });
}

function loaded() {
  const level = part.levels[0];
  return { level, shown: level.start.map((_, i) => i), isFinest: false };
}

/* ---- samples ---- */

let shownSamples = 0, isMoreShown = false, isStepChosen = false;

/* New ones are shown, unless the reader has begun to read: what is open, or was asked for besides, stays until the next search. */
function samplesCame() {
  const list = byId("samples"), isRead = isMoreShown || list.matches(":hover, :focus-within") || list.querySelector("details[open]");
  if (shownSamples && isRead) byId("num-samples").textContent = "more have come: a search shows them";
  else search();
}

async function search(isMore = false) {
  const query = Object.fromEntries(new FormData(byId("search")));
  const asked = run;
  if (!isMore) shownSamples = 0;
  try {
    const { total, samples } = await answer("samples", { run, ...query, skip: shownSamples });
    if (asked !== run) return;
    const cards = samples.map(sampleCard);
    if (isMore) byId("samples").append(...cards); else byId("samples").replaceChildren(...cards);
    shownSamples += samples.length;
    isMoreShown = isMore;
    byId("num-samples").textContent = `${total} found`;
    byId("more-samples").hidden = shownSamples >= total;
  } catch (error) {
    if (asked === run) byId("num-samples").textContent = error.message;
  }
}

function sampleCard(sample) {
  const told = [sample.step === null ? "not scored" : `step ${sample.step}`, sample.purpose === "eval" ? "evaluation" : "", `row ${sample.row ?? "-"}`,
    `reward ${shortNumber(sample.reward)}`, sample.finish_reason, `${sample.length} characters`].filter(Boolean);
  for (const [name, value] of Object.entries(sample.reward_parts ?? {})) told.push(`${name} ${shortNumber(value)}`);
  const card = element("article", "card sample", element("div", "lane-head", told.join(" \u00b7 ")), element("div", "text prompt", sample.prompt ?? ""));
  card.append(...responseOf(sample));
  if (sample.why) card.append(element("pre", "", sample.why));
  if (sample.purpose === "train" && Number.isInteger(sample.row)) card.append(asTrained(sample.row));
  return card;
}

function responseOf(sample) {
  return sample.turns?.length ? sample.turns.map(turnText) : [element("div", "text", sample.response ?? "")];
}

/* A response as it was trained, which is asked for when somebody wants to see it. */
function asTrained(row) {
  const asked = run, place = element("details", "trained", element("summary", "soft", "as it was trained, token by token"));
  place.addEventListener("toggle", async () => {
    if (!place.open || place.children.length > 1) return;
    try {
      const epochs = await answer("tokens", { run: asked, row });
      const told = epochs.map(({ step, epoch, num_more: numMore, tokens }) => element("div", "",
        element("div", "soft", `step ${step}${epochs.length > 1 ? `, epoch ${epoch}` : ""}${numMore ? `; ${numMore} tokens more were not kept` : ""}`),
        tokenList(`row ${row}, epoch ${epoch}`, tokens.map(({ text, ...known }) => token(text, known)))));
      if (!told.length) told.push(element("div", "soft", "No figures: they are kept of one response of a prompt; or it is not trained yet, or had no advantage, so it was not computed."));
      if (place.children.length === 1) place.append(...told);
    } catch (error) {
      say(error.message, "lost");
    }
  });
  return place;
}

function turnText(turn) {
  const about = [turn.by, turn.tool_calls ? `${turn.tool_calls} tools called, ${turn.tool_failures} failed` : "", typeof turn.reward === "number" ? `reward ${shortNumber(turn.reward)}` : ""];
  const tokens = turn.texts.map((text, i) => token(text, { logprob: turn.logprobs?.[i], mask: turn.by === "policy" ? 1 : 0 }));
  return element("div", `turn ${turn.by}`, element("div", "soft", about.filter(Boolean).join(", ")), tokenList(`turn of ${turn.by}`, tokens));
}

/* ---- groups ---- */

/* The newest step is shown, until the reader has chosen one or has begun to read. */
function showGroupSteps(steps) {
  const chosen = byId("batch-step").value, isRead = byId("groups").matches(":hover, :focus-within") || isStepChosen;
  byId("groups").hidden = !steps.length;
  byId("batch-step").replaceChildren(...steps.map((step) => new Option(step, step)));
  if (!steps.length) return;
  if (isRead && chosen && steps.includes(Number(chosen))) { byId("batch-step").value = chosen; return; }
  byId("batch-step").value = steps.at(-1);
  isGroupDue = true;
  showDueGroup();
}

/* Groups are asked for when somebody sees them. */
function showDueGroup() {
  if (!isGroupDue || !isGroupSeen) return;
  isGroupDue = false;
  showStep();
}

let isGroupDue = false, isGroupSeen = false;
new IntersectionObserver((entries) => { isGroupSeen = entries.at(-1).isIntersecting; showDueGroup(); }, { rootMargin: "200px" }).observe(byId("groups"));

async function showStep() {
  const asked = run, groups = await answer("groups", { run, step: byId("batch-step").value });
  if (asked !== run) return;
  byId("batch-group").replaceChildren(...groups.map(({ group, mean, size }) => new Option(`${group}: ${size} responses, mean reward ${shortNumber(mean)}`, group)));
  if (groups.length) await showGroup();
}

async function showGroup() {
  const asked = run, found = await answer("group", { run, step: byId("batch-step").value, group: byId("batch-group").value });
  if (asked !== run) return;
  const cards = found.rows.map(({ row, reward, advantage, truncated, tokens, sample, is_told: isTold }) => {
    const told = [`row ${row}`, `reward ${shortNumber(reward)}`, typeof advantage === "number" ? `advantage ${shortNumber(advantage)}` : "no advantage that is known",
      tokens ? `${tokens.length} tokens` : `${(sample.response ?? "").length} characters`, truncated ? "cut off" : ""].filter(Boolean);
    const said = tokens ? [tokenList(`row ${row}`, tokens.map(({ text, ...known }) => token(text, known)))] : [...responseOf(sample), ...(isTold ? [asTrained(row)] : [])];
    return element("article", "card response", element("div", "lane-head soft", told.join(" \u00b7 ")), ...said);
  });
  byId("group").replaceChildren(element("div", "card text prompt", found.prompt), element("div", "responses", ...cards));
}

/* ---- several runs ---- */

let comparing = null;

/* Runs over each other, as they go on. */
function compare(names) {
  comparing?.abort();
  comparing = names.length < 2 ? null : new AbortController();
  byId("compared").replaceChildren();
  byId("compared").hidden = !comparing;
  if (comparing) follow("compare", names.map((name) => ["run", name]), showComparison, comparing);
}

/* Charts that are there stay, and are drawn anew: a reader is at one of them, perhaps. */
async function showComparison({ html, charts }) {
  const place = byId("compared"), drawn = place.querySelector(".compared-charts");
  place.innerHTML = html;
  if (drawn) place.querySelector(".compared-charts").replaceWith(drawn);
  else place.scrollIntoView();
  const asked = comparing;
  beginPlotly();
  await plotly;
  if (asked === comparing) drawCharts(charts, { place: place.querySelector(".compared-charts"), isLazy: true });
}

/* ---- the whole page ---- */

function openRun(name) {
  run = name;
  gantt = null; part = null; width = null; numSamples = shownSamples = 0; groupSteps = null; drawnSteps = ""; isStepChosen = false;
  byId("gantt-place").replaceWith(ganttPlace.cloneNode(true));
  for (const place of ["charts", "samples", "batch-step", "batch-group", "group"]) byId(place).replaceChildren();
  byId("num-samples").textContent = "";
  byId("more-samples").hidden = byId("groups").hidden = true;
  byId("follow").checked = true;
  address.set("run", name);
  history.replaceState(null, "", `#${address}`);
  byId("runs").value = name;
  listen(name);
}

const ganttPlace = byId("gantt-place").cloneNode(true);

/* Runs that the lists do not have yet come first in them; what is chosen stays. */
async function listRuns() {
  const begun = (await answer("runs")).filter((name) => !runs.includes(name));
  runs = [...begun, ...runs];
  for (const list of ["runs", "others"]) byId(list).prepend(...begun.map((name) => new Option(name, name)));
  byId("others").parentElement.hidden = runs.length < 2;
  byId("others").size = Math.max(1, Math.min(4, runs.length));
  if (!runs.length) say("there is no run here yet: look into the list when one has begun");
  else if (run === null) openRun(runs.includes(address.get("run")) ? address.get("run") : runs[0]);
}

let isListing = false;

async function lookForRuns() {
  if (isListing) return;
  isListing = true;
  try {
    await listRuns();
  } catch (error) {
    say(key ? error.message : "this page needs the key that `asyncflow watch` printed: open its whole address", "lost");
  } finally {
    isListing = false;
  }
}

for (const list of ["runs", "others"]) for (const kind of ["focus", "pointerdown"]) byId(list).addEventListener(kind, lookForRuns);
byId("runs").addEventListener("change", (event) => openRun(event.target.value));
byId("others").addEventListener("change", (event) => compare([...new Set([run, ...[...event.target.selectedOptions].map((option) => option.value)])]));
byId("search").addEventListener("submit", (event) => { event.preventDefault(); search(); });
byId("more-samples").addEventListener("click", () => search(true));
byId("batch-step").addEventListener("change", () => { isStepChosen = true; showStep(); });
byId("batch-group").addEventListener("change", showGroup);
byId("follow").addEventListener("change", (event) => { if (event.target.checked && gantt) fetchPart({ lo: Math.max(0, gantt.gantt.wall - width), hi: gantt.gantt.wall }); });
document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const act = { ArrowLeft: () => gantt?.buttons.back(), ArrowRight: () => gantt?.buttons.forth(), "+": () => gantt?.buttons.in(), "=": () => gantt?.buttons.in(),
    "-": () => gantt?.buttons.out(), a: () => gantt?.buttons.all(), f: () => byId("follow").click(), "/": () => byId("search").elements.words.focus() }[event.key];
  if (act) { event.preventDefault(); act(); }
});
lookForRuns();
