# about: apt-get update and install of 50 packages in a container of a Debian image (on the disk: a chroot), dpkg's own verification
# version: apt-get --version | head -n 1 | cut -d' ' -f2
# limit: 900
# container: yes
export DEBIAN_FRONTEND=noninteractive LC_ALL=C HOME=/root
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
apt-get update -qq >&2
packages="bc bzip2 cpio curl dash diffutils ed file findutils gawk gettext-base grep groff-base gzip hostname iproute2 jq kmod less libarchive-tools lsof lzop m4 make man-db mawk nano netcat-openbsd patch pciutils perl-base procps psmisc rsync sed sharutils socat sqlite3 strace sudo tar tcl time tree unzip uuid-runtime vim-tiny wget xz-utils zip zstd locales dnsutils"
before=$(dpkg-query -W | wc -l)
apt-get install -y -qq --no-install-recommends $packages >&2
for package in $packages; do dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\n' "$package"; done
[ "$(dpkg-query -W | wc -l)" -gt $((before + 30)) ] && echo more than 30 new ones
dpkg --audit
dpkg --verify | sort
echo a | zip -q /root/a.zip - && unzip -l /root/a.zip | tail -n 1
sqlite3 /root/a.db 'create table t(x); insert into t values(1); select * from t; pragma integrity_check;'
echo '{"a": 1}' | jq -c .a
perl -e 'print join(",", map { $_ * 2 } 1 .. 3), "\n"'
apt-get remove -y -qq --purge vim-tiny nano rsync >&2
dpkg-query -W -f '${db:Status-Status}\n' rsync 2>/dev/null || echo rsync is gone
# Everything that is not a cache, a log, a compiled form or a record of times.
find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp -o -path /root -o -path /var/cache -o -path /var/log -o -path /var/lib/apt -o -path /var/lib/dpkg -o -path /etc/ld.so.cache -o -name '__pycache__' -o -name 'resolv.conf' -o -name hosts -o -name hostname -o -name .poolfs \) -prune -o \( -type f -o -type l \) -printf '%p %y %m %U:%G %s %l\n' | sort >/tmp/all
wc -l </tmp/all
cut -d/ -f2-4 /tmp/all | cut -d' ' -f1 | sort | uniq -c | sort -k 2 | awk '{ print $2, $1 }' | md5sum
md5sum </tmp/all
awk '$2 == "f" { print $1 }' /tmp/all | xargs md5sum 2>/dev/null | grep -vE ' /(etc/shadow-?|etc/mtab|etc/passwd-|etc/group-|etc/gshadow-?|var/lib/systemd)' | md5sum
echo "50 packages"
