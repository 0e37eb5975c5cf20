// The last quarter of an hour as curves, drawn by uPlot. What the coordinator remembers is there at once.

import { el, ms, number, percent, say } from "./dom.js";

const SPAN_S = 900;
/** So much is shown at least, of a coordinator that has just begun. */
const LEAST_S = 180;
const HEIGHT = 150;

/** The points, as the coordinator numbers them. */
export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.boot = null;
    this.next = 0;
    this.origin = Infinity;
    this.points = [];
  }

  /** Takes what is new. True if another process answers than before: it has to be asked for everything. */
  take({ coordinator, series }) {
    if (this.boot !== coordinator.boot) {
      const asked = this.next;
      this.clear();
      this.boot = coordinator.boot;
      if (asked > 0) return true;
    }
    // When the coordinator began, by this machine's clock: the least delayed answer knows best.
    this.origin = Math.min(this.origin, Date.now() - coordinator.up_ms);
    // Two questions may have been on their way at once: a point is taken once.
    const known = Math.max(0, this.next - series.first);
    series.up_ms.forEach((up, at) => {
      if (at >= known) this.points.push({ up, of: (column) => pick(series, column)?.[at] ?? null });
    });
    this.points = this.points.map(flat);
    this.next = Math.max(this.next, series.next);
    const oldest = coordinator.up_ms - (SPAN_S + 10) * 1000;
    this.points = this.points.filter((point) => point.up >= oldest);
    return false;
  }

  times() {
    return this.points.map((point) => (this.origin + point.up) / 1000);
  }

  column(name) {
    return this.points.map((point) => point[name]);
  }
}

const COLUMNS = [
  "queued", "running", "answered_per_s", "failed_per_s", "prompt_tokens_per_s", "generated_tokens_per_s",
  "ttft_ms.p50", "ttft_ms.p90", "ttft_ms.p99", "itl_ms.p50", "itl_ms.p90", "itl_ms.p99",
  "kv_used.prefill", "kv_used.decode", "kv_used.both",
];

const pick = (series, column) => column.split(".").reduce((part, name) => part?.[name], series);

/** A point with its numbers by name; one that has them already stays as it is. */
function flat(point) {
  if (!point.of) return point;
  return Object.fromEntries([["up", point.up], ...COLUMNS.map((column) => [column, point.of(column)])]);
}

const share = (value) => (value === null ? "–" : percent(value, 1));
const QUANTILES = [["p50", "p50", "--c1"], ["p90", "p90", "--c2"], ["p99", "p99", "--c3"]];
const quantiles = (of) => QUANTILES.map(([name, title, colour]) => [`${of}.${name}`, title, colour]);
const each = (value) => (value === null ? "–" : `${number(value)}/s`);

/** Title, how a value is written, curves: column, title, colour. */
const CHARTS = [
  ["First token", ms, quantiles("ttft_ms")],
  ["Between tokens", ms, quantiles("itl_ms")],
  ["Tokens", each, [["generated_tokens_per_s", "out", "--c1"], ["prompt_tokens_per_s", "in", "--c2"]]],
  ["Requests at once", number, [["running", "running", "--c1"], ["queued", "waiting", "--c3"]]],
  ["Requests", each, [["answered_per_s", "answered", "--c1"], ["failed_per_s", "failed", "--c3"]]],
  ["KV blocks in use", share, [["kv_used.prefill", "prefill", "--c1"], ["kv_used.decode", "decode", "--c4"], ["kv_used.both", "both", "--c2"]]],
];

export class Charts {
  constructor(parent, history) {
    this.history = history;
    this.sync = uPlot.sync("baton");
    this.all = CHARTS.map(([title, write, curves]) => new Chart(parent, title, write, curves, this.sync));
    const redraw = () => this.all.forEach((chart) => chart.make());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      redraw();
      this.draw();
    });
  }

  draw() {
    const times = this.history.times();
    for (const chart of this.all) chart.draw(times, this.history);
  }
}

class Chart {
  constructor(parent, title, write, curves, sync) {
    Object.assign(this, { write, curves, sync, plot: null, data: null });
    this.values = curves.map(() => el("b", { text: "–" }));
    this.entries = curves.map(([, name], at) =>
      el("li", {}, el("i", { class: `swatch curve s${at}`, "aria-hidden": "true" }), `${name} `, this.values[at]));
    this.swatches = this.entries.map((entry) => entry.firstChild);
    this.space = el("div", { class: "plot" });
    parent.append(el("figure", { class: "card chart" },
      el("figcaption", {}, el("h3", { text: title }), el("ul", { class: "key" }, ...this.entries)), this.space));
    new ResizeObserver(() => this.fit()).observe(this.space);
  }

  make() {
    this.plot?.destroy();
    this.plot = null;
  }

  fit() {
    const width = this.space.clientWidth;
    if (this.plot && width > 0 && this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
  }

  draw(times, history) {
    this.data = [times, ...this.curves.map(([column]) => history.column(column))];
    if (!this.plot) this.begin();
    else this.plot.setData(this.data);
    // A pool that never was needs no curve.
    this.curves.forEach((_, at) => (this.entries[at].hidden = at > 0 && this.data[at + 1].every((value) => value === null)));
    this.tell(this.plot?.cursor.idx ?? null);
  }

  /** From the first point on, but neither too much nor too little. */
  span() {
    const now = Date.now() / 1000;
    const known = now - (this.data[0][0] ?? now);
    return [now - Math.min(SPAN_S, Math.max(LEAST_S, known)), now];
  }

  /** The values at a point; those of the last one if it is none. */
  tell(index) {
    this.curves.forEach((_, at) => {
      const column = this.data[at + 1];
      say(this.values[at], this.write(column[index ?? column.length - 1] ?? null));
    });
  }

  begin() {
    const width = this.space.clientWidth;
    if (width === 0) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    this.swatches.forEach((swatch, at) => (swatch.style.background = colour(this.curves[at][2])));
    const axis = { stroke: colour("--muted"), font: `11px ${colour("--font")}`, ticks: { show: false } };
    const grid = { stroke: colour("--line"), width: 1 };
    this.plot = new uPlot({
      width,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: this.sync.key }, y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: {
        x: { time: true, range: () => this.span() },
        y: { range: (_, __, most) => [0, Math.max(most ?? 0, this.write === share ? 0.1 : 1) * 1.1] },
      },
      axes: [
        { ...axis, grid, size: 24, space: 60, values: (_, ticks) => ticks.map(clock) },
        { ...axis, grid, size: 56, space: 34, values: (_, ticks) => ticks.map((tick) => this.write(tick)) },
      ],
      series: [{}, ...this.curves.map(([, label, name]) => ({
        label, stroke: colour(name), width: 1.5, spanGaps: false, points: { show: false },
      }))],
      hooks: { setCursor: [(plot) => this.tell(plot.cursor.idx ?? null)] },
    }, this.data, this.space);
  }
}

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
