# about: Go: build, vet and test of a module; a static program of 16 goroutines on files, maps, locks, pipes, zip and children; a cgo program whose Go and C write one file
# packages: golang-go gcc
# version: go env GOVERSION
# limit: 400
export HOME="$W/home" GOPATH="$W/home/go" GOCACHE="$W/home/cache" GOFLAGS=-mod=mod GOPROXY=off GOTOOLCHAIN=local GO111MODULE=on
mkdir -p "$HOME" module/store
cd module
cat >go.mod <<'X'
module example.org/module

go 1.18
X
cat >store/store.go <<'X'
// Package store keeps values in files, as careful programs do.
package store

import (
	"os"
	"path/filepath"
)

// Put replaces a value: written aside, made durable, renamed.
func Put(dir, name string, value []byte) error {
	f, err := os.CreateTemp(dir, "."+name+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	if _, err = f.Write(value); err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), filepath.Join(dir, name))
}
X
cat >store/store_test.go <<'X'
package store

import (
	"os"
	"testing"
)

func TestPut(t *testing.T) {
	dir := t.TempDir()
	for _, value := range []string{"a", "longer", ""} {
		if err := Put(dir, "v", []byte(value)); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(dir + "/v"); err != nil || string(got) != value {
			t.Fatal(got, err)
		}
	}
	if names, _ := os.ReadDir(dir); len(names) != 1 {
		t.Fatal(names)
	}
}
X
cat >main.go <<'X'
package main

import (
	"archive/zip"
	"bufio"
	"bytes"
	"crypto/md5"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"syscall"
	"time"

	"example.org/module/store"
)

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func hash(path string) string {
	f, err := os.Open(path)
	must(err)
	defer f.Close()
	h := md5.New()
	_, err = io.Copy(h, f)
	must(err)
	return fmt.Sprintf("%x", h.Sum(nil))
}

func parallel(n int, work func(int)) {
	var all sync.WaitGroup
	for i := 0; i < n; i++ {
		all.Add(1)
		go func(i int) { defer all.Done(); work(i) }(i)
	}
	all.Wait()
}

