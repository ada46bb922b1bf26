"use strict";
/* The Gantt chart of what every worker did, on a canvas and without a library: it is there, and moves, before one has begun. */
const FONTS = "system-ui, -apple-system, \"Segoe UI\", Roboto, sans-serif", ABOVE = 22, BELOW = 46, FAR = 4, NEAR = 6;
const seconds = (amount) => amount < 1 ? `${(amount * 1000).toFixed(1)} ms` : `${amount.toFixed(2)} s`;

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

const ganttHeight = (numLanes) => ABOVE + BELOW + 8 + numLanes * (numLanes > 24 ? 14 : numLanes > 12 ? 28 : 52);

const least = (all, size) => all.reduce((found, each) => size(each) < size(found) ? each : found, all[0]);

/* Place and thickness of a bar, in lanes: what goes on beside a lane is a thin line below it. */
const ganttRow = (lane, numLanes) => lane >= numLanes ? [lane - numLanes + 0.4, 0.12] : [lane, 0.62];

/* Moments for the axis, each with its text: `most` of them or fewer, at multiples of 1, 2 or 5 and a power of ten. */
function ticks(lo, hi, most) {
  const least = (hi - lo) / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(least));
  const every = power * [1, 2, 5, 10].find((factor) => factor * power >= least * (1 - 1e-9));
  const digits = Math.max(0, -Math.floor(Math.log10(every) + 1e-9)), found = [];
  for (let number = Math.ceil(lo / every - 1e-9); number * every <= hi; number++) {
    found.push([number * every, (number * every).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })]);
  }
  return found;
}

/* Slanted lines, for waits. */
function hatched(brush, hex) {
  const tile = element("canvas"), pen = tile.getContext("2d");
  tile.width = tile.height = 6;
  pen.fillStyle = faded(hex, 0.18);
  pen.fillRect(0, 0, 6, 6);
  pen.strokeStyle = faded(hex, 0.75);
  for (const shift of [-6, 0, 6]) { pen.beginPath(); pen.moveTo(shift - 1, 7); pen.lineTo(shift + 7, -1); pen.stroke(); }
  return brush.createPattern(tile, "repeat");
}

class Gantt {
  /* `lookAt(lo, hi)`: the level and bars to be drawn there, at once. `moved`: told of each new view, and whether it is still dragged. */
  constructor(gantt, lookAt, moved = () => {}) {
    this.gantt = gantt;
    this.lookAt = lookAt;
    this.moved = moved;
    this.view = { lo: gantt.first_view[0], hi: gantt.first_view[1] };
    this.hidden = new Set();
    this.selected = null;  // from and to on the canvas, of what will be zoomed into
    this.plot = document.getElementById("gantt");
    this.canvas = element("canvas");
    this.canvas.setAttribute("role", "img");
    this.told = element("div", "told");
    this.told.setAttribute("role", "status");  // a screen reader says what is written into it
    this.bar = null;  // where the keyboard is: a lane, a moment, and the bar's start and end
    this.cursor = element("div", "cursor");
    this.plot.replaceChildren(this.canvas, this.cursor, this.told);
    this.drawLegend();
    this.draw();
    const middle = () => (this.view.lo + this.view.hi) / 2, half = () => (this.view.hi - this.view.lo) / 2;
    this.buttons = {
      all: () => this.show(0, this.gantt.wall), few: () => this.show(...this.gantt.first_view),
      back: () => this.show(this.view.lo - half(), this.view.hi - half()), forth: () => this.show(this.view.lo + half(), this.view.hi + half()),
      in: () => this.show(middle() - half() / 2, middle() + half() / 2), out: () => this.show(middle() - 2 * half(), middle() + 2 * half()),
    };
    for (const [name, act] of Object.entries(this.buttons)) document.getElementById(`gantt-${name}`).addEventListener("click", act);
    this.listen();
    this.listenToKeys();
    const again = () => { if (this.plot.isConnected) this.draw(); };
    darkness.addEventListener("change", again);
    new ResizeObserver(() => { if (this.plot.clientWidth !== this.width) again(); }).observe(this.plot);
  }

  show(lo, hi, isDragged = false) {
    const width = Math.min(Math.max(hi - lo, 1e-5), this.gantt.wall);
    this.view.lo = Math.min(Math.max(lo, 0), this.gantt.wall - width);
    this.view.hi = this.view.lo + width;
    this.draw();
    this.moved(this.view, isDragged);
  }

