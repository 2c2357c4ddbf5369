"""Couriers: one process per node that sends or receives weights.

__main__      the courier
sender        sends a version
part_sender   sends a rank's part of one
receiver      receives into the node's window
protocol      what couriers agree on
spans         which bytes go in which message
link          one connection
wire_mpi      MPI
wire_tcp      TCP
delta_codec   only what changed
codec_choice  full or delta, by measured times
"""
