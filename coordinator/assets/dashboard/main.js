// The page: asks for a token, then for news every two seconds, for as long as it is looked at. When nobody answers it says so,
// shows what it knows, and goes on when somebody does.

import { Charts, History } from "./charts.js";
import { age, el, ms, number, say, whole } from "./dom.js";
import { Nodes } from "./nodes.js";
import { Record } from "./record.js";
import { Requests } from "./requests.js";
import { Failure, ask, token } from "./server.js";

const PACE = 2_000;
/** Pauses after failures, in milliseconds: the last one is kept to. */
const RETRY = [500, 1_000, 2_000, 3_000];
/** Requests shown of each kind. */
const SHOWN = 30;

const at = (id) => document.getElementById(id);
const history_ = new History();
const charts = new Charts(at("charts"), history_);
const nodes = new Nodes(at("pools"), at("nodes"), at("kv-key"));
const record = new Record(at("record"), at("record-title"), at("record-body"));
const requests = new Requests(at("requests"), at("phase-key"), at("to-scale"), (id) => record.open(id));

let timer = 0;
let failures = 0;
let heard = 0;
/** Counts how often it has been begun anew: an answer to an earlier question is not wanted any more. */
let round = 0;

const tile = (title) => {
  const parts = { value: el("p", { class: "value" }), note: el("p", { class: "note" }) };
  at("tiles").append(el("div", { class: "tile card" }, el("h2", { text: title }), parts.value, parts.note));
  return parts;
};
const tiles = {
  work: tile("Requests running"),
  ttft: tile("First token, median"),
  itl: tile("Between tokens, median"),
  tokens: tile("Tokens out"),
  requests: tile("Requests answered"),
};

function fill(tile, value, note) {
  say(tile.value, value);
  say(tile.note, note);
}

function show(status) {
  const { coordinator, recent } = status;
  say(at("about"), `${coordinator.model} on ${coordinator.node}, up ${age(coordinator.up_ms)}`);
  document.title = `Baton: ${coordinator.model}`;
  const ready = at("ready");
  ready.hidden = false;
  ready.className = `pill ${status.draining ? "warn" : status.ready ? "good" : "bad"}`;
  say(ready, status.draining ? "stopping" : status.ready ? "ready" : "not ready");
  const spread = (of) => `p90 ${ms(of.p90)}   p99 ${ms(of.p99)}`;
  fill(tiles.work, whole(status.running), `${whole(status.queued)} waiting in the queue`);
  fill(tiles.ttft, ms(recent.ttft_ms.p50), spread(recent.ttft_ms));
  fill(tiles.itl, ms(recent.itl_ms.p50), spread(recent.itl_ms));
  fill(tiles.tokens, `${number(recent.generated_tokens_per_s)}/s`, `${number(recent.prompt_tokens_per_s)}/s in`);
  fill(tiles.requests, `${number(recent.answered_per_s)}/s`, `${number(recent.failed_per_s)}/s failed`);
  nodes.show(status);
}

async function look() {
  const begun = round;
  const status = await ask(`/status?since=${history_.next}`);
  const recent = await ask(`/debug/requests?most=${SHOWN}`);
  if (begun !== round) return;
  heard = Date.now();
  if (history_.take(status)) return look();
  // Shown when it is filled: nothing moves then.
  at("board").hidden = false;
  show(status);
  requests.show(recent);
  charts.draw();
  await record.refresh();
}

async function turn() {
  clearTimeout(timer);
  const begun = round;
  let pause = PACE;
  try {
    await look();
    failures = 0;
    at("banner").hidden = true;
    document.body.classList.remove("stale");
  } catch (thrown) {
    if (begun !== round) return;
    const failure = thrown instanceof Failure ? thrown : new Failure("away", "the answer is not understood");
    if (failure.kind === "refused") return enter(failure.message);
    pause = RETRY[Math.min(failures, RETRY.length - 1)];
    failures += 1;
    lost(failure);
  }
  if (begun === round && !document.hidden) timer = setTimeout(turn, pause);
}

function lost(failure) {
  const since = heard ? ` What you see is ${age(Date.now() - heard)} old.` : "";
  const text = failure.kind === "away" ? failure.message : `the coordinator says: ${failure.message}`;
  say(at("banner"), `${text[0].toUpperCase()}${text.slice(1)}. Trying again.${since}`);
  at("banner").hidden = false;
  document.body.classList.add("stale");
  at("ready").className = "pill";
  say(at("ready"), "no answer");
}

function enter(error) {
  round += 1;
  clearTimeout(timer);
  token.forget();
  at("board").hidden = true;
  at("forget").hidden = true;
  at("ready").hidden = true;
  at("banner").hidden = true;
  record.close();
  history_.clear();
  say(at("about"), "\u00a0");
  document.title = "Baton";
  at("entry").hidden = false;
  say(at("entry-error"), error ?? "");
  at("token").value = "";
  at("token").focus();
}

function begin() {
  round += 1;
  failures = 0;
  at("entry").hidden = true;
  at("forget").hidden = false;
  record.follow();
  turn();
}

at("entry-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = at("token").value.trim();
  // What no header can carry is no token.
  if (!/^[\x21-\x7e]+$/.test(given)) return say(at("entry-error"), "a token has letters, digits and signs, and no spaces");
  token.keep(given);
  begin();
});
at("find").addEventListener("submit", (event) => {
  event.preventDefault();
  record.open(at("find-id").value.trim());
});
at("forget").addEventListener("click", () => enter());
at("record-close").addEventListener("click", () => record.close());
document.addEventListener("visibilitychange", () => {
  if (document.hidden || !token.get()) return;
  round += 1;
  turn();
});

// A link may bring the token along, behind the #, which is never sent: it is taken, and the address made clean.
function arrive() {
  const brought = /^#token=([\x21-\x7e]+)$/.exec(location.hash);
  if (brought) {
    token.keep(brought[1]);
    history.replaceState(null, "", location.pathname);
  }
  if (token.get()) begin();
  else enter();
}
addEventListener("hashchange", arrive);
arrive();
