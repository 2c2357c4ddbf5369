"""The OpenAI API that agent programs call.

server        HTTP and API keys
requests      request bodies and error responses
responses     chat and text forms
tool_parsers  tool calls in generated text, by family of models
generation    choices, stop strings, streaming
session       one attempt of an episode
recording     the tree of recorded turns
program       runs an agent program as an episode
"""
