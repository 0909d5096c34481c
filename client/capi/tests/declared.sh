#!/bin/sh
# Checks include/poolfs.h against the library: every function declared is exported and the other way round, and the example
# compiles with all warnings. usage: declared.sh LIBRARY OUTPUT_DIRECTORY
set -eu
library=$1 out=$2
here=$(cd "$(dirname "$0")" && pwd)
include=$here/../../../include
grep -oE '\bpoolfs_[a-z0-9_]+\(' "$include/poolfs.h" | tr -d '(' | sort -u >"$out/declared"
nm -D --defined-only --format=just-symbols "$library" | grep '^poolfs_' | sort -u >"$out/exported"
diff "$out/declared" "$out/exported"
printf '#include <poolfs.h>\nint main(void) { return 0; }\n' >"$out/header.c"
for standard in c99 c11; do
    cc -std=$standard -Wall -Wextra -Wpedantic -Werror -D_GNU_SOURCE -I"$include" "$out/header.c" -o "$out/header"
done
cc -Wall -Wextra -Werror -O2 -D_GNU_SOURCE -I"$include" "$here/../examples/copy.c" \
    -L"$(dirname "$library")" -lpoolfs -o "$out/copy"
echo "header and library agree: $(wc -l <"$out/declared") functions"
