"""vLLM as a supervised server, with hpcrl's plugins in it.

engine              the engine, a client of the server
server              start, call and end the server
supervisor          the process that owns the server
engine_group          where the parts of an engine over several nodes meet
engine_part           a further part of such an engine
headless            vLLM's processes of a further part
protocol            requests to the server, and its answers
kv_connectors       configuration of KV connectors
kv_files            names and limits of KV files
kv_files_connector  the KV connector that uses those files
answer_prefix       structured answers of which another engine has generated the first tokens
store_address       torch's stores in vLLM's processes, each at one address
parsers             vLLM's own parsers of tool calls and thoughts
weight_plugin       new weights inside the server
adapter_model       versions that are adapters, in the form of vLLM
adapter_worker      the switch to them in its worker processes
weight_route        the server's route that switches versions
cpu_experts         experts that ranks divide, on CPUs
weight_twin         a second copy of the weights, filled while the first serves
"""
