// The dashboard in Chromium. Arguments: the reference file, the folder with node_modules. Says what is to happen to the cluster,
// and waits until the page shows it.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const reference = JSON.parse(readFileSync(process.argv[2], "utf8"));
const { chromium } = createRequire(`${process.argv[3]}/`)("playwright-core");
const LIMIT = 60_000;

const browser = await chromium.launch({
  executablePath: process.env.BATON_TEST_CHROMIUM ?? "/usr/bin/chromium",
  args: ["--headless=new", "--no-sandbox", "--disable-gpu"],
});
const origin = reference.admin;
const complaints = [];
const strangers = [];

async function newPage(options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(LIMIT);
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("console", (message) => {
    // What is asked of a coordinator that is stopped, or with a wrong token, fails.
    const expected = /ERR_CONNECTION|ERR_EMPTY_RESPONSE|status of 401|status of 404/.test(message.text());
    if (["error", "warning"].includes(message.type()) && !expected) complaints.push(message.text());
  });
  page.on("request", (request) => {
    if (!request.url().startsWith(origin)) strangers.push(request.url());
  });
  return page;
}

const page = await newPage();
const picture = (name, whole = true) => page.screenshot({ path: `${reference.pictures}/${name}.png`, fullPage: whole });
const text = (selector) => page.locator(selector).innerText();
const rowOf = (node) => page.locator("#nodes tbody tr", { hasText: node });

async function complete(id, words, tokens) {
  const answer = await fetch(`${reference.url}/v1/completions`, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...(id ? { "X-Request-Id": id } : {}) },
    body: JSON.stringify({ model: reference.model, prompt: "once upon a time ".repeat(words), max_tokens: tokens, temperature: 0 }),
  });
  assert.equal(answer.status, 200, await answer.text());
}

/** No part of the page is wider than the page. */
async function fits(of) {
  const [inner, outer] = await of.evaluate(() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]);
  assert.ok(inner <= outer, `${inner} px in ${outer} px`);
}

const HOSTILE = "<img src=x onerror=hacked()>";

