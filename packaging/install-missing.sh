#!/bin/sh
# Installs the Debian packages of debian-packages.txt that this machine lacks. Asks nothing, says what it does.
set -eu
list=$(dirname "$0")/debian-packages.txt
missing=
for package in $(grep -v '^#' "$list"); do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ]; then
    echo "poolfs needs these Debian packages:$missing. Install them as root (apt-get install$missing) and run make again." >&2
    exit 1
fi
echo "installing:$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086 # one word a package
apt-get install -y -qq --no-install-recommends $missing >/dev/null
