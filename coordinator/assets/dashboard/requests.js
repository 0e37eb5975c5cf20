// Requests that run and requests that have ended, each with a bar of its phases.

import { age, arrange, el, key, mark, percent, say, us, whole } from "./dom.js";

/** The phases in their order: name in records, class, title. */
export const PHASES = [
  ["queue", "queue"], ["prefill_queue", "prefill queue"], ["prefill", "prefill"], ["exposed_transfer", "exposed transfer"],
  ["decode_queue", "decode queue"], ["decode", "decode"], ["client_write", "client write"],
];

export const timeOf = (phases, name) => phases[`${name}_us`] ?? 0;
export const total = (phases) => PHASES.reduce((sum, [name]) => sum + timeOf(phases, name), 0);

/** A bar of phases. */
export class PhaseBar {
  constructor() {
    this.parts = PHASES.map(([name]) => el("span", { class: `part phase ${name}` }));
    this.bar = el("div", { class: "bar phases", role: "img" }, ...this.parts);
    this.track = el("div", { class: "track" }, this.bar);
  }

  /** `longest`: the time that takes the whole width; this one's own if there is none. */
  show(phases, longest) {
    const all = total(phases);
    const told = [];
    PHASES.forEach(([name, title], at) => {
      const time = timeOf(phases, name);
      const text = `${title} ${us(time)} (${percent(time, all)})`;
      this.parts[at].style.flexGrow = String(time);
      this.parts[at].hidden = time === 0;
      this.parts[at].title = text;
      if (time > 0) told.push(text);
    });
    this.bar.style.width = longest ? `${Math.max(1, (100 * all) / longest)}%` : "100%";
    mark(this.bar, "aria-label", told.join(", ") || "no time has passed");
  }
}

const moods = { done: "good", cancelled: "warn" };
const COLUMNS = [
  ["Request", "name"], ["Outcome", ""], ["When", ""], ["Tokens in", "num"], ["Tokens out", "num"], ["Attempts", "num"],
  ["Time", "num"], ["Phases", "wide"],
];

class Row {
  constructor(id, open) {
    this.open = el("button", { type: "button", class: "id", title: `${id}: why it went where it went`, on: { click: () => open(id) } });
    this.outcome = el("span", { class: "pill" });
    this.bar = new PhaseBar();
    this.cells = COLUMNS.map(([title, kind]) => el("td", { "data-label": title, class: kind }));
    this.cells[0].append(this.open);
    this.cells[1].append(this.outcome);
    this.cells[7].append(this.bar.track);
    this.row = el("tr", {}, ...this.cells);
  }

  show(request, running, longest) {
    const name = request.client_request_id ?? request.request;
    say(this.open, name.length > 14 ? `${name.slice(0, 12)}…` : name);
    const mood = running ? "busy" : moods[request.outcome] ?? "bad";
    this.outcome.className = `pill ${mood}`;
    say(this.outcome, String(request.outcome).replaceAll("_", " "));
    const cells = [
      running ? "now" : `${age(request.age_ms)} ago`, whole(request.prompt_tokens), whole(request.generated_tokens),
      whole(request.attempts), us(total(request.phases)),
    ];
    cells.forEach((text, at) => say(this.cells[at + 2], text));
    this.bar.show(request.phases, longest);
  }
}

export class Requests {
  constructor(table, legend, toScale, open) {
    Object.assign(this, { toScale, open, rows: new Map(), last: null });
    legend.append(...key(PHASES, "phase"));
    this.body = el("tbody");
    const head = COLUMNS.map(([title, kind]) => el("th", { scope: "col", class: kind, text: title }));
    table.append(el("thead", {}, el("tr", {}, ...head)), this.body);
    toScale.addEventListener("change", () => this.last && this.show(this.last));
  }

  show(recent) {
    this.last = recent;
    const all = [...recent.running.map((one) => [one, true]), ...recent.ended.map((one) => [one, false])];
    const longest = this.toScale.checked ? Math.max(1, ...all.map(([one]) => total(one.phases))) : 0;
    const rows = all.map(([one, running]) => {
      const id = one.request;
      if (!this.rows.has(id)) this.rows.set(id, new Row(id, this.open));
      const row = this.rows.get(id);
      row.show(one, running, longest);
      return row.row;
    });
    const kept = new Set(all.map(([one]) => one.request));
    for (const id of this.rows.keys()) if (!kept.has(id)) this.rows.delete(id);
    arrange(this.body, rows);
    if (!rows.length) {
      this.body.append(el("tr", {}, el("td", { class: "nothing", colspan: COLUMNS.length, text: "No request has come yet." })));
    }
  }
}
