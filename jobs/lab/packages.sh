#!/usr/bin/env bash
# Install Debian packages that are missing: those of the lab, or the ones named. Without root, say so and go on.
set -euo pipefail

if [ $# -gt 0 ]; then
    wanted=("$@")
else
    wanted=(slurm-wlm slurmdbd munge mariadb-server libpmix-dev bubblewrap)
fi
missing=()
for package in "${wanted[@]}"; do
    if ! dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed'; then
        missing+=("$package")
    fi
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" -ne 0 ]; then
    echo "not root: ${missing[*]} cannot be installed, so what needs them is skipped (apt-get install ${missing[*]})"
    exit 0
fi
# Debian starts no service for us: the lab brings up its own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
