/* Every family of calls the library serves, on files below the directory given, by absolute path and by descriptor. */
#include "check.h"

const char *base;

static void data(void)
{
    char buffer[64] = {0};
    int f, g;
    SHOW_OPEN(f, open(at("data"), O_RDWR | O_CREAT | O_EXCL, 0640));
    SHOW(write(f, "hello world", 11));
    SHOW(pwrite(f, "HE", 2, 0));
    SHOW(pread(f, buffer, sizeof buffer, 0));
    SHOW(strcmp(buffer, "HEllo world"));
    SHOW(pread(f, buffer, 5, 100));
    SHOW(pread(f, buffer, 5, -1));
    SHOW(lseek(f, 0, SEEK_CUR));
    SHOW(lseek(f, -5, SEEK_END));
    SHOW(read(f, buffer, sizeof buffer));
    SHOW(read(f, buffer, sizeof buffer));
    SHOW(lseek(f, 0, SEEK_CUR));
    SHOW(write(f, "!", 1));
    struct iovec out[3] = {{"one", 3}, {"", 0}, {"three", 5}};
    SHOW(writev(f, out, 3));
    SHOW(pwritev(f, out, 3, 100));
    SHOW(pwritev2(f, out, 3, 200, 0));
    char a[4] = {0}, b[8] = {0};
    struct iovec in[2] = {{a, 3}, {b, 5}};
    SHOW(preadv(f, in, 2, 12));
    SHOW(strcmp(a, "one") || strcmp(b, "three"));
    SHOW(preadv2(f, in, 2, 100, 0));
    SHOW(preadv(f, in, 2, -1));
    SHOW(preadv2(f, in, 2, -1, 0));
    SHOW(lseek(f, 0, SEEK_SET));
    SHOW(readv(f, in, 2));
    SHOW(lseek(f, 0, SEEK_CUR));
    SHOW_FSTAT(f);
    SHOW(ftruncate(f, 5));
    SHOW_FSTAT(f);
    SHOW(ftruncate(f, 20));
    SHOW(ftruncate(f, -1));
    SHOW(fsync(f));
    SHOW(fdatasync(f));
    SHOW_CONTENT(at("data"));
    SHOW(posix_fallocate(f, 0, 8192));
    SHOW(posix_fallocate(f, 0, 0));
    SHOW_FSTAT(f);
    SHOW(fallocate(f, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096));
    SHOW(pread(f, buffer, 4, 0));
    SHOW(buffer[0]);
    SHOW(lseek(f, 0, SEEK_DATA) >= 0 || errno == ENXIO);
    SHOW(lseek(f, 100000, SEEK_DATA));
    SHOW(lseek(f, 100000, SEEK_HOLE));
    SHOW(close(f));
    SHOW(close(f));
    SHOW(pread(f, buffer, 1, 0));
    SHOW_OPEN(f, open(at("data"), O_RDONLY));
    SHOW(pread(f, buffer, 1, 0));
    SHOW(pread(f, buffer, 1, 0));
    SHOW(pwrite(f, buffer, 1, 0));
    SHOW(ftruncate(f, 0));
    SHOW(close(f));
    SHOW_OPEN(f, open(at("data"), O_WRONLY));
    SHOW(pwrite(f, "z", 1, 0));
    SHOW(pread(f, buffer, 1, 0));
    SHOW(close(f));
    SHOW_OPEN(f, open(at("log"), O_WRONLY | O_CREAT | O_APPEND, 0644));
    SHOW_OPEN(g, open(at("log"), O_WRONLY | O_APPEND));
    SHOW(write(f, "first ", 6));
    SHOW(write(g, "second ", 7));
    SHOW(write(f, "third ", 6));
    SHOW(lseek(f, 0, SEEK_CUR));
    SHOW(pwrite(f, "fourth", 6, 0));
    SHOW(fcntl(g, F_SETFL, 0));
    SHOW(pwrite(g, "FIRST", 5, 0));
    SHOW(fcntl(g, F_GETFL) & O_APPEND);
    SHOW(close(f) + close(g));
    SHOW_CONTENT(at("log"));
}

