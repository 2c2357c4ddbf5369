"""The contents of a model directory.

chat_layout     turns as tokens, derived from the chat template
chat_template   renders and tokenizes conversations
jinja_template  compiles templates in transformers' dialect of Jinja
conversation_data  conversations to train on, checked without a model
call_form       a tool call as text
message_form    what a template accepts of messages, found out by rendering
model_config    config.json: context, vocabulary, shape
weight_headers    whether the files of the weights are there, and whole
weight_files    their tensors, and the model's tensors that they make up
expert_routers    the routers of its experts
adapted_layers    the layers that adapters are for, and their names
tiny            a tiny model that learns in seconds
tiny_vocabulary  its tokens, without torch
"""
