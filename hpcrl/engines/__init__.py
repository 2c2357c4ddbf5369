"""What generates tokens, behind one protocol.

base            requests, completions, protocols
http            an engine behind HTTP, and its client
request_checks  the limits of an engine, checked before a request waits
request_loop    requests that wait, run and are cancelled
embedded        a torch model in this process
sim             a simulated engine in virtual time
vllm            vLLM as a supervised server
"""
