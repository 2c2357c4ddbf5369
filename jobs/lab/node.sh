#!/bin/sh
# Runs a daemon as a node of a strict lab: node.sh NODE ROOT CGROUP [DIR...] -- COMMAND...
# The caller has made namespaces of mounts and of the hostname for it. ROOT is the lab's directory, CGROUP the name of the
# lab's control groups; each DIR below /tmp is what all nodes see of the machine's /tmp.
set -eu
node=$1 root=$2 cgroup=$3
shift 3
tmp=$root/tmp/$node
mount -t tmpfs -o size=2g,mode=1777,nosuid,nodev tmpfs /dev/shm
mount --bind "$root/hosts" /etc/hosts
while [ "$1" != -- ]; do
    mkdir -p "$tmp${1#/tmp}"
    mount --rbind "$1" "$tmp${1#/tmp}"
    shift
done
shift
mount --rbind "$tmp" /tmp
# Slurm names its groups after nodes, which other labs have too: here theirs are below a group of this lab and node.
for controller in memory freezer; do
    group=/sys/fs/cgroup/$controller/$cgroup/$node
    if mkdir -p "$group" 2>/dev/null; then
        echo $$ >"$group/tasks"
        mount --bind "$group" "/sys/fs/cgroup/$controller"
    fi
done
hostname "$node"
exec unshare --cgroup "$@"