func main() {
	w := os.Args[1]
	at := func(parts ...string) string { return filepath.Join(append([]string{w}, parts...)...) }
	must(os.MkdirAll(at("t/a/b"), 0o755))
	parallel(16, func(i int) {
		for n := 0; n < 60; n++ {
			must(store.Put(at("t/a"), fmt.Sprintf("f%d-%d", i, n%20), bytes.Repeat([]byte{byte(i + n)}, n*100)))
		}
	})
	names, err := os.ReadDir(at("t/a"))
	must(err)
	fmt.Println("files", len(names), hash(at("t/a/f7-3")))

	big, err := os.Create(at("big"))
	must(err)
	parallel(16, func(i int) {
		for n := i; n < 400; n += 16 {
			_, err := big.WriteAt(bytes.Repeat([]byte{byte(n)}, 65537), int64(n)*65537)
			must(err)
		}
	})
	must(big.Truncate(400*65537 - 9))
	must(big.Sync())
	fmt.Println("big", hash(at("big")))
	copied, err := os.Create(at("copied"))
	must(err)
	_, err = big.Seek(0, io.SeekStart)
	must(err)
	n, err := io.Copy(copied, big)
	must(err)
	fmt.Println("copied", n, hash(at("copied")) == hash(at("big")))

	log, err := os.OpenFile(at("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	must(err)
	parallel(16, func(i int) {
		for n := 0; n < 100; n++ {
			_, err := fmt.Fprintf(log, "%02d\n", i)
			must(err)
		}
	})
	text, err := os.ReadFile(at("log"))
	must(err)
	lines := strings.Fields(string(text))
	sort.Strings(lines)
	fmt.Println("appended", len(text), len(lines), lines[0], lines[len(lines)-1])

	data, err := syscall.Mmap(int(big.Fd()), 0, 1<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	must(err)
	copy(data[5000:], "written through a mapping")
	back := make([]byte, 25)
	_, err = big.ReadAt(back, 5000)
	must(err)
	must(syscall.Munmap(data))
	fmt.Println("mapped", string(back), hash(at("big")))

	must(syscall.Flock(int(big.Fd()), syscall.LOCK_EX))
	other, err := os.Open(at("big"))
	must(err)
	fmt.Println("locked", syscall.Flock(int(other.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == syscall.EWOULDBLOCK)

	must(os.Symlink("a/f1-1", at("t/link")))
	must(os.Link(at("t/a/f2-2"), at("t/hard")))
	must(os.Rename(at("t/a"), at("t/z")))
	_, err = os.Stat(at("t/link"))
	fmt.Println("dangling", errors.Is(err, fs.ErrNotExist))
	count := 0
	must(filepath.WalkDir(at("t"), func(_ string, _ fs.DirEntry, err error) error { count++; return err }))
	fmt.Println("walked", count)

	archive, err := os.Create(at("all.zip"))
	must(err)
	zipped := zip.NewWriter(archive)
	for _, entry := range names {
		if entry.IsDir() {
			continue
		}
		to, err := zipped.Create(entry.Name())
		must(err)
		from, err := os.Open(at("t/z", entry.Name()))
		must(err)
		_, err = io.Copy(to, bufio.NewReader(from))
		must(err)
		must(from.Close())
	}
	must(zipped.Close())
	must(archive.Close())
	read, err := zip.OpenReader(at("all.zip"))
	must(err)
	fmt.Println("zipped", len(read.File))

	child := exec.Command("md5sum")
	child.Stdin, err = os.Open(at("copied"))
	must(err)
	sum, err := child.Output()
	must(err)
	fmt.Println("child", strings.Fields(string(sum))[0] == hash(at("copied")))
	stamp := time.Unix(1000000000, 500000000)
	must(os.Chtimes(at("copied"), stamp, stamp))
	must(os.Chmod(at("copied"), 0o640))
	info, err := os.Stat(at("copied"))
	must(err)
	fmt.Println("stat", info.ModTime().Equal(stamp), info.Mode(), info.Size())
	for _, name := range []string{"none", "t"} {
		_, err := os.ReadFile(at(name))
		fmt.Println(name, errors.Unwrap(err))
	}
	must(os.RemoveAll(at("t")))
	_, err = os.Lstat(at("t"))
	fmt.Println("removed", errors.Is(err, fs.ErrNotExist))
}
X
go vet ./... && echo vetted
go test ./... | sed 's/\t[0-9.]*s$//; s/(cached)//'
CGO_ENABLED=0 go build -o ../static .
mkdir ../cgo && cat >../cgo/main.go <<'X'
package main

/*
#include <stdio.h>
#include <stdlib.h>
static int add(const char *path, int n) {
    FILE *f = fopen(path, "a");
    return !f || fprintf(f, "c %d\n", n) < 0 || fclose(f);
}
static long size(const char *path) {
    FILE *f = fopen(path, "r");
    return !f || fseek(f, 0, SEEK_END) ? -1 : ftell(f);
}
*/
import "C"

import (
	"fmt"
	"os"
	"unsafe"
)

func main() {
	path := C.CString(os.Args[1])
	defer C.free(unsafe.Pointer(path))
	for n := 0; n < 200; n++ {
		f, err := os.OpenFile(os.Args[1], os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err == nil {
			_, err = fmt.Fprintf(f, "go %d\n", n)
		}
		if err != nil || f.Close() != nil || C.add(path, C.int(n)) != 0 {
			panic(fmt.Sprint("failed at ", n, err))
		}
		if info, err := os.Stat(os.Args[1]); err != nil || info.Size() != int64(C.size(path)) {
			panic(fmt.Sprint("sizes differ at ", n, err))
		}
	}
}
X
cat >../cgo/go.mod <<'X'
module example.org/cgo

go 1.18
X
(cd ../cgo && CGO_ENABLED=1 go build -o ../mixed .)
cd ..
mkdir work
./static "$W/work"
./mixed "$W/work/both"
md5sum <work/both
wc -l <work/both
# By C, and by a request where there is a library.
chmod 640 "$W/work/both"
stat -c %a work/both
ls work
go clean -cache
echo "a module, a static and a mixed program"