static void copies(void)
{
    int f, g;
    off_t from = 2, to = 1;
    SHOW_OPEN(f, open(at("log"), O_RDONLY));
    SHOW_OPEN(g, open(at("copy"), O_RDWR | O_CREAT | O_TRUNC, 0644));
    SHOW(copy_file_range(f, &from, g, &to, 5, 0));
    SHOW(from * 100 + to);
    SHOW(copy_file_range(f, NULL, g, NULL, 4, 0));
    SHOW(lseek(f, 0, SEEK_CUR) * 100 + lseek(g, 0, SEEK_CUR));
    from = 3;
    SHOW(sendfile(g, f, &from, 6));
    SHOW(from);
    SHOW(sendfile(g, f, NULL, 1000));
    SHOW(close(f) + close(g));
    SHOW_CONTENT(at("copy"));
}

static void big(void)
{
    static char block[300000], back[300000];
    int f;
    for (size_t i = 0; i < sizeof block; i++)
        block[i] = (char)(i * 7 + i / 1000);
    SHOW_OPEN(f, open(at("big"), O_RDWR | O_CREAT, 0644));
    SHOW(pwrite(f, block, sizeof block, 1000));
    SHOW(pread(f, back, sizeof back, 1000));
    SHOW(memcmp(block, back, sizeof block));
    SHOW(lseek(f, 300000, SEEK_SET));
    SHOW(read(f, back, sizeof back));
    SHOW(lseek(f, 0, SEEK_CUR));
    SHOW(write(f, block, sizeof block));
    SHOW(close(f));
    SHOW_CONTENT(at("big"));
}

static void names(void)
{
    char target[64] = {0};
    int d;
    umask(027);
    SHOW(mkdir(at("dir"), 0777));
    SHOW(mkdir(at("dir"), 0777));
    SHOW_STAT(at("dir"));
    umask(022);
    SHOW(mkdir(at("dir/sub"), 0755));
    SHOW(mkdir(at("none/sub"), 0755));
    SHOW_OPEN(d, open(at("dir"), O_RDONLY | O_DIRECTORY));
    SHOW(mknodat(d, "file", S_IFREG | 0600, 0));
    SHOW(mkdirat(d, "made", 0700));
    struct stat s;
    SHOW(fstatat(d, "file", &s, 0));
    SHOW(fstatat(d, "none", &s, 0));
    SHOW(fstatat(d, "sub", &s, 0));
    SHOW(fstatat(d, "", &s, AT_EMPTY_PATH));
    SHOW(fstatat(d, "../dir/file", &s, 0));
    SHOW(fstatat(d, "file/x", &s, 0));
    SHOW(linkat(d, "file", d, "second", 0));
    SHOW(fstatat(d, "file", &s, 0) + (int)s.st_nlink);
    SHOW(renameat(d, "second", d, "third"));
    SHOW(renameat2(d, "third", d, "file", RENAME_NOREPLACE));
    SHOW(mknodat(d, "other", S_IFREG | 0600, 0));
    SHOW(renameat2(d, "third", d, "other", RENAME_EXCHANGE));
    SHOW(unlinkat(d, "third", 0));
    SHOW(unlinkat(d, "third", 0));
    SHOW(unlinkat(d, "sub", 0));
    SHOW(unlinkat(d, "sub", AT_REMOVEDIR));
    SHOW(close(d));
    SHOW(rename(at("dir/other"), at("moved")));
    SHOW(rename(at("dir"), at("folder")));
    SHOW(rename(at("none"), at("x")));
    SHOW(link(at("moved"), at("hard")));
    SHOW(link(at("folder"), at("hard2")));
    SHOW(symlink("moved", at("soft")));
    SHOW(symlink("folder/file", at("soft2")));
    SHOW(symlink(at("moved"), at("absolute")));
    SHOW(symlink("loop", at("loop")));
    SHOW(symlink("folder", at("to-folder")));
    SHOW(symlink("../x", at("folder/up")));
    SHOW(readlink(at("soft"), target, sizeof target));
    SHOW(strcmp(target, "moved"));
    SHOW(readlink(at("soft"), target, 2));
    SHOW(readlink(at("moved"), target, sizeof target));
    SHOW_STAT(at("soft"));
    SHOW_STAT(at("soft2"));
    SHOW_STAT(at("absolute"));
    SHOW_STAT(at("loop"));
    SHOW_STAT(at("to-folder/file"));
    SHOW_STAT(at("folder/up"));
    SHOW(lstat(at("loop"), &s));
    SHOW(S_ISLNK(s.st_mode));
    SHOW(stat(at("moved/"), &s));
    SHOW(stat(at("folder/."), &s));
    SHOW(stat(at("folder/../moved"), &s));
    SHOW(stat("", &s));
    SHOW(access(at("moved"), R_OK | W_OK));
    SHOW(access(at("none"), F_OK));
    SHOW(access(at("moved"), 077));
    SHOW(faccessat(AT_FDCWD, at("loop"), F_OK, AT_SYMLINK_NOFOLLOW));
    SHOW(unlink(at("soft2")));
    SHOW(unlink(at("folder")));
    SHOW(remove(at("absolute")));
    SHOW(remove(at("folder/made")));
    SHOW(rmdir(at("folder/made")));
    SHOW(mkfifo(at("fifo"), 0644));
    SHOW_STAT(at("fifo"));
    SHOW(truncate(at("moved"), 77));
    SHOW(truncate(at("soft"), 78));
    SHOW(truncate(at("folder"), 1));
    SHOW_STAT(at("hard"));
    char name[300];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    SHOW(mkdir(at(name), 0755));
    struct statx x;
    SHOW(statx(AT_FDCWD, at("moved"), 0, STATX_BASIC_STATS | STATX_BTIME, &x));
    SHOW(x.stx_size);
    SHOW(x.stx_mode);
}

