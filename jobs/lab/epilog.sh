#!/bin/bash
# Runs on a node when a job there is over: ends what the job left behind. A process that called setsid and whose
# parent is gone is no longer in the step's process tree; its environment still says which job and node it came from.
has() { grep -qzFx -- "$2" "$1" 2>/dev/null; }

mapfile -t found < <(grep -lzFx -- "SLURM_JOB_ID=$SLURM_JOB_ID" /proc/[0-9]*/environ 2>/dev/null)
for environ in "${found[@]}"; do
    pid=${environ#/proc/}
    pid=${pid%/environ}
    # The epilog's own environment looks the same.
    [[ $pid == "$$" ]] && continue
    if has "$environ" "SLURMD_NODENAME=$SLURMD_NODENAME" && has "$environ" "SLURM_CONF=$SLURM_CONF"; then
        kill -KILL "$pid" 2>/dev/null
    fi
done
exit 0
