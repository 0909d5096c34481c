//! Real programs: the same result through the library, through FUSE and on the disk.

use poolfs_tests::{Cluster, Pool, Way, checksum, isolated, populate, run};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Runs a script in three folders: on the disk, and on a union by FUSE and by the library. What it prints must be the same; the
/// script finds its folder as `$W`.
fn same_everywhere(name: &str, script: &'static str) {
    isolated(name, |folder| {
        let native = folder.join("native");
        fs::create_dir_all(&native).expect("a folder");
        let expected = run(Command::new("sh").args(["-euc", script]).env("W", &native)).expect("on the disk");
        let lower = folder.join("lower");
        populate(&lower);
        let before = checksum(&lower);
        let pool = Pool::create(folder, "256M");
        for way in [Way::Fuse, Way::Library] {
            let upper = folder.join(format!("upper-{way:?}"));
            fs::create_dir_all(&upper).expect("a folder");
            let mount = pool.mount_union(&folder.join(format!("mnt-{way:?}")), &upper, &[&lower]);
            same(name, (&pool, folder, way), mount.path(), script, &relative(&expected, &native));
            drop(mount);
        }
        drop(pool);
        assert_eq!(before, checksum(&lower), "the lower branch changed");
    });
}

/// The same on unions whose branches are at a Ceph cluster.
fn same_at_a_cluster(name: &str, script: &'static str) {
    isolated(name, |folder| {
        let native = folder.join("native");
        fs::create_dir_all(&native).expect("a folder");
        let expected = run(Command::new("sh").args(["-euc", script]).env("W", &native)).expect("on the disk");
        let cluster = Cluster::create(folder);
        cluster.make_directories(&["lower", "Fuse", "Library"]);
        let pool = Pool::create(folder, "256M");
        for way in [Way::Fuse, Way::Library] {
            let upper = format!("ceph:/{way:?}");
            let stack = [&["--upper", &upper, "--lower", "ceph:/lower"], &cluster.access()[..]].concat();
            let mount = pool.mount(&folder.join(format!("mnt-{way:?}")), &stack);
            same(name, (&pool, folder, way), mount.path(), script, &relative(&expected, &native));
            let _ = mount.unmount().expect("umount");
        }
    });
}

/// Runs a script in a mount, one way: it has to print this, and the library to be at work exactly where it should be.
fn same(name: &str, (pool, folder, way): (&Pool, &Path, Way), mount: &Path, script: &str, expected: &str) {
    let work = mount.join("work");
    fs::create_dir(&work).expect("a folder");
    let count = pool.operations(Way::Library);
    let trace = folder.join(format!("trace-{way:?}"));
    let environment = format!("export W={} POOLFS_TRACE={}", work.display(), trace.display());
    let text = pool.shell(way, &format!("{environment}; {script}")).expect(name);
    assert_eq!(relative(&text, &work), expected, "{name} by {way:?} differs from the disk");
    let requests = pool.operations(Way::Library) - count;
    assert_eq!(
        requests > 0,
        way == Way::Library,
        "{requests} requests by the library, run by {way:?}\n{}\n{}\n{}",
        pool.status(),
        pool.service_log(),
        fs::read_to_string(&trace).unwrap_or_default()
    );
}

fn relative(text: &str, folder: &Path) -> String {
    text.replace(&folder.display().to_string(), "$W")
}

const GIT: &str = r#"
        export HOME=$W GIT_AUTHOR_DATE='2020-01-01T00:00:00Z' GIT_COMMITTER_DATE='2020-01-01T00:00:00Z'
        git config --global user.name t; git config --global user.email t@t; git config --global init.defaultBranch m
        mkdir $W/a; cd $W/a; git init -q .
        for i in $(seq 40); do mkdir -p d$i; seq $((i * 50)) > d$i/f; done
        git add .; git commit -qm one
        for i in $(seq 20); do echo change >> d$i/f; git commit -qam "change $i"; done
        git mv d1 moved; git commit -qm moved
        git clone -q $W/a $W/b; cd $W/b; git gc -q; git fsck --strict 2>&1
        git log --format=%H | head -3; git status --short; git ls-files | wc -l
        "#;

#[test]
fn git() {
    same_everywhere("git", GIT);
}

#[test]
fn git_at_a_cluster() {
    same_at_a_cluster("git_at_a_cluster", GIT);
}

const SQLITE: &str = r#"
        cd $W
        sqlite3 a.db 'pragma journal_mode=wal; create table t(a integer primary key, b text);'
        for i in 1 2 3; do
            sqlite3 a.db "begin; with recursive n(x) as (select 1 union all select x+1 from n where x<3000)
                insert into t(b) select hex(x*7919) from n; commit;"
        done
        sqlite3 a.db 'update t set b = b || a where a % 3 = 0; delete from t where a % 5 = 0; vacuum;'
        sqlite3 a.db 'pragma integrity_check; select count(*), sum(length(b)), max(b) from t;'
        sqlite3 b.db 'pragma journal_mode=delete; create table u(x); insert into u values(1);'
        sqlite3 b.db 'pragma integrity_check; select * from u;'
        "#;

#[test]
fn sqlite() {
    same_everywhere("sqlite", SQLITE);
}

