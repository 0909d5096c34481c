# about: a generated repository of 50,000 objects: add, commit, gc, fsck, clone, checkout, bundle, worktree
# packages: git python3
# version: git --version | cut -d' ' -f3
# limit: 900
export HOME=$W GIT_AUTHOR_DATE='2020-01-01T00:00:00Z' GIT_COMMITTER_DATE='2020-01-01T00:00:00Z' GIT_CONFIG_NOSYSTEM=1
git config --global user.name t
git config --global user.email t@t
git config --global init.defaultBranch m
git config --global gc.auto 0
mkdir a
cd a
git init -q .
files() {
    /usr/bin/python3 - "$@" <<'P'
import os, sys
first, last, step, word = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
for n in range(first, last, step):
    folder = os.path.join(os.environ["W"], "a", f"d{n % 200}")
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/f{n}", "a") as file:
        file.write(f"{word} {n}\n" * (n % 90 + 1))
P
}
files 0 25000 1 first
git add .
git commit -qm one
git count-objects | cut -d, -f1
for n in 1 2 3 4 5; do
    files "$n" 25000 5 "change-$n"
    git commit -qam "change $n"
done
git tag -a -m tag v1
git count-objects | cut -d, -f1
git status --short | wc -l
git fsck --full --strict 2>&1 | sort
git gc -q --prune=now
git count-objects -v | grep -E 'count|in-pack|packs|garbage' | sort
git fsck --full --strict 2>&1 | sort
git verify-pack .git/objects/pack/*.idx && echo pack verified
git mv d1 moved
git rm -rq d2
git commit -qm moved
git checkout -q v1
git checkout -q m
git status --short | wc -l
git clone -q "$W/a" "$W/b"
git clone -q --no-local "$W/a" "$W/c"
git -C "$W/b" fsck --full 2>&1 | sort
git -C "$W/c" log --format=%H | md5sum
git bundle create -q "$W/all.bundle" --all
git clone -q "$W/all.bundle" "$W/d" -b m
git worktree add -q "$W/e" v1
git -C "$W/e" ls-files | wc -l
for copy in a b c d; do git -C "$W/$copy" rev-parse HEAD; git -C "$W/$copy" ls-files -s | md5sum; done
git grep -c change-3 m -- d3 | tail -n 1
echo "$(git rev-list --objects --all | wc -l) objects"
