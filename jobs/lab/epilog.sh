#!/bin/bash
# Runs on a node when a job there has ended, and kills the processes it left. A process that called setsid and lost its
# parent has left the step's process tree, but its environment still names its job and node.
has() { grep -qzFx -- "$2" "$1" 2>/dev/null; }

mapfile -t found < <(grep -lzFx -- "SLURM_JOB_ID=$SLURM_JOB_ID" /proc/[0-9]*/environ 2>/dev/null)
for environ in "${found[@]}"; do
    pid=${environ#/proc/}
    pid=${pid%/environ}
    # The epilog itself has the same environment.
    [[ $pid == "$$" ]] && continue
    if has "$environ" "SLURMD_NODENAME=$SLURMD_NODENAME" && has "$environ" "SLURM_CONF=$SLURM_CONF"; then
        kill -KILL "$pid" 2>/dev/null
    fi
done
exit 0
