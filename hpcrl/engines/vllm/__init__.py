"""vLLM as a supervised server, with hpcrl's plugins in it.

engine              the engine that talks to the server
server              start and end the server
supervisor          the process that owns the server
protocol            what the server answers
kv_connectors       which KV connector a site uses
kv_files            KV blocks as files
kv_files_connector  vLLM's end of those files
weight_plugin       new weights inside the server
weight_route        the server's route that switches versions
weight_twin         a second copy of the weights, to be filled while the first serves
"""
