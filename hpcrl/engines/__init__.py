"""Inference engines: every backend generates tokens behind one protocol.

base            requests, completions and the protocols of an engine
http            the HTTP server of an engine, and its client
node_socket     turns over a Unix socket, for clients on its node
proved_connector  its connections, on which the server proves first that it has the token
request_checks  limits that are checked before a request is queued
structure       what the text of an answer must be, as a grammar
version_gate    first turns that wait for a version
request_loop    requests that are queued, stepped and cancelled
embedded        a torch model in this process
sim             a simulated engine in virtual time
vllm            vLLM as a supervised server
"""
