"""What the processes of a campaign share on disk.

paths      where every file of a campaign and of a job is
workers    which worker, and where it works
endpoints  the engine workers that serve now
event_log  append and read JSON lines
events     every event that is written to them
"""
