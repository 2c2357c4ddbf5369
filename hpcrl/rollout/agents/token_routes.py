"""Answer POST /tokenize and /detokenize, in the form of vLLM's server, for programs that count tokens. Pure.

list_prompt_ids  the ids of a call's prompt, which is not recorded
tokenize         a text or a conversation to ids
detokenize       ids to a text
"""

from typing import Any

import msgspec

from hpcrl.errors import ConfigError
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents.requests import ApiError, JsonObject, ModelCall, make_tool, normalise_messages, parse_body


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /tokenize: a text, or a conversation."""

    prompt: str | None = None
    messages: list[JsonObject] | None = None
    tools: list[JsonObject] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[int]


def list_prompt_ids(call: ModelCall, template: ChatTemplate) -> list[int]:
    """Return the ids of a call's prompt."""
    try:
        return template.encode(template.render(call.messages, tools=call.tools, template_kwargs=call.template_kwargs))
    except ConfigError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from None


def tokenize(body: bytes, template: ChatTemplate, *, context_length: int) -> JsonObject:
    """Return the ids of a text or of a conversation."""
    request, _ = parse_body(body, TokenizeRequest)
    if request.messages:
        tools = [make_tool(tool.get("function"), place="tools") for tool in request.tools or []]
        call = ModelCall(model="", messages=normalise_messages(request.messages), tools=tools or None)
        ids = list_prompt_ids(call, template)
    elif request.prompt is not None:
        ids = template.encode_text(request.prompt)
    else:
        raise ApiError(400, "prompt is missing: give a text, or messages", param="prompt", code="invalid_value")
    found: dict[str, Any] = {"count": len(ids), "max_model_len": context_length, "tokens": ids}
    if request.return_token_strs:
        found["token_strs"] = [template.decode_token(token) for token in ids]
    return found


def detokenize(body: bytes, template: ChatTemplate) -> JsonObject:
    """Return the text of ids."""
    request, _ = parse_body(body, DetokenizeRequest)
    if not all(0 <= token < template.vocabulary_size for token in request.tokens):
        why = f"tokens has ids outside of 0..{template.vocabulary_size - 1}"
        raise ApiError(400, why, param="tokens", code="invalid_value")
    return {"prompt": str(template.tokenizer.decode(request.tokens, skip_special_tokens=False))}
