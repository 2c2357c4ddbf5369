"""What a model directory holds.

chat_layout    turns as tokens, from the chat template
chat_template  renders and tokenizes conversations
model_config   config.json: context, vocabulary, shape
tiny           a model that learns in seconds
"""
