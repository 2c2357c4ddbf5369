#!/usr/bin/env bash
# Install missing Debian packages: those of the lab, or the given ones. Without root, print what is missing and exit 0.
set -euo pipefail

if [ $# -gt 0 ]; then
    wanted=("$@")
else
    wanted=(slurm-wlm slurmdbd munge mariadb-server libpmix-dev bubblewrap openssl)
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
# Keep Debian from starting services: the lab starts its own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