const cases = {
  async the_token_is_taken_from_the_link_and_the_nodes_are_there() {
    await page.goto(`${origin}/dashboard#token=${reference.token}`);
    for (const node of reference.nodes) await rowOf(node).getByText("serving").waitFor();
    assert.equal(page.url(), `${origin}/dashboard`, "the token is not left in the address");
    assert.equal(await text("#ready"), "ready");
    assert.ok((await text("#about")).startsWith(`${reference.model} on coordinator`), await text("#about"));
    assert.deepEqual(await page.locator("#pools h3").allInnerTexts(), ["Prefill pool", "Decode pool"]);
  },
  async it_is_as_strict_as_it_can_be() {
    const answer = await fetch(`${origin}/dashboard`);
    const policy = answer.headers.get("content-security-policy");
    for (const part of ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"]) {
      assert.ok(policy.includes(part), `${part} in ${policy}`);
    }
    // On a page whose complaints are not counted.
    const other = await browser.newPage();
    await other.goto(`${origin}/dashboard`);
    const refused = await other.evaluate(() => {
      try {
        document.createElement("p").innerHTML = "<b>x</b>";
        return "taken";
      } catch (error) {
        return error.name;
      }
    });
    assert.equal(refused, "TypeError", "a text is not taken for markup, whoever wants that");
    await other.close();
  },
  async traffic_is_shown_with_its_phases() {
    const ids = [HOSTILE, "\"><script>hacked()</script>", null, null, null, null];
    await Promise.all(ids.map((id, at) => complete(id, 2 + 4 * at, 20 + 10 * at)));
    await page.locator("#requests tbody tr").nth(ids.length - 1).waitFor();
    const told = await page.locator("#requests .bar.phases").evaluateAll((bars) => bars.map((bar) => bar.getAttribute("aria-label")));
    assert.equal(told.length, ids.length);
    for (const phases of told) {
      for (const phase of ["queue", "prefill", "decode"]) assert.match(phases, new RegExp(`(^|, )${phase} [\\d.]+ m?s`));
    }
    const widths = await page.locator("#requests .bar.phases").first().locator(".part:visible").evaluateAll((parts) => parts.map((part) => part.offsetWidth));
    assert.ok(widths.length >= 3 && widths.every((width) => width >= 1), String(widths));
  },
  async latencies_and_rates_follow() {
    const tile = (title) => page.locator(".tile", { hasText: title }).locator(".value");
    await tile("First token").filter({ hasText: /^\d/ }).waitFor();
    await tile("Between tokens").filter({ hasText: /^\d/ }).waitFor();
    await tile("Tokens out").filter({ hasText: /[1-9]/ }).waitFor();
    assert.equal(await page.locator(".chart canvas").count(), 6);
    const first = page.locator(".chart", { hasText: "First token" });
    await first.locator(".key b").first().filter({ hasText: /^\d/ }).waitFor();
  },
  async it_fits_wide_and_narrow_light_and_dark() {
    await picture("light");
    await fits(page);
    await page.emulateMedia({ colorScheme: "dark" });
    await picture("dark");
    await page.setViewportSize({ width: 400, height: 800 });
    await picture("narrow-dark");
    await fits(page);
    await page.emulateMedia({ colorScheme: "light" });
    await picture("narrow");
    await page.setViewportSize({ width: 1280, height: 900 });
  },
  async a_click_opens_the_decision_record() {
    await page.locator("#requests button.id").first().click();
    const record = page.locator("#record");
    await record.getByText("Attempt 1, decided").waitFor();
    const said = await record.innerText();
    for (const part of ["computes the prompt and hands over to", "decode-0", "Pairs, by predicted time", "Nodes for the answer", "chosen"]) {
      assert.ok(said.includes(part), `${part} in ${said}`);
    }
    assert.match(page.url(), /#request=[0-9a-f]{32}$/);
    await picture("record", false);
    await page.setViewportSize({ width: 400, height: 800 });
    await picture("record-narrow", false);
    await fits(page);
    await page.setViewportSize({ width: 1280, height: 900 });
    // The address opens it again.
    const other = await page.context().newPage();
    await other.addInitScript((token) => sessionStorage.setItem("baton-admin-token", token), reference.token);
    await other.goto(page.url());
    await other.locator("#record").getByText("Attempt 1, decided").waitFor();
    await other.close();
  },
  async keys_are_enough() {
    await page.keyboard.press("Escape");
    await page.locator("#record").waitFor({ state: "hidden" });
    assert.equal(page.url(), `${origin}/dashboard`);
    const first = page.locator("#requests button.id").first();
    assert.ok(await first.evaluate((button) => button === document.activeElement), "the button that opened it has the focus again");
    await page.keyboard.press("Enter");
    await page.locator("#record").getByText("Attempt 1, decided").waitFor();
    await page.keyboard.press("Escape");
    await page.locator("#find-id").fill("00000000000000000000000000000001");
    await page.keyboard.press("Enter");
    await page.locator("#record .error").filter({ hasText: "nothing is kept about request" }).waitFor();
    await page.keyboard.press("Escape");
  },
  async nothing_that_the_coordinator_says_becomes_markup() {
    const bad = await newPage();
    await bad.addInitScript((token) => {
      window.hacked = () => (window.wasHacked = true);
      sessionStorage.setItem("baton-admin-token", token);
    }, reference.token);
    // Every text but the ids that are asked with; and a client's own id, which is one more text.
    const swap = (value, name) => {
      if (typeof value === "string") return name === "request" ? value : HOSTILE;
      if (Array.isArray(value)) return value.map((one) => swap(one));
      if (!value || typeof value !== "object") return value;
      const swapped = Object.fromEntries(Object.entries(value).map(([key, of]) => [key, swap(of, key)]));
      return value.phases ? { ...swapped, client_request_id: HOSTILE } : swapped;
    };
    await bad.route(/\/(status|debug)/, async (route) => {
      const answer = await route.fetch();
      await route.fulfill({ response: answer, json: swap(await answer.json()) });
    });
    await bad.goto(`${origin}/dashboard`);
    await bad.locator("#requests button.id").first().click();
    await bad.locator("#record h3").first().waitFor();
    assert.ok((await bad.locator("#nodes tbody").innerText()).includes(HOSTILE));
    assert.ok((await bad.locator("#record").innerText()).includes(HOSTILE));
    assert.equal(await bad.locator("img").count(), 1, "the mark and no other picture");
    assert.equal(await bad.evaluate(() => window.wasHacked === true), false);
    await bad.context().close();
  },
  async a_wrong_token_is_refused_and_a_right_one_opens() {
    const other = await newPage();
    await other.goto(`${origin}/dashboard`);
    assert.equal(await other.locator("#board").isVisible(), false);
    await other.getByLabel("Admin token").fill("not-the-token-0123456789");
    await other.keyboard.press("Enter");
    await other.getByText("this token is not one of admin.tokens").waitFor();
    await other.screenshot({ path: `${reference.pictures}/entry.png` });
    await other.getByLabel("Admin token").fill(reference.token);
    await other.getByRole("button", { name: "Open" }).click();
    await other.locator("#nodes tbody tr").first().waitFor();
    await other.getByRole("button", { name: "Forget token" }).click();
    assert.equal(await other.evaluate(() => sessionStorage.length), 0);
    assert.equal(await other.locator("#board").isVisible(), false);
    await other.context().close();
  },
  async the_clients_port_says_where_it_is() {
    const other = await browser.newPage();
    await other.goto(`${reference.url}/dashboard`);
    assert.equal(await other.getByRole("link").getAttribute("href"), `${origin}/dashboard`);
    await other.close();
  },
  async a_node_that_dies_is_shown() {
    console.log("now prefill-1 dies");
    await rowOf("prefill-1").getByText("gone").waitFor();
    await page.locator("#pools").getByText("1 serving").first().waitFor();
    await picture("node-gone");
  },
  async the_page_outlives_the_coordinator() {
    console.log("now the coordinator stops");
    await page.locator("#banner").getByText("The coordinator does not answer. Trying again.").waitFor();
    assert.ok(await page.locator("#board").isVisible(), "what is known stays");
    await picture("away");
    console.log("now the coordinator starts");
    await page.locator("#banner").waitFor({ state: "hidden" });
    await rowOf("decode-0").getByText("serving").waitFor();
    await page.getByText("No request has come yet.").waitFor();
    await complete(null, 4, 8);
    await page.locator("#requests .bar.phases").first().waitFor();
  },
  async nobody_complained_nothing_came_from_elsewhere_and_nothing_moved() {
    assert.deepEqual(complaints, []);
    assert.deepEqual(strangers, []);
    const fresh = await newPage();
    await fresh.goto(`${origin}/dashboard#token=${reference.token}`);
    await fresh.locator("#requests .bar.phases").first().waitFor();
    await fresh.locator(".chart canvas").nth(5).waitFor();
    const moved = await fresh.evaluate(() => new Promise((tell) => {
      let sum = 0;
      new PerformanceObserver((list) => list.getEntries().forEach((entry) => (sum += entry.value))).observe({ type: "layout-shift", buffered: true });
      requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => tell(sum), 0)));
    }));
    assert.ok(moved < 0.05, `layout shift ${moved}`);
  },
};

let failed = 0;
for (const [name, run] of Object.entries(cases)) {
  try {
    await run();
    console.log(`${name}: ok`);
  } catch (error) {
    failed += 1;
    console.log(`${name}: FAILED\n${error.stack}`);
    await picture(`failed-${name}`).catch(() => {});
    break;
  }
}
await browser.close();
const passed = Object.keys(cases).length - failed;
console.log(failed ? `${failed} failed, the rest was not tried` : `${passed} passed, 0 failed`);
process.exit(failed ? 1 : 0);
