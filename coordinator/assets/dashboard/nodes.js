// Pools and nodes: what they do, how full they are, and which of them have gone.

import { age, arrange, bytes, el, key, mark, ms, number, percent, say, whole } from "./dom.js";

const STATES = [
  ["stalled", "bad", (node) => node.stalled],
  ["failing", "bad", (node) => node.breaker === "open"],
  ["draining", "warn", (node) => node.draining],
  ["on trial", "warn", (node) => node.breaker === "half_open"],
  ["serving", "good", () => true],
];

/** Numbers that a node may tell: name, title, how they are written. A column is there if some node tells it. */
const MORE = [
  ["step_seconds", "Step", (value) => (value ? ms(value * 1000) : "–")],
  ["batch_size", "Batch", (value) => (value ? number(value) : "–")],
  ["computed_tokens_per_second", "Tokens/s", number],
  ["sent_bytes_per_second", "KV sent", (value) => (value ? `${bytes(value)}/s` : "–")],
  ["received_bytes_per_second", "KV taken", (value) => (value ? `${bytes(value)}/s` : "–")],
  ["cache_hit_rate", "Cache hits", (value) => (value === null ? "–" : percent(value, 1))],
  ["preemptions", "Preempted", whole],
  ["oldest_wait_ms", "Oldest wait", (value) => (value ? ms(value) : "–")],
];

const stateOf = (node) => STATES.find(([, , holds]) => holds(node));

const used = (of) => Math.max(0, of.total_blocks - of.free_blocks - of.cached_blocks);

/** A bar of blocks: in use, kept as cache, free. */
class BlockBar {
  constructor() {
    this.parts = ["used", "cached"].map((name) => el("span", { class: `part ${name}` }));
    this.bar = el("div", { class: "bar", role: "img" }, ...this.parts);
    this.text = el("span", { class: "bar-text" });
    this.whole = el("div", { class: "with-bar" }, this.bar, this.text);
  }

  show(of) {
    const parts = [used(of), of.cached_blocks];
    this.parts.forEach((part, at) => (part.style.width = of.total_blocks ? `${(100 * parts[at]) / of.total_blocks}%` : "0"));
    const [inUse, cached] = parts.map((part) => percent(part, of.total_blocks));
    say(this.text, inUse);
    const text = `${whole(parts[0])} of ${whole(of.total_blocks)} KV blocks in use (${inUse}), ${whole(parts[1])} cached (${cached}), ${whole(of.free_blocks)} free`;
    mark(this.bar, "aria-label", text);
    this.whole.title = text;
  }
}

class Row {
  constructor(columns) {
    this.kv = new BlockBar();
    this.state = el("span", { class: "pill" });
    this.cells = columns.map(([, title, kind]) => el("td", { "data-label": title, class: kind }));
    this.row = el("tr", {}, ...this.cells);
  }
}

export class Nodes {
  constructor(pools, table, legend) {
    Object.assign(this, { pools, table, rows: new Map(), poolBars: new Map(), columns: null });
    legend.append(...key([["used", "in use"], ["cached", "cached, can be given away"], ["free", "free"]], "block"));
    this.head = el("tr");
    this.body = el("tbody");
    table.append(el("thead", {}, this.head), this.body);
  }

  show(status) {
    this.showPools(status);
    const more = MORE.filter(([name]) => status.nodes.some((node) => typeof node[name] === "number"));
    const columns = [
      ["node", "Node", "name"], ["role", "Role", ""], ["state", "State", ""], ["kv", "KV blocks", "wide"],
      ["jobs", "Jobs", "num"], ["running", "Running", "num"], ["waiting", "Waiting", "num"],
      ...more.map(([name, title]) => [name, title, "num"]),
    ];
    const names = columns.map(([name]) => name).join();
    if (names !== this.columns) {
      this.columns = names;
      this.rows.clear();
      this.head.replaceChildren(...columns.map(([, title, kind]) => el("th", { scope: "col", class: kind, text: title })));
    }
    const shown = status.nodes.map((node) => this.node(node, columns, more));
    const gone = status.gone.map((node) => this.gone(node, columns));
    arrange(this.body, [...shown, ...gone]);
    const here = new Set([...status.nodes, ...status.gone].map((node) => node.node));
    for (const name of this.rows.keys()) if (!here.has(name)) this.rows.delete(name);
    if (!this.body.children.length) {
      this.body.append(el("tr", {}, el("td", { class: "nothing", colspan: columns.length, text: "No node is connected." })));
    }
  }

  row(name, columns) {
    if (!this.rows.has(name)) this.rows.set(name, new Row(columns));
    return this.rows.get(name);
  }

  node(node, columns, more) {
    const row = this.row(node.node, columns);
    const [word, mood] = stateOf(node);
    row.state.className = `pill ${mood}`;
    say(row.state, word);
    row.kv.show(node);
    row.row.className = "";
    const writers = new Map(more.map(([name, , write]) => [name, write]));
    columns.forEach(([name], at) => {
      const cell = row.cells[at];
      if (name === "state") arrange(cell, [row.state]);
      else if (name === "kv") arrange(cell, [row.kv.whole]);
      else if (writers.has(name)) say(cell, writers.get(name)(node[name] ?? null));
      else say(cell, typeof node[name] === "number" ? whole(node[name]) : String(node[name] ?? "–"));
    });
    return row.row;
  }

  gone(node, columns) {
    const row = this.row(node.node, columns);
    row.state.className = "pill bad";
    say(row.state, "gone");
    row.row.className = "gone";
    columns.forEach(([name], at) => {
      const cell = row.cells[at];
      if (name === "state") arrange(cell, [row.state]);
      else if (name === "kv") say(cell, `not connected for ${age(node.age_ms)}`);
      else say(cell, name === "node" || name === "role" ? String(node[name]) : "–");
    });
    return row.row;
  }

  showPools({ pools, nodes }) {
    const cards = pools.map((pool) => {
      if (!this.poolBars.has(pool.role)) {
        const parts = { bar: new BlockBar(), title: el("h3"), note: el("p", { class: "note" }) };
        parts.card = el("div", { class: "pool" }, parts.title, parts.bar.whole, parts.note);
        this.poolBars.set(pool.role, parts);
      }
      const parts = this.poolBars.get(pool.role);
      const fit = nodes.filter((node) => node.role === pool.role && stateOf(node)[1] === "good").length;
      const serving = fit === pool.nodes ? whole(fit) : `${whole(fit)} of ${whole(pool.nodes)}`;
      say(parts.title, `${pool.role[0].toUpperCase()}${pool.role.slice(1)} pool`);
      say(parts.note, `${serving} serving, ${whole(pool.jobs)} jobs, ${whole(pool.running)} running, ${whole(pool.waiting)} waiting, ${number(pool.computed_tokens_per_second)} tokens/s`);
      parts.bar.show(pool);
      return parts.card;
    });
    arrange(this.pools, cards);
  }
}
