# The two that matter: `make run` shows poolfs at work on a real container image, `make test` runs all tests.
# Both install what is missing first and leave nothing behind outside this folder (but the Debian packages).

CARGO ?= cargo
WORK := .poolfs-demo
TOOLS := target/tools

.PHONY: run test suites soak build lint bench bench-databases bench-papers clean help packages tools ceph preload init

help:
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

run: build $(WORK)/root.tar ## the main job: two containers of a Debian image on a filesystem service of their own
	target/release/poolfs demo --root-image $(WORK)/root.tar --work $(WORK)

$(WORK)/root.tar: | packages
	packaging/make-root-image.sh $@

# The kernel of the virtual machine in which control groups are of version 2 only.
$(WORK)/guest/vmlinuz: | packages
	packaging/make-guest-kernel.sh $(WORK)/guest

build: packages preload init ## everything, in release mode
	$(CARGO) build --release --bins
	install -m 755 target/preload/libpoolfs_preload.so target/preload/libpoolfs.so target/preload/poolfs-init target/release/

# Alone, one after the other: a build together with the workspace would give them std's symbols.
preload:
	$(CARGO) build -p poolfs-preload --profile preload
	$(CARGO) build -p poolfs-capi --profile preload

# Linked statically: it runs in containers of any image.
init:
	$(CARGO) rustc -p poolfs-init --profile preload --features static --bin poolfs-init -- -C target-feature=+crt-static

packages:
	@packaging/install-missing.sh

# The daemons of a Ceph cluster and what its clients load: only tests need them.
ceph: packages
	@packaging/install-missing.sh --no-servers ceph-mon ceph-osd ceph-mds ceph-common libcephfs2 python3-rados iproute2

tools: packages ceph
	@test -x $(TOOLS)/bin/pjdfstest || $(CARGO) install --quiet --locked --root $(TOOLS) --version 0.2.2 pjdfstest
	@test -x $(TOOLS)/bin/fsx || $(CARGO) install --quiet --locked --root $(TOOLS) --version 0.3.2 fsx

test: build tools $(WORK)/root.tar $(WORK)/guest/vmlinuz ## all tests: unit, models, conformance, programs over real mounts (at most 60 minutes)
	$(CARGO) xtask tidy
	$(CARGO) xtask test

suites: build tools $(WORK)/root.tar ## the long program lists, on the disk and on poolfs (about an hour; ONLY="NAME ..." for some); writes docs/suites.md
	$(CARGO) run --quiet -p poolfs-tests --bin poolfs-suites -- $(if $(ONLY),--only $(ONLY))

soak: build tools $(WORK)/root.tar $(WORK)/guest/vmlinuz ## what takes hours; writes docs/soak.md (one stage: cargo xtask soak --only NAME)
	$(CARGO) xtask soak

bench: build $(TOOLS)/bin/runsc ## paired measurements (about half an hour; ONLY="NAME ..." for some); writes the tables of docs/benchmarks.md
	packaging/benchmarks.sh $(ONLY)

bench-databases: build $(TOOLS)/bin/runsc ## RocksDB, SQLite, Redis and PostgreSQL on every filesystem, fio and MariaDB on data of images (about half an hour); writes their tables of docs/benchmarks.md
	packaging/benchmarks.sh image-data databases

bench-papers: build ## experiments of papers over a Ceph cluster, beside ceph-fuse (about half an hour; QUICK=1: a few minutes); writes docs/papers.md
	packaging/papers.sh $(if $(QUICK),--quick)

$(TOOLS)/bin/runsc:
	packaging/install-runsc.sh $@

lint: packages ## format, clippy, licences and sources of dependencies, the project's own rules
	$(CARGO) fmt --all --check
	$(CARGO) clippy --all-targets -- -D warnings
	$(CARGO) clippy -p poolfs-preload --profile preload -- -D warnings
	$(CARGO) clippy -p poolfs-capi --profile preload -- -D warnings
	@test -x $(TOOLS)/bin/cargo-deny || $(CARGO) install --quiet --locked --root $(TOOLS) cargo-deny
	$(TOOLS)/bin/cargo-deny check bans licenses sources

clean: ## remove what was built, the demo's image included
	rm -rf target $(WORK)
