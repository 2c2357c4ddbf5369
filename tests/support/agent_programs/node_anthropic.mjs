// Anthropic's package for JavaScript: a required tool call, then the tool's result, whose answer is streamed.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const Anthropic = createRequire(process.env.AGENT_PACKAGES)("@anthropic-ai/sdk");
const seed = JSON.parse(readFileSync(0, "utf8")).seed;
const [first, second] = [seed % 10, Math.floor(seed / 10) % 10];
const number = { type: "integer", minimum: 0, maximum: 99 };
const input_schema = { type: "object", properties: { a: number, b: number }, required: ["a", "b"] };
const settings = { model: process.env.OPENAI_MODEL, max_tokens: 64, tools: [{ name: "add", input_schema }] };
const client = new Anthropic();
const messages = [{ role: "user", content: `What is ${first} + ${second}? Use the tool add.` }];
const asked = await client.messages.create({ ...settings, messages, tool_choice: { type: "any" } });
const calls = asked.content.filter((block) => block.type === "tool_use");
const results = calls.map((call) => ({
  type: "tool_result",
  tool_use_id: call.id,
  content: String(call.input.a + call.input.b),
}));
const told = results.length > 0 ? results : "No call.";
messages.push({ role: "assistant", content: asked.content }, { role: "user", content: told });
await client.messages.stream({ ...settings, messages }).finalMessage();
const total = results.length > 0 ? Number(results.at(-1).content) : null;
console.log(JSON.stringify({ reward: total === null ? 0 : 1 / (1 + Math.abs(total - first - second)) }));
