"""Stand-ins for tests of one's own; nothing in hpcrl imports them.

memory  a spool and a weight store in memory
"""
