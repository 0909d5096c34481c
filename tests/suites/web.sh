# about: nginx and lighttpd with sendfile: 400 files of the lower branch and changed ones fetched and compared, ranges, parallel fetches, uploads
# packages: nginx-light lighttpd lighttpd-mod-webdav curl
# version: echo "$(nginx -v 2>&1 | cut -d/ -f2), $(lighttpd -v | sed 's/.*lighttpd.\([0-9.]*\).*/\1/')"
# limit: 300
case ${1:-} in
prepare)
    mkdir www
    for n in $(seq 400); do head -c $((n * n * 31 % 700001 + n % 7)) /dev/zero | openssl enc -aes-128-ctr -K 00 -iv "$(printf %032x "$n")" 2>/dev/null >www/f"$n"; done
    exit
    ;;
esac
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true' EXIT
# Some of the files change first: written over in the middle, extended, cut, replaced.
for n in $(seq 10 10 400); do printf 'changed %s' "$n" | dd of="$W/www/f$n" bs=1 seek=5000 conv=notrunc status=none; done
for n in $(seq 11 10 400); do printf 'longer %s' "$n" >>"$W/www/f$n"; done
for n in $(seq 12 10 400); do truncate -s 4097 "$W/www/f$n"; done
for n in $(seq 13 10 400); do printf 'new %s' "$n" >"$W/www/new" && mv "$W/www/new" "$W/www/f$n"; done
mkdir put tmp
chmod -R a+rwX .
sums=$(cd www && md5sum f* | sort -k 2 | md5sum)
wait_for() {
    n=0
    until curl -s -o /dev/null --unix-socket "$1" http://x/f1; do
        n=$((n + 1))
        [ $n -lt 100 ] || { cat "$W"/*.log >&2; exit 1; }
        sleep 0.1
    done
}
fetch_all() {
    rm -rf got
    mkdir got
    (cd www && ls) | xargs -P 6 -n 20 sh -c 's=$1; shift; for f; do curl -sS --fail --unix-socket "$s" -o "got/$f" "http://x/$f"; done' sh "$1"
    [ "$(cd got && md5sum f* | sort -k 2 | md5sum)" = "$sums" ] && echo "$2: every file is the same"
    for range in 0-99 4000-9000 -500; do curl -sS --unix-socket "$1" -r $range http://x/f99 | md5sum; done
    curl -sS -I --unix-socket "$1" http://x/f100 | tr -d '\r' | grep -iE '^(HTTP|content-length)' | tr A-Z a-z
}
cat >nginx.conf <<X
daemon off; master_process on; worker_processes 2; user root; pid $W/nginx.pid; error_log $W/nginx.log;
events { worker_connections 100; }
http { access_log off; sendfile on; tcp_nopush on; open_file_cache max=100;
client_body_temp_path $W/tmp; proxy_temp_path $W/tmp/p; fastcgi_temp_path $W/tmp/f; uwsgi_temp_path $W/tmp/u; scgi_temp_path $W/tmp/s;
server { listen unix:$W/n.sock; root $W/www; client_max_body_size 100m; } }
X
nginx -e "$W/nginx.log" -c "$W/nginx.conf" >&2 &
server=$!
wait_for "$W/n.sock"
fetch_all "$W/n.sock" nginx
# A file that changes while the server keeps it open.
printf 'seen' | dd of="$W/www/f99" bs=1 conv=notrunc status=none
sums=$(cd www && md5sum f* | sort -k 2 | md5sum)
curl -sS --unix-socket "$W/n.sock" http://x/f99 | head -c 4
echo
kill "$server"
wait "$server" || true
cat >lighttpd.conf <<X
server.document-root = "$W/www"
server.port = 0
server.bind = "$W/l.sock"
server.errorlog = "$W/lighttpd.log"
server.network-backend = "sendfile"
server.upload-dirs = ("$W/tmp")
server.modules = ("mod_webdav")
\$HTTP["url"] =~ "^/put/" { server.document-root = "$W" webdav.activate = "enable" }
X
lighttpd -D -f lighttpd.conf >&2 &
server=$!
wait_for "$W/l.sock"
fetch_all "$W/l.sock" lighttpd
for n in 50 250 399; do curl -sS --fail --unix-socket "$W/l.sock" -T "$W/www/f$n" "http://x/put/f$n" && cmp "$W/www/f$n" "$W/put/f$n" && echo "uploaded f$n"; done
kill "$server"
wait "$server" || true
server=
echo "400 files by both servers"
