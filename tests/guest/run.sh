#!/usr/bin/env bash
# Runs end-to-end tests in a virtual machine with Debian's own kernel, which has version 2 of control groups only:
# run.sh TEST[:FILTER]... (a file of tests/tests, all of its tests or those whose names contain FILTER). Everything is emulated, so it is slow.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=$PWD
work=$here/target/guest
root=$work/root
mkdir -p "$work"
packaging/install-missing.sh --no-servers qemu-system-x86
# shellcheck disable=SC1091
. /etc/os-release
sources=/etc/apt/sources.list.d/debian.sources
[ -s "$sources" ] || sources=/etc/apt/sources.list
trap 'rm -rf "$root" "$work/disk.img"' EXIT

if [ ! -s "$work/root.tar" ]; then
    packages=$(grep -v '^#' packaging/debian-packages.txt | paste -sd,)
    mmdebstrap --quiet --mode=root --variant=apt --include="$packages,linux-image-cloud-amd64,initramfs-tools,kmod,udev,procps" \
        "$VERSION_CODENAME" "$work/part.tar" "$sources"
    mv "$work/part.tar" "$work/root.tar"
fi
rm -rf "$root"
mkdir -p "$root"
tar -C "$root" -xf "$work/root.tar"

# What is tested lies where it was built: the tests know their programs by that path.
into=$root$here
mkdir -p "$into/target/release" "$into/target/preload"
cp -a target/release/poolfs* target/release/*.so "$into/target/release/"
cp -a target/preload/*.so "$into/target/preload/"
tar -cf - --exclude=./target --exclude=./.git --exclude=./.poolfs-demo . | tar -C "$into" -xf -
{
    for wanted in "$@"; do
        binary=$(cargo test --quiet -p poolfs-tests --test "${wanted%%:*}" --no-run --message-format=json |
            sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
        mkdir -p "$root$(dirname "$binary")"
        cp "$binary" "$root$binary"
        filter=
        case $wanted in *:*) filter=${wanted#*:} ;; esac
        echo "cd $here/tests && $binary --test-threads 1 $filter"
    done
} >"$root/tests-of-the-guest"
install -m 755 tests/guest/init "$root/guest-init"

rm -f "$work/disk.img"
truncate -s 6G "$work/disk.img"
mke2fs -q -t ext4 -d "$root" "$work/disk.img"
cp "$root"/boot/vmlinuz-* "$work/kernel"
cp "$root"/boot/initrd.img-* "$work/initrd"
rm -rf "$root"

timeout 5400 qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m 4G -nographic -no-reboot -net none \
    -kernel "$work/kernel" -initrd "$work/initrd" \
    -append "root=/dev/vda rw console=ttyS0 quiet panic=-1 init=/guest-init" \
    -drive "file=$work/disk.img,if=virtio,format=raw,cache=unsafe" </dev/null | tee "$work/console.txt" | tr -d '\r'
grep -q '^guest: every test passed' "$work/console.txt"
