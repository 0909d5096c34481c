#!/bin/sh
# Makes a Debian root file system from this machine's own apt sources: make-root-image.sh OUTPUT.tar [PACKAGE...]
# With python3, git and gcc when no packages are named. An existing output is kept.
set -eu
output=$1
shift
[ $# -gt 0 ] || set -- gcc git libc6-dev python3
[ -s "$output" ] && exit 0
# shellcheck disable=SC1091
. /etc/os-release
sources=/etc/apt/sources.list.d/debian.sources
[ -s "$sources" ] || sources=/etc/apt/sources.list
mkdir -p "$(dirname "$output")"
part=$output.part.tar
trap 'rm -f "$part"' EXIT
echo "making a Debian root image ($VERSION_CODENAME) from $sources"
mmdebstrap --quiet --mode=root --variant=apt --include="ca-certificates $*" \
    "$VERSION_CODENAME" "$part" "$sources"
mv "$part" "$output"