  /* A mouse selects what is zoomed into, or moves the chart while shift is held; a finger moves it. A pointer at rest, or a tap, is told
     what is there. */
  listen() {
    const { canvas } = this;
    let drag = null;
    const at = ({ clientX, clientY }) => { const box = canvas.getBoundingClientRect(); return [clientX - box.left, clientY - box.top]; };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      canvas.setPointerCapture(event.pointerId);
      drag = { from: at(event)[0], ...this.view, moves: event.shiftKey || event.pointerType === "touch", isFar: false };
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (!drag) { this.tell(x, y); return; }
      drag.isFar ||= Math.abs(x - drag.from) > FAR;
      if (!drag.isFar) return;
      this.told.textContent = "";
      const shift = (drag.from - x) * (drag.hi - drag.lo) / (this.right - this.left);
      if (drag.moves) { this.show(drag.lo + shift, drag.hi + shift, true); return; }
      this.selected = [drag.from, x].sort((a, b) => a - b);
      this.draw();
    });
    canvas.addEventListener("pointerup", (event) => {
      const { selected } = this, isFar = drag?.isFar;
      drag = this.selected = null;
      if (selected) this.show(...selected.map((x) => this.moment(x)));
      else if (isFar) this.moved(this.view, false);
      else this.tell(...at(event));
    });
    canvas.addEventListener("pointercancel", () => { drag = this.selected = null; this.draw(); });
    // A finger that has tapped is gone at once, and what it was told stays until the next tap.
    canvas.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") this.told.textContent = ""; });
    document.addEventListener("pointerdown", (event) => { if (event.target !== canvas) this.told.textContent = ""; });
    canvas.addEventListener("dblclick", this.buttons.all);
  }

  /* The chart is one stop of the tab key; there the arrows go from bar to bar, and what a pointer is told of a bar is told of each. */
  listenToKeys() {
    const { cursor } = this;
    cursor.tabIndex = 0;
    cursor.setAttribute("role", "application");  // so that a screen reader leaves the arrows to it
    cursor.setAttribute("aria-label", "Bars of the chart: the arrow keys tell of each");
    cursor.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const go = { ArrowLeft: () => this.goAlong(-1), ArrowRight: () => this.goAlong(1), ArrowUp: () => this.goAcross(-1),
        ArrowDown: () => this.goAcross(1), Escape: () => this.leave() }[event.key];
      if (!go) return;
      event.preventDefault();
      go();
    });
    cursor.addEventListener("blur", () => { this.told.textContent = ""; });
  }

  leave() {
    this.bar = null;
    this.told.textContent = "";
    this.placeCursor();
  }

  end(i) { return this.level.start[i] + this.level.seconds[i]; }

  /* Bars of a lane that are here: those in view, and of the part on each side. */
  barsOf(lane) {
    const { level, gantt } = this, isSeen = (i) => !this.hidden.has(gantt.states[level.state[i]].label);
    return this.shown.filter((i) => level.lane[i] === lane && isSeen(i)).sort((a, b) => level.start[a] - level.start[b]);
  }

  goAlong(direction) {
    if (!this.bar) { this.goAcross(1); return; }
    const { level, bar } = this, bars = this.barsOf(bar.lane);
    const here = least(bars, (i) => Math.abs(level.start[i] - bar.start) + Math.abs(this.end(i) - bar.end));
    const next = bars[bars.indexOf(here) + direction];
    if (next !== undefined) this.goTo(next);
    else if (direction < 0) this.buttons.back();  // there may be more, which comes into view
    else this.buttons.forth();
  }

  /* To the next lane that has bars, at the same time; at first to the uppermost. What goes on beside a lane is below it. */
  goAcross(direction) {
    const { level, gantt, view, bar } = this, count = gantt.lanes.length, moment = bar?.moment ?? (view.lo + view.hi) / 2;
    const lanes = [...gantt.lanes.keys()].flatMap((lane) => [lane, lane + count]), here = bar ? lanes.indexOf(bar.lane) : -1;
    const others = direction > 0 || !bar ? lanes.slice(here + 1) : lanes.slice(0, here).reverse();
    const bars = others.map((lane) => this.barsOf(lane)).find((found) => found.length);
    if (bars) this.goTo(least(bars, (i) => Math.max(level.start[i] - moment, moment - this.end(i), 0)), moment);
  }

  /* Have the cursor at a bar, in view, and tell of it. */
  goTo(i, moment) {
    const { level, view } = this, start = level.start[i], end = this.end(i), half = (view.hi - view.lo) / 2;
    const isSeen = start < view.hi && end > view.lo, middle = isSeen ? (Math.max(start, view.lo) + Math.min(end, view.hi)) / 2 : (start + end) / 2;
    this.bar = { lane: level.lane[i], start, end, moment: moment ?? middle };
    this.told.textContent = this.textOf(i);
    if (isSeen) this.placeCursor();
    else this.show(middle - half, middle + half);
  }

  /* The cursor is around its bar, with what is told beside it; before it has been at one, around the chart. */
  placeCursor() {
    const { bar, cursor, gantt, left, right } = this, inside = (x) => Math.min(Math.max(x, left), right);
    let place = [0, 0, this.width, ganttHeight(gantt.lanes.length)];
    if (bar) {
      const [middle, thickness] = ganttRow(bar.lane, gantt.lanes.length), from = inside(this.x(bar.start));
      place = [from, this.y(middle - thickness / 2), Math.max(inside(this.x(bar.end)) - from, 1), thickness * this.row];
    }
    ["left", "top", "width", "height"].forEach((name, i) => { cursor.style[name] = `${place[i]}px`; });
    if (bar && document.activeElement === cursor) this.placeTold(place[0], place[1] + place[3]);
  }

  /* Places on the canvas, and back. */
  x(moment) { return this.left + (this.right - this.left) * (moment - this.view.lo) / (this.view.hi - this.view.lo); }
  y(lane) { return ABOVE + (lane + 0.56) * this.row; }
  moment(x) { return this.view.lo + (this.view.hi - this.view.lo) * Math.min(Math.max((x - this.left) / (this.right - this.left), 0), 1); }

  /* Tell what is at a place of the canvas, beside it. */
  tell(x, y) {
    this.told.textContent = x < this.left || x > this.right ? "" : this.installAt(x, y) || this.barAt(x, y);
    this.placeTold(x, y);
  }

  placeTold(x, y) {
    const { told } = this;
    told.style.left = `${Math.max(0, Math.min(x + 12, this.width - told.offsetWidth))}px`;
    told.style.top = `${y + 14}px`;
  }

  installAt(x, y) {
    const found = this.installs.find(([lane, end]) => Math.abs(this.x(end) - x) < NEAR && Math.abs(this.y(lane - 0.4) - y) < NEAR);
    if (!found) return "";
    const [lane, end, version] = found;
    return `${this.gantt.lanes[lane]} has ${version < 0 ? "new weights" : `version ${version}`}\nat ${end.toFixed(3)} s`;
  }

  barAt(x, y) {
    const found = this.boxes.findLast(({ from, top, wide, high }) => x >= from - 1 && x <= from + wide + 1 && y >= top - 1 && y <= top + high + 1);
    return found ? this.textOf(found.i) : "";
  }

  textOf(i) {
    const { lanes, states } = this.gantt, { level } = this;
    const lines = [`${lanes[level.lane[i] % lanes.length]} ${states[level.state[i]].label}`, `${seconds(level.seconds[i])}, from ${level.start[i].toFixed(3)} s`];
    const known = [["step", level.step[i], 0], ["version", level.version[i], 0], ["rows", level.rows[i], 1], ["tokens", level.tokens[i], 1]];
    const told = known.filter(([, amount, least]) => amount >= least).map(([name, amount]) => `${name} ${amount.toLocaleString("en")}`);
    if (told.length) lines.push(told.join(", "));
    if (level.count[i] > 1) lines.push(`${level.count[i]} spans`);
    return lines.join("\n");
  }

  draw() {
    const { gantt, view, canvas } = this, numLanes = gantt.lanes.length, scale = devicePixelRatio || 1, brush = canvas.getContext("2d");
    const width = this.width = this.plot.clientWidth, height = ganttHeight(numLanes), bottom = height - BELOW;
    const size = [Math.round(width * scale), Math.round(height * scale)];
    if (canvas.width !== size[0] || canvas.height !== size[1]) {
      [canvas.width, canvas.height] = size;
      canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
    }
    brush.setTransform(scale, 0, 0, scale, 0, 0);
    brush.clearRect(0, 0, width, height);
    brush.lineWidth = 1;
    brush.font = `${numLanes > 24 ? 10 : 13}px ${FONTS}`;
    this.left = Math.max(...gantt.lanes.map((lane) => brush.measureText(lane).width)) + 14;
    this.right = Math.max(width - 12, this.left + 1);
    this.row = (bottom - ABOVE) / (numLanes + 0.14);
    brush.fillStyle = colour("--ink"); brush.textAlign = "right"; brush.textBaseline = "middle";
    gantt.lanes.forEach((lane, i) => brush.fillText(lane, this.left - 6, this.y(i)));
    this.drawAxis(brush, bottom);
    brush.save();
    brush.beginPath();
    brush.rect(this.left, 0, this.right - this.left, height);
    brush.clip();
    const { level, shown, isFinest } = this.lookAt(view.lo, view.hi);
    this.level = level;
    this.shown = shown;
    this.drawBars(brush, shown);
    this.drawMarks(brush, bottom);
    if (this.selected) {
      brush.fillStyle = faded(colour("--ink"), 0.12);
      brush.fillRect(this.selected[0], ABOVE, this.selected[1] - this.selected[0], bottom - ABOVE);
    }
    brush.restore();
    this.placeCursor();
    const part = `${view.lo.toFixed(2)} s to ${view.hi.toFixed(2)} s of ${gantt.wall.toFixed(2)} s`;
    document.getElementById("gantt-view").textContent = part;
    document.getElementById("gantt-level").textContent = level && level.resolution > 0
      ? `Here, spans shorter than ${seconds(level.resolution)} are grouped by task; ` + (isFinest ? "trace.json holds each one (open it in ui.perfetto.dev)." : "zoom in for more.")
      : "Every span is drawn.";
    const steps = this.labelled.filter(([step]) => step >= 0);
    canvas.setAttribute("aria-label", `Chart of ${numLanes} workers, ${part}${steps.length ? `, with the ends of step ${steps[0][0]} to step ${steps.at(-1)[0]}` : ""}. `
      + "The section below has the seconds of each worker in words.");
  }

  drawAxis(brush, bottom) {
    brush.font = `12px ${FONTS}`; brush.fillStyle = colour("--soft"); brush.strokeStyle = colour("--grid"); brush.textAlign = "center";
    for (const [moment, text] of ticks(this.view.lo, this.view.hi, (this.right - this.left) / 70)) {
      const x = this.x(moment);
      brush.beginPath(); brush.moveTo(x, ABOVE); brush.lineTo(x, bottom); brush.stroke();
      brush.fillText(text, Math.min(x, this.width - brush.measureText(text).width / 2), bottom + 12);
    }
    brush.fillText("seconds since the first span", (this.left + this.right) / 2, bottom + 32);
  }

  drawBars(brush, shown) {
    const { gantt, level, left, right } = this, numLanes = gantt.lanes.length;
    const fills = gantt.states.map((state) => state.wait ? hatched(brush, state.colour) : state.colour);
    // An edge tells neighbours of one task apart; among many thin bars it would hide them.
    const edge = shown.length < 600 ? 0.7 : 0;
    this.boxes = [];
    for (const i of shown) {
      const state = gantt.states[level.state[i]], [middle, thickness] = ganttRow(level.lane[i], numLanes);
      const from = Math.max(this.x(level.start[i]), left - 2), to = Math.min(this.x(level.start[i] + level.seconds[i]), right + 2);
      if (this.hidden.has(state.label) || to < left || from > right) continue;
      const box = { i, from, top: this.y(middle - thickness / 2), wide: Math.max(to - from, 0.5), high: thickness * this.row };
      this.boxes.push(box);
      brush.fillStyle = fills[level.state[i]];
      brush.fillRect(box.from, box.top, edge && !state.wait ? Math.max(box.wide - edge, 0.5) : box.wide, box.high);
    }
    this.canvas.dataset.bars = this.boxes.length;
  }

  drawMarks(brush, bottom) {
    const { gantt, view } = this, numLanes = gantt.lanes.length, { lo, hi } = view;
    const steps = gantt.steps.filter(([, end]) => end >= lo && end <= hi);
    const every = Math.ceil(steps.length / Math.min(14, Math.max(1, Math.floor((this.right - this.left) / 70))));
    this.labelled = steps.filter((_, i) => i % every === 0);
    brush.strokeStyle = faded(colour("--ink"), 0.55); brush.setLineDash([1.5, 2.5]);
    for (const [, end] of steps.length > 120 ? this.labelled : steps) {
      brush.beginPath(); brush.moveTo(this.x(end), ABOVE); brush.lineTo(this.x(end), bottom); brush.stroke();
    }
    brush.setLineDash([]);
    brush.font = `11px ${FONTS}`; brush.fillStyle = colour("--soft"); brush.textAlign = "right";
    for (const [step, end] of this.labelled) brush.fillText(step < 0 ? "step" : `step ${step}`, this.x(end), ABOVE / 2);
    const inside = gantt.installs.filter(([, end]) => end >= lo && end <= hi);
    this.installs = inside.length > Math.min(80 * numLanes, 2000) ? [] : inside;
    const isRoomy = this.installs.length <= Math.min(24 * numLanes, 200);
    brush.font = `10px ${FONTS}`; brush.textAlign = "left";
    const soft = colour("--soft");
    for (const [lane, end, version] of this.installs) {
      const x = this.x(end), y = this.y(lane - 0.4);
      brush.fillStyle = "#009E73";
      brush.beginPath(); brush.moveTo(x - 5, y - 4); brush.lineTo(x + 5, y - 4); brush.lineTo(x, y + 4); brush.fill();
      brush.fillStyle = soft;
      if (isRoomy && version >= 0) brush.fillText(`v${version}`, x + 7, y);
    }
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
