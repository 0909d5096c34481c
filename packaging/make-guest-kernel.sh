#!/bin/sh
# Takes a kernel for virtual machines out of Debian's package, which is not installed: make-guest-kernel.sh DIRECTORY
# Leaves vmlinuz and modules/*.ko there: FUSE, loop devices and overlayfs. What is there is kept.
set -eu
output=$1
[ -s "$output/vmlinuz" ] && exit 0
apt-cache show linux-image-cloud-amd64 >/dev/null 2>&1 || apt-get update -qq
package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
[ -n "$package" ] || { echo "linux-image-cloud-amd64 is in none of this machine's apt sources" >&2; exit 1; }
part=$output.part
trap 'rm -rf "$part"' EXIT
rm -rf "$part"
mkdir -p "$part/modules"
echo "taking a kernel out of $package"
(cd "$part" && apt-get -qq -o APT::Sandbox::User=root download "$package")
dpkg-deb -x "$part"/*.deb "$part/tree"
mv "$part"/tree/boot/vmlinuz-* "$part/vmlinuz"
for module in fs/fuse/fuse drivers/block/loop fs/overlayfs/overlay; do
    for file in "$part"/tree/lib/modules/*/kernel/"$module".ko* "$part"/tree/usr/lib/modules/*/kernel/"$module".ko*; do
        case $file in
        *\**) ;;
        *.xz) xz -dc "$file" >"$part/modules/${module##*/}.ko" ;;
        *) mv "$file" "$part/modules/" ;;
        esac
    done
done
rm -rf "$part"/tree "$part"/*.deb
mkdir -p "$output"
mv "$part"/vmlinuz "$part"/modules "$output/"