static void attributes(void)
{
    struct stat s;
    struct timespec times[2] = {{1000, 5}, {2000, 7}};
    struct timeval values[2] = {{3000, 11}, {4000, 13}};
    char value[64] = {0}, list[256];
    int f;
    SHOW_OPEN(f, open(at("moved"), O_RDWR));
    SHOW(chmod(at("moved"), 04751));
    SHOW_FSTAT(f);
    SHOW(fchmod(f, 0600));
    SHOW(fchmodat(AT_FDCWD, at("moved"), 0644, 0));
    SHOW(chown(at("moved"), 12, 34));
    SHOW(fchown(f, 56, -1));
    SHOW(lchown(at("soft"), 78, 90));
    SHOW_STAT(at("moved"));
    SHOW(lstat(at("soft"), &s) + (int)s.st_uid);
    SHOW(utimensat(AT_FDCWD, at("moved"), times, 0));
    SHOW(stat(at("moved"), &s));
    SHOW(s.st_atim.tv_sec * 1000000000 + s.st_atim.tv_nsec);
    SHOW(s.st_mtim.tv_sec * 1000000000 + s.st_mtim.tv_nsec);
    times[0].tv_nsec = UTIME_OMIT;
    times[1].tv_nsec = UTIME_NOW;
    SHOW(futimens(f, times));
    SHOW(fstat(f, &s) + (int)s.st_atim.tv_sec);
    SHOW(s.st_mtim.tv_sec > 1000000);
    SHOW(utimes(at("moved"), values));
    SHOW(stat(at("moved"), &s) + (int)s.st_mtim.tv_sec + (int)s.st_mtim.tv_nsec);
    values[0].tv_usec = 1000000;
    SHOW(utimes(at("moved"), values));
    times[0].tv_nsec = 2000000000;
    SHOW(utimensat(AT_FDCWD, at("moved"), times, 0));
    SHOW(setxattr(at("moved"), "user.a", "value", 5, XATTR_CREATE));
    SHOW(setxattr(at("moved"), "user.a", "value", 5, XATTR_CREATE));
    SHOW(setxattr(at("moved"), "user.b", "", 0, XATTR_REPLACE));
    SHOW(fsetxattr(f, "user.b", "second", 6, 0));
    SHOW(getxattr(at("moved"), "user.a", value, sizeof value));
    SHOW(getxattr(at("moved"), "user.a", value, 0));
    SHOW(getxattr(at("moved"), "user.a", value, 2));
    SHOW(fgetxattr(f, "user.b", value, sizeof value));
    SHOW(strncmp(value, "second", 6));
    SHOW(getxattr(at("moved"), "user.none", value, sizeof value));
    SHOW(listxattr(at("moved"), list, sizeof list));
    SHOW(flistxattr(f, list, 3));
    SHOW(removexattr(at("moved"), "user.a"));
    SHOW(fremovexattr(f, "user.a"));
    SHOW(lgetxattr(at("soft"), "user.a", value, sizeof value));
    SHOW(close(f));
}

