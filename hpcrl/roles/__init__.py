"""What each worker of a job runs; roles meet only on disk and over HTTP.

__main__     every worker's entry point
context      what a worker knows of its campaign
env          episodes
reward       scores of finished segments
serve        an engine, for prefill or decode
train        training and publishing
train_queue  trajectories that wait to be trained
"""
