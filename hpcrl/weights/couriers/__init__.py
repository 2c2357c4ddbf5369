"""The couriers: one process per node that sends or receives weights.

__main__      start a courier
sender        send versions from the trainer's first node
part_sender   send the part of another node of the trainer
receiver      receive versions into the window of a node
protocol      messages between couriers, and detection of stuck ones
spans         the bytes of a part in each message
link          the connection to the other couriers
mpi_transport  transport over MPI
tcp_transport  transport over TCP
delta_codec   encode only the values that changed
codec_choice  choose full or delta by measured times
"""
