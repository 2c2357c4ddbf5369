"""The contents of a model directory.

chat_layout    turns as tokens, derived from the chat template
chat_template  renders and tokenizes conversations
model_config   config.json: context, vocabulary, shape
tiny           a tiny model that learns in seconds
"""
