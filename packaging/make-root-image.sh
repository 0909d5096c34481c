#!/bin/sh
# Makes a Debian root file system with python3, git and gcc from this machine's own apt sources: make-root-image.sh OUTPUT.tar
# An existing output is kept.
set -eu
output=$1
[ -s "$output" ] && exit 0
# shellcheck disable=SC1091
. /etc/os-release
sources=/etc/apt/sources.list.d/debian.sources
[ -s "$sources" ] || sources=/etc/apt/sources.list
mkdir -p "$(dirname "$output")"
part=$output.part.tar
trap 'rm -f "$part"' EXIT
echo "making a Debian root image ($VERSION_CODENAME) from $sources"
mmdebstrap --quiet --mode=root --variant=apt --include=ca-certificates,gcc,git,libc6-dev,python3 \
    "$VERSION_CODENAME" "$part" "$sources"
mv "$part" "$output"
