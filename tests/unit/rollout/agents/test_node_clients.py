"""The clients for JavaScript of OpenAI and Anthropic: a conversation with a tool is one recorded conversation.

Needs node, and the packages in a folder that NODE_PATH names: `npm install --prefix DIR openai @anthropic-ai/sdk`, then
NODE_PATH=DIR/node_modules.
"""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hpcrl.models.chat_layout import load_chat_template
from hpcrl.rollout.episode import EpisodeLimits
from tests.support.scripted import opened

LIMITS = EpisodeLimits(max_turns=8, max_new_tokens=256, context_length=4096, max_lag=1)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1.0}}</tool_call><eos>'
CHAT = """
const client = new (require("openai"))();
const tools = [{type: "function", function: {name: "add", parameters: {type: "object"}}}];
const messages = [{role: "user", content: "1+1=?"}];
(async () => {
  const first = (await client.chat.completions.create({model: "hpcrl", messages, tools})).choices[0].message;
  messages.push(first, {role: "tool", tool_call_id: first.tool_calls[0].id, content: "2"});
  console.log((await client.chat.completions.stream({model: "hpcrl", messages, tools}).finalMessage()).content);
})();
"""
RESPONSES = """
const client = new (require("openai"))();
const tools = [{type: "function", name: "add", parameters: {type: "object"}, strict: false}];
(async () => {
  const first = await client.responses.create({model: "hpcrl", input: "1+1=?", tools});
  const input = [{type: "function_call_output", call_id: first.output.at(-1).call_id, output: "2"}];
  const asked = {model: "hpcrl", previous_response_id: first.id, input, tools};
  console.log((await client.responses.create(asked)).output_text);
})();
"""
MESSAGES = """
const client = new (require("@anthropic-ai/sdk"))();
const tools = [{name: "add", input_schema: {type: "object"}}];
const messages = [{role: "user", content: "1+1=?"}];
(async () => {
  const first = await client.messages.create({model: "hpcrl", max_tokens: 99, messages, tools});
  const result = {type: "tool_result", tool_use_id: first.content.at(-1).id, content: "2"};
  messages.push({role: "assistant", content: first.content}, {role: "user", content: [result]});
  const stream = client.messages.stream({model: "hpcrl", max_tokens: 99, messages, tools});
  console.log((await stream.finalMessage()).content[0].text);
})();
"""
PROGRAMS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
FOLDERS = [Path(folder) for folder in os.environ.get("NODE_PATH", "").split(":") if folder]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.skipif(not any((folder / "openai").is_dir() for folder in FOLDERS), reason="NODE_PATH has no clients")
@pytest.mark.parametrize("form", PROGRAMS)
def test_a_program_for_node_has_one_conversation(tiny_model_dir, form):
    template = load_chat_template(tiny_model_dir)

    async def run():
        async with opened(template, CALL, ["o", "k<eos>"], limits=LIMITS) as client:
            url = client.proxy.url
            access = {"OPENAI_BASE_URL": url, "ANTHROPIC_BASE_URL": url.removesuffix("/v1")}
            keys = {"OPENAI_API_KEY": client.api_key, "ANTHROPIC_API_KEY": client.api_key}
            done = await asyncio.to_thread(
                subprocess.run,
                ["node", "-e", PROGRAMS[form]],
                env=os.environ | access | keys,
                capture_output=True,
                text=True,
                timeout=100,
            )
            return done, client.session.recording.turns

    done, turns = asyncio.run(run())
    assert (done.stdout.strip(), done.returncode) == ("ok", 0), done.stderr
    assert turns[1].prompt.parent is turns[0]
