"""Judges: second models of a campaign, which reward functions and environments call and which are never trained.

proxy     the address at which the processes of a worker call them
relay     a request that is sent on to another server, and its response back
server    one engine of a judge, behind its own address
"""