/* The compiler sees through some of what follows. */
#pragma GCC diagnostic ignored "-Wstringop-overflow"
#pragma GCC diagnostic ignored "-Wstringop-overread"
#pragma GCC diagnostic ignored "-Wnonnull"

/* Memory that is not there, or not for this: EFAULT, or as much as there is room for. */
static void bad_pointers(void)
{
    enum { PAGE = 4096 };
    char *area = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *none = mmap(NULL, 64 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *constant = mmap(NULL, 64 * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    SHOW(mprotect(area + 32 * PAGE, 32 * PAGE, PROT_NONE));
    char *last = area + 32 * PAGE;
    int f, directory;
    struct iovec good_and_bad[2] = {{area, 10}, {none, 10}}, bad_and_good[2] = {{none, 10}, {area, 10}};
    struct iovec too_long[2] = {{area, 10}, {area, SIZE_MAX / 2 + 1}};
    SHOW_OPEN(f, open(at("pointers"), O_RDWR | O_CREAT, 0644));
    SHOW_OPEN(directory, open(base, O_RDONLY | O_DIRECTORY));
    memset(area, 'p', 16 * PAGE);
    SHOW(pwrite(f, area, 16 * PAGE, 0));
    SHOW(pread(f, area, 100, 0));
    SHOW(pread(f, none, 100, 0));
    SHOW(pread(f, none, 10 * PAGE, 0));
    SHOW(pread(f, constant, 100, 0));
    SHOW(pread(f, constant, 10 * PAGE, 0));
    SHOW(pread(f, NULL, 100, 0));
    SHOW(pread(f, (void *)-200L, 100, 0));
    SHOW(pread(f, none, 100, 1 << 20));
    SHOW(pread(f, last - 10, 10, 0));
    SHOW(pwrite(f, none, 100, 0));
    SHOW(pwrite(f, none, 10 * PAGE, 0));
    SHOW(pwrite(f, constant, 100, 20 * PAGE));
    SHOW(pwrite(f, last - 10, 10, 0));
    SHOW(read(f, none, 10));
    SHOW(write(f, none, 10));
    SHOW(lseek(f, 0, SEEK_CUR));
    SHOW(preadv(f, good_and_bad, 2, 0));
    SHOW(preadv(f, bad_and_good, 2, 0));
    SHOW(preadv(f, too_long, 2, 0));
    SHOW(preadv(f, (void *)none, 2, 0));
    SHOW(preadv(f, good_and_bad, -1, 0));
    SHOW(preadv(f, good_and_bad, 1025, 0));
    SHOW(pwritev(f, bad_and_good, 2, 0));
    SHOW(pwritev(f, too_long, 2, 0));
    SHOW(readv(f, (void *)none, 2));
    SHOW(readv(f, too_long, 2));
    SHOW(writev(f, bad_and_good, 2));
    SHOW(lseek(f, 0, SEEK_CUR));
    SHOW(fstat(f, (struct stat *)none));
    SHOW(fstat(f, (struct stat *)constant));
    SHOW(stat(at("pointers"), (struct stat *)none));
    SHOW(stat(at("nothing"), (struct stat *)none));
    SHOW(stat(none, (struct stat *)area));
    SHOW(stat(last - 1, (struct stat *)area));
    SHOW(statx(AT_FDCWD, at("pointers"), 0, STATX_BASIC_STATS, (struct statx *)none));
    SHOW(access(none, F_OK));
    SHOW(fstatat(directory, none, (struct stat *)area, 0));
    SHOW(mkdir(none, 0755));
    SHOW(unlink(none));
    SHOW(rename(none, at("x")));
    SHOW(rename(at("pointers"), none));
    SHOW(link(at("pointers"), none));
    SHOW(symlink(none, at("x")));
    SHOW(chmod(none, 0644));
    SHOW(truncate(none, 0));
    SHOW(utimensat(AT_FDCWD, at("pointers"), (struct timespec *)none, 0));
    SHOW(futimens(f, (struct timespec *)none));
    SHOW(symlink("target", at("pointing")));
    SHOW(readlink(at("pointing"), none, 10));
    SHOW(readlink(none, area, 10));
    SHOW(setxattr(at("pointers"), "user.x", none, 10, 0));
    SHOW(setxattr(at("pointers"), "user.x", "value", 5, 0));
    SHOW(getxattr(at("pointers"), "user.x", none, 10));
    SHOW(getxattr(at("pointers"), none, area, 10));
    SHOW(fgetxattr(f, "user.x", constant, 10));
    SHOW(listxattr(at("pointers"), none, 100));
    memset(last - 9, 'n', 9);
    memcpy(last - 5, "path", 5);
    SHOW(access(last - 5, F_OK));
    char *path = last - 1 - strlen(at("pointers"));
    strcpy(path, at("pointers"));
    SHOW(access(path, F_OK));
    SHOW(pread(f, area, 100, 0));
    SHOW(mprotect(area, 64 * PAGE, PROT_NONE));
    SHOW(access(path, F_OK));
    SHOW(pread(f, area, 100, 0));
    SHOW(munmap(area, 64 * PAGE) + munmap(none, 64 * PAGE) + munmap(constant, 64 * PAGE));
    SHOW_CONTENT(at("pointers"));
    SHOW(close(f) + close(directory));
}

/* What is open, as a program finds out that tries every number. */
static void descriptors(void)
{
    int open = 0;
    for (int number = 3; number < 1024; number++) {
        struct stat st;
        open += !fstat(number, &st);
    }
    SHOW(open);
}

/* Of a buffer only as much is used as there is to be read; and one that a file was mapped for is gone when that is cut. */
static void large_buffers(void)
{
    enum { PAGE = 4096, SHORT = 100, TIMES = 40 };
    const size_t size = (size_t)1 << 30;
    static unsigned char in_memory[((size_t)1 << 30) / PAGE];
    char *large = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char text[SHORT] = "short";
    struct iovec pieces[2] = {{large, size / 2}, {large + size / 2, size / 2}};
    ssize_t count = 0;
    size_t used = 0;
    int f, other;
    SHOW_OPEN(f, open(at("short"), O_RDWR | O_CREAT, 0644));
    SHOW(write(f, text, SHORT));
    for (int i = 0; i < TIMES; i++)
        count += pread(f, large, size, 0) + pread(f, large, size, SHORT) + preadv(f, pieces, 2, SHORT / 2);
    SHOW(count);
    SHOW(mincore(large, size, in_memory));
    for (size_t i = 0; i < size / PAGE; i++)
        used += in_memory[i] & 1;
    /* A page may be a large one. */
    SHOW(used <= 1024);
    SHOW(munmap(large, size));
    SHOW_OPEN(other, memfd_create("mapped", 0));
    SHOW(ftruncate(other, 4 * PAGE));
    char *mapped = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, other, 0);
    for (int i = 0; i < TIMES; i++) {
        ssize_t before = pread(f, mapped, SHORT, 0), cut = ftruncate(other, 0);
        ssize_t after = pread(f, mapped, SHORT, 0), put = pwrite(f, mapped, SHORT, 0);
        count += before + cut + after + put + ftruncate(other, 4 * PAGE);
    }
    SHOW(count);
    SHOW(close(other));
    SHOW(close(f));
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    base = argv[1];
    data();
    copies();
    big();
    names();
    attributes();
    bad_pointers();
    large_buffers();
    descriptors();
    return 0;
}
