"""The model's API that agent programs call: OpenAI's three forms and Anthropic's.

server         HTTP and API keys
requests       the internal form of a call, into which every form is translated
answers        the internal form of an answer
chat_form      /v1/chat/completions
text_form      /v1/completions, /tokenize
responses_form, response_items  /v1/responses
messages_form  /v1/messages
answer_parser  which parsers read an answer
structures     what an answer must be, as an engine needs it
tool_parsers, tool_families  tool calls in generated text, by family of models
reasoning_parsers  thoughts in generated text, by family
generation     choices, stop strings, streaming
session        one attempt of an episode
recording      the tree of recorded turns
shared_sequence  texts and ids that start alike, stored once
episode_record  the record that is made of it
program        runs an agent program as an episode
"""
