// The openai client for Node against a running cluster. Arguments: the reference file, the folder with node_modules.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const reference = JSON.parse(readFileSync(process.argv[2], "utf8"));
const { OpenAI } = createRequire(`${process.argv[3]}/`)("openai");
const client = new OpenAI({ baseURL: `${reference.url}/v1`, apiKey: "unused", maxRetries: 0, timeout: 60_000 });

const usual = { model: reference.model, prompt: reference.prompt, max_tokens: reference.max_tokens, temperature: 0 };
const messages = [{ role: "user", content: reference.chat_question }];

const cases = {
  async a_whole_completion() {
    const answer = await client.completions.create(usual);
    assert.equal(answer.choices[0].text, reference.text);
    assert.equal(answer.choices[0].finish_reason, "length");
    assert.equal(answer.usage.completion_tokens, reference.max_tokens);
    assert.equal(answer.usage.prompt_tokens, reference.prompt_ids.length);
  },
  async a_streamed_completion() {
    const stream = await client.completions.create({ ...usual, stream: true, stream_options: { include_usage: true } });
    let text = "";
    let usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.text ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, reference.text);
    assert.equal(usage.completion_tokens, reference.max_tokens);
  },
  async several_choices_and_prompts() {
    const options = { ...usual, prompt: [reference.prompt, reference.prompt], n: 2, temperature: 0.8, seed: 4 };
    const answer = await client.completions.create(options);
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2, 3]);
    assert.equal(answer.choices[0].text, answer.choices[2].text);
    assert.equal(answer.usage.completion_tokens <= 4 * reference.max_tokens, true);
  },
  async stop_strings_and_echo() {
    const stopped = await client.completions.create({ ...usual, stop: [reference.stop] });
    assert.equal(stopped.choices[0].text, reference.stopped_text);
    const echoed = await client.completions.create({ ...usual, echo: true, logprobs: 1 });
    assert.equal(echoed.choices[0].text, reference.prompt + reference.text);
    assert.equal(echoed.choices[0].logprobs.token_logprobs[0], null);
  },
  async chat_whole_and_streamed() {
    const chat = { model: reference.model, messages, max_completion_tokens: 64, temperature: 0 };
    const answer = await client.chat.completions.create(chat);
    assert.equal(answer.choices[0].message.content, reference.chat_text);
    assert.equal(answer.choices[0].finish_reason, "stop");
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    assert.equal(text, reference.chat_text);
  },
  async a_streamed_chat_with_the_client_s_own_assembly() {
    const chat = { model: reference.model, messages, max_completion_tokens: 64, temperature: 0 };
    const whole = await client.chat.completions.stream(chat).finalChatCompletion();
    assert.equal(whole.choices[0].message.content, reference.chat_text);
  },
  async models() {
    const ids = [];
    for await (const model of client.models.list()) ids.push(model.id);
    assert.ok(ids.includes(reference.model));
    assert.equal((await client.models.retrieve(reference.model)).id, reference.model);
  },
  async errors() {
    await assert.rejects(client.completions.create({ ...usual, temperature: -1 }), (error) => {
      assert.equal(error.constructor, OpenAI.BadRequestError);
      assert.equal(error.status, 400);
      assert.equal(error.param, "temperature");
      return true;
    });
    const unknown = client.completions.create({ ...usual, model: "unknown" });
    await assert.rejects(unknown, (error) => error.constructor === OpenAI.NotFoundError);
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
  }
}
console.log(`${Object.keys(cases).length - failed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