#[test]
fn sqlite_at_a_cluster() {
    same_at_a_cluster("sqlite_at_a_cluster", SQLITE);
}

#[test]
fn python() {
    same_everywhere(
        "python",
        r#"
        cd $W
        /usr/bin/python3 -m venv --without-pip v
        mkdir -p pkg/hello; echo 'print("hello from a package")' > pkg/hello/__main__.py; touch pkg/hello/__init__.py
        v/bin/python -m compileall -q pkg; ls pkg/hello | sort
        cd pkg; ../v/bin/python -m hello
        ../v/bin/python - <<'P'
import os, shutil, tempfile, mmap, json, zipfile
w = os.environ["W"]
z = zipfile.ZipFile(w + "/a.whl", "w"); z.write("hello/__init__.py"); z.writestr("b", "x" * 100000); z.close()
print(zipfile.ZipFile(w + "/a.whl").testzip(), len(zipfile.ZipFile(w + "/a.whl").read("b")))
shutil.copytree("hello", w + "/copy"); shutil.move(w + "/copy", w + "/moved"); print(sorted(os.listdir(w + "/moved"))[0])
f = os.open(w + "/m", os.O_RDWR | os.O_CREAT); os.ftruncate(f, 10000)
m = mmap.mmap(f, 10000); m[5000:5005] = b"hello"; m.flush(); print(os.pread(f, 5, 5000)); m.close(); os.close(f)
print(os.stat(w + "/m").st_size, open(w + "/m", "rb").read()[5000:5005])
shutil.rmtree(w + "/moved"); print(os.path.exists(w + "/moved"))
P
        "#,
    );
}

#[test]
fn a_local_wheel_is_installed_by_pip() {
    same_everywhere(
        "a_local_wheel_is_installed_by_pip",
        r#"
        cd $W
        /usr/bin/python3 -m venv v
        /usr/bin/python3 - <<'P'
import zipfile
z = zipfile.ZipFile("small-1.0-py3-none-any.whl", "w")
z.writestr("small/__init__.py", "def answer(): return 42\n")
z.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
z.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
z.writestr("small-1.0.dist-info/RECORD", "small/__init__.py,,\nsmall-1.0.dist-info/METADATA,,\n"
           "small-1.0.dist-info/WHEEL,,\nsmall-1.0.dist-info/RECORD,,\n")
P
        v/bin/pip install -q --no-index --disable-pip-version-check ./small-1.0-py3-none-any.whl
        v/bin/python -c 'import small; print(small.answer())'
        "#,
    );
}

#[test]
fn tar_of_ten_thousand_files() {
    same_everywhere(
        "tar_of_ten_thousand_files",
        r#"
        mkdir $W/t; cd $W/t
        for d in $(seq 100); do mkdir $d; for f in $(seq 100); do echo $d $f > $d/$f; done; done
        ln -s 1 link; ln 1/1 hard; chmod 700 2; touch -d @1000000000 3/3
        tar -C $W -cf $W/t.tar --sort=name --mtime=@0 t; mkdir $W/u; tar -C $W/u -xf $W/t.tar
        diff -r $W/t $W/u/t; find $W/u | wc -l; tar -C $W/u -cf - --sort=name --mtime=@0 t | md5sum
        md5sum < $W/t.tar; rm -r $W/u; ls $W
        "#,
    );
}

#[test]
fn gcc() {
    same_everywhere(
        "gcc",
        r#"
        cd $W
        for i in $(seq 8); do echo "int f$i(int x) { return x * $i; }" > f$i.c; done
        { for i in $(seq 8); do echo "int f$i(int);"; done; echo 'int main(void) { return f1(1) + f8(2); }'; } > main.c
        for i in $(seq 8); do gcc -O2 -c f$i.c -o f$i.o; done
        ar rc libf.a f*.o; gcc -O2 main.c -L. -lf -o main; ./main || echo $?; gcc -shared -fPIC f1.c -o libg.so; ls | sort
        "#,
    );
}

#[test]
fn shell_pipelines() {
    same_everywhere(
        "shell_pipelines",
        r#"
        cd $W
        { echo a; /bin/echo b; } > out; cat out
        (echo c; /bin/echo d) >> out; cat out
        cat > here <<X
line one
line two
X
        sort -r here | tee copy | wc -l; cat copy
        for i in 1 2 3 4; do (for j in $(seq 50); do echo "$i $j" >> log; done) & done; wait
        sort log | uniq -c | awk '$1 != 1' | wc -l; wc -l < log
        exec 3>> log; echo three >&3; /bin/echo four >&3; exec 3>&-; tail -n 2 log
        exec 4< here; read -r x <&4; cat <&4; echo "$x"; exec 4<&-
        seq 100000 > big; head -c 100000 big | tail -n 1; dd if=big of=part bs=1000 count=10 skip=5 2>/dev/null; md5sum < part
        mkfifo p; cat p > from-fifo & echo through > p; wait; cat from-fifo
        cp -a here kept; mv kept moved; ln moved hard; stat -c %h hard; rm moved hard; ls | sort
        truncate -s 5 here; cat here; echo; : > here; stat -c %s here; [ -e nothing ] || echo none
        "#,
    );
}
