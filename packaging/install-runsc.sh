#!/bin/sh
# Installs gVisor's runsc, a peer of the measurements, by Go's module registry: install-runsc.sh PROGRAM
# Where it cannot be had, it says so, and the measurements have no columns of it.
set -eu
version=v0.0.0-20260905035102-160fafc42237
if ! command -v go >/dev/null; then
    echo "there is no Go here: the measurements go without gVisor (apt-get install golang-go)"
    exit 0
fi
mkdir -p "$(dirname "$1")"
echo "installing gVisor's runsc"
# In the sandbox there is no loader for a dynamic program.
if ! CGO_ENABLED=0 GOBIN=$(realpath "$(dirname "$1")") GOFLAGS=-modcacherw go install "gvisor.dev/gvisor/runsc@$version"; then
    echo "gVisor's runsc could not be installed: the measurements go without it"
fi
