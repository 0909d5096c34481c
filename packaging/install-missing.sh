#!/bin/sh
# Installs the Debian packages of debian-packages.txt that this machine lacks: install-missing.sh
# Or those that are named, without starting the servers that come with them: install-missing.sh --no-servers PACKAGE...
# Asks nothing, says what it does.
set -eu
packages=$(grep -v '^#' "$(dirname "$0")/debian-packages.txt")
if [ "${1:-}" = --no-servers ]; then
    shift
    packages=$*
    policy=/usr/sbin/policy-rc.d
fi
missing=
for package in $packages; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ]; then
    echo "poolfs needs these Debian packages:$missing. Install them as root (apt-get install$missing) and run make again." >&2
    exit 1
fi
echo "installing:$missing"
export DEBIAN_FRONTEND=noninteractive
if [ -n "${policy:-}" ] && [ ! -e "$policy" ]; then
    # What Debian's packages ask before they start a server; 101 forbids it.
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
apt-get update -qq
# shellcheck disable=SC2086 # one word a package
apt-get install -y -qq --no-install-recommends $missing >/dev/null
