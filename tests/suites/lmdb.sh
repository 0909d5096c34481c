# about: LMDB by several processes: writers, readers that check, writers killed while they hold the lock, copies; with and without WRITEMAP
# packages: python3-lmdb lmdb-utils
# version: /usr/bin/python3 -c 'import lmdb; print("%d.%d.%d" % lmdb.version())'
# limit: 300
for map in 0 1; do
    /usr/bin/python3 "$SUITES/lmdb-processes.py" "$W/db$map" "$map"
    mdb_copy -c "$W/db$map" "$W/copy.$map" 2>/dev/null || { mkdir "$W/copy.$map"; mdb_copy -c "$W/db$map" "$W/copy.$map"; }
    mdb_stat -e "$W/copy.$map" | grep -E 'Entries|Tree depth'
    mdb_dump -a "$W/copy.$map" | grep -v mapsize | md5sum
    mdb_dump -a "$W/db$map" | grep -v mapsize | md5sum
done
echo "two environments, 4 writers, 3 readers, 4 kills each"
