// One request: where its time went, and why it went where it went, attempt by attempt.

import { age, bytes, el, percent, say, us, whole } from "./dom.js";
import { PHASES, PhaseBar, timeOf, total } from "./requests.js";
import { Failure, ask } from "./server.js";

const PAIRS = 8;

export class Record {
  constructor(dialog, title, body) {
    Object.assign(this, { dialog, title, body, id: null, over: false, from: null });
    dialog.addEventListener("close", () => this.closed());
    // A click beside it closes it, too.
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }

  /** Opens the record that the address names, if it does. */
  follow() {
    const named = new URLSearchParams(location.hash.slice(1)).get("request");
    if (named) this.open(named);
  }

  async open(id) {
    if (!id) return;
    Object.assign(this, { id, over: false });
    history.replaceState(null, "", `#request=${encodeURIComponent(id)}`);
    say(this.title, `Request ${id}`);
    this.body.replaceChildren(el("p", { class: "muted", text: "Asking…" }));
    if (!this.dialog.open) this.dialog.showModal();
    await this.refresh().catch((failure) => this.fail(failure));
  }

  close() {
    if (this.dialog.open) this.dialog.close();
  }

  closed() {
    this.id = null;
    history.replaceState(null, "", location.pathname);
  }

  fail(failure) {
    if (!(failure instanceof Failure)) throw failure;
    this.body.replaceChildren(el("p", { class: "error", text: failure.message }));
  }

  /** Looks again, for as long as the request is not over. */
  async refresh() {
    const id = this.id;
    if (id === null || this.over) return;
    let explained;
    try {
      explained = await ask(`/debug/decisions/${encodeURIComponent(id)}`);
    } catch (failure) {
      if (id !== this.id) return;
      if (failure.kind !== "wrong") throw failure;
      this.over = true;
      return this.fail(failure);
    }
    if (id !== this.id) return;
    this.over = explained.request === null || explained.request.age_ms > 0;
    const raw = el("details", {}, el("summary", { text: "As the coordinator tells it" }),
      el("pre", { text: JSON.stringify(explained, null, 2) }));
    // It is looked at again and again while it runs: what was opened stays open.
    raw.open = this.body.querySelector("details")?.open ?? false;
    this.body.replaceChildren(...life(explained.request), ...explained.decisions.map(attempt), raw);
  }
}

/** A fact, if there is one. */
const more = (title, text) => (text ? [[title, String(text)]] : []);

function life(request) {
  if (request === null) {
    return [el("p", { text: "What became of it is not kept any more, only why it went where it went." })];
  }
  const all = total(request.phases);
  const bar = new PhaseBar();
  bar.show(request.phases, 0);
  const facts = [
    ["Outcome", String(request.outcome).replaceAll("_", " ")], ["Time", us(all)],
    ["Ended", request.age_ms > 0 ? `${age(request.age_ms)} ago` : "not yet"], ["Tokens in", whole(request.prompt_tokens)],
    ["Tokens out", whole(request.generated_tokens)], ["Attempts", whole(request.attempts)],
    ...more("Client's id", request.client_request_id), ...more("Trace", request.trace_id),
    ...more("Ended by", request.finish_reasons?.join(", ")),
  ];
  const entries = PHASES.map(([name, title]) => {
    const time = timeOf(request.phases, name);
    return el("li", { class: time ? "" : "none" }, el("i", { class: `swatch phase ${name}`, "aria-hidden": "true" }),
      el("span", { text: title }), el("b", { text: us(time) }), el("span", { class: "muted", text: percent(time, all) }));
  });
  return [
    el("dl", { class: "facts" }, ...facts.map(([title, text]) => el("div", {}, el("dt", { text: title }), el("dd", { text })))),
    bar.track,
    el("ol", { class: "phase-list" }, ...entries),
  ];
}

function way(decision) {
  const node = (name) => el("b", { text: name ?? "–" });
  const { prefill, decode } = decision;
  switch (decision.way) {
    case "handoff": return [node(prefill), " computes the prompt and hands over to ", node(decode), "."];
    case "prompt_only": return [node(prefill), " computes the prompt, and that is all."];
    case "local": return [node(decode), " computes the prompt itself and goes on."];
    case "resume": return [node(decode), " goes on with what another node had begun."];
    default: return [String(decision.way)];
  }
}

