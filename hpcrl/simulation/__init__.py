"""`hpcrl simulate`: a campaign of any size in simulated time, under the policies of a real one.

clock        the queue of events in simulated time
workload     the episodes: by distributions, or as recorded
recorded     the episodes of a campaign
engine       an engine by the cost model, in few events
turn_router  the router of env workers, on simulated engines
sizes        the number of workers of each role
scaling      the plan for another number of GPUs
simulated_worker   an env worker: admission, groups, episodes
trainer      the trainer: choice of groups, steps, versions
campaign     all of them together, job after job
result       the figures of a simulation
timeline     their picture
frontier     other plans, with their time and cost
__main__     the command line
"""
