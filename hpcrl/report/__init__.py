"""The report of campaigns: one HTML page and the same figures as JSON, from their directories, without a server.

arguments     the command line, light enough for a login node
__main__      the command, in an interpreter that has h5py if there is one
builder       the figures of a campaign
history       what its events have besides the monitor's figures
charts        its charts
gantt         its workers by time
trajectories  a sample of what was played
comparison    several campaigns
figures       all of this as structs
page          the page with its charts, and a picture of it
sections      its sections
conversation_html  its trajectories and groups
markup        parts of them
"""