function why({ policy, local_prefill, remote_us, local_us }) {
  const known = (time) => time !== null && time !== undefined;
  let costs = "There was no choice between one node and two.";
  if (known(remote_us) && known(local_us)) costs = `Two nodes would take ${us(remote_us)}, a decode node alone ${us(local_us)}.`;
  else if (known(remote_us)) costs = `Two nodes would take ${us(remote_us)}; no decode node could do it alone now.`;
  else if (known(local_us)) costs = `A decode node alone would take ${us(local_us)}; there was no pair of nodes.`;
  return `${costs} Policy ${policy}, local_prefill = ${local_prefill}.`;
}

function attempt(decision) {
  const { prefill = [], decode = [], transfer_us = [] } = decision.candidates ?? {};
  return el("section", { class: "attempt" },
    el("h3", { text: `Attempt ${decision.attempt}, decided ${age(decision.age_ms)} ago` }),
    el("p", {}, ...way(decision)),
    el("p", { class: "muted", text: why(decision) }),
    ...pairs(decision, prefill, decode, transfer_us),
    ...prefills(decision, prefill),
    ...decodes(decision, decode));
}

const prompt = (node) => node.queue_us + node.work.us;
const alone = (node) => node.queue_us + node.beside.compute_us + node.beside.damage_us + node.join_us;

/** Why a node was not taken, where there is a reason. */
function notes(node) {
  const told = [[!node.free, "no room"], [node.avoided, "failed before"], [node.both, "both roles"]];
  return told.filter(([holds]) => holds).map(([, text]) => text).join(", ");
}

/** A table. Columns: title, kind. Rows: whether chosen, cells. */
function table(title, columns, rows) {
  if (!rows.length) return [];
  const head = columns.map(([name, kind]) => el("th", { scope: "col", class: kind, text: name }));
  const body = rows.map(([chosen, cells]) => el("tr", { class: chosen ? "chosen" : "" },
    ...cells.map((text, at) => el("td", { class: columns[at][1], "data-label": columns[at][0] },
      text, at === 0 && chosen ? el("span", { class: "pill good", text: "chosen" }) : null))));
  return [el("h4", { text: title }), el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": title },
    el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body)))];
}

function pairs(decision, prefill, decode, transfer) {
  const all = prefill.flatMap((from, row) => decode
    .map((to, column) => ({ from, to, transfer: transfer[row * decode.length + column] ?? 0 }))
    .filter(({ to }) => to.name !== from.name));
  for (const pair of all) {
    pair.sum = prompt(pair.from) + pair.transfer + pair.to.grant_us + pair.to.join_us;
    pair.chosen = decision.way === "handoff" && pair.from.name === decision.prefill && pair.to.name === decision.decode;
  }
  all.sort((a, b) => a.sum - b.sum);
  const shown = all.filter((pair, at) => at < PAIRS || pair.chosen);
  const title = all.length > shown.length ? `Pairs: the ${PAIRS} cheapest of ${whole(all.length)}` : "Pairs, by predicted time";
  return table(title,
    [["Pair", "name"], ["Prompt", "num"], ["Transfer", "num"], ["Reserve", "num"], ["Join", "num"], ["Sum", "num"]],
    shown.map((pair) => [pair.chosen, [`${pair.from.name} + ${pair.to.name} `, us(prompt(pair.from)), us(pair.transfer),
      us(pair.to.grant_us), us(pair.to.join_us), us(pair.sum)]]));
}

function prefills(decision, nodes) {
  return table("Nodes for the prompt",
    [["Node", "name"], ["Queue", "num"], ["Cached", "num"], ["To compute", "num"], ["Prompt done in", "num"], ["Load", "num"], ["Note", ""]],
    nodes.map((node) => [node.name === decision.prefill, [`${node.name} `, us(node.queue_us), `${whole(node.cached_tokens)} tokens`,
      `${whole(node.work.tokens)} tokens`, us(prompt(node)), percent(node.load, 1000), notes(node)]]));
}

function decodes(decision, nodes) {
  return table("Nodes for the answer",
    [["Node", "name"], ["Reserve", "num"], ["Join", "num"], ["KV to send", "num"], ["Alone", "num"], ["Load", "num"], ["Note", ""]],
    nodes.map((node) => [node.name === decision.decode, [`${node.name} `, us(node.grant_us), us(node.join_us), bytes(node.missing_bytes),
      node.has_credit ? us(alone(node)) : "busy", percent(node.load, 1000), notes(node)]]));
}
