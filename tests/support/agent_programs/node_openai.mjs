// The `openai` package for JavaScript: a required tool call in chat, then the answer through the API of responses.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const OpenAI = createRequire(process.env.AGENT_PACKAGES)("openai");
const seed = JSON.parse(readFileSync(0, "utf8")).seed;
const [first, second] = [seed % 10, Math.floor(seed / 10) % 10];
const number = { type: "integer", minimum: 0, maximum: 99 };
const parameters = { type: "object", properties: { a: number, b: number }, required: ["a", "b"] };
const model = process.env.OPENAI_MODEL;
const client = new OpenAI();
const messages = [{ role: "user", content: `What is ${first} + ${second}? Use the tool add.` }];
const tools = [{ type: "function", function: { name: "add", parameters } }];
const asked = await client.chat.completions.create({ model, messages, tools, tool_choice: "required" });
let total = null;
for (const call of asked.choices[0].message.tool_calls ?? []) {
  const { a, b } = JSON.parse(call.function.arguments);
  total = a + b;
}
let text = "";
const stream = await client.responses.create({ model, input: `Is it ${total}?`, stream: true });
for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
if (text === "") throw new Error("the stream had no text");
console.log(JSON.stringify({ reward: total === null ? 0 : 1 / (1 + Math.abs(total - first - second)) }));
