# about: cargo build of this project's own xtask with its dependencies, then of a change, then its program
# version: cargo --version | cut -d' ' -f2
# limit: 900
export CARGO_TARGET_DIR=$W/target CARGO_INCREMENTAL=1 CARGO_TERM_COLOR=never
# The sources that cargo builds are on the filesystem under test, too, but for the registry's.
mkdir src
git -C "$WORKSPACE" ls-files -z | tar -C "$WORKSPACE" --null --ignore-failed-read -T - -cf - 2>/dev/null | tar -C "$W/src" -xf -
cd src
cargo build --quiet --offline --locked -j2 -p xtask >&2
"$W/target/debug/xtask" --help | head -n 1
ls "$W/target/debug/deps" | grep -cE '\.(rlib|rmeta)$'
cargo build --offline --locked -j2 -p xtask 2>&1 | grep -c Compiling || true
echo '// a change' >>xtask/src/main.rs
cargo build --offline --locked -j2 -p xtask 2>&1 | grep -c Compiling
"$W/target/debug/xtask" header && git diff --no-index --stat include/poolfs.h "$WORKSPACE/include/poolfs.h" && echo it works
cargo metadata --offline --locked --format-version 1 | wc -c | sed 's/./x/g'
cargo clean >&2
ls "$W/target" 2>/dev/null | wc -l
echo "built, changed, built again"
