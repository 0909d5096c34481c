/* Opening, content and attributes of files: every name libc has for them, with what an older or a fortified program calls. */
#include "surface.h"

/* What programs linked with a C library before 2.33 call. */
extern int __xstat(int, const char *, struct stat *), __lxstat(int, const char *, struct stat *);
extern int __fxstat(int, int, struct stat *), __fxstatat(int, int, const char *, struct stat *, int);
extern int __xstat64(int, const char *, struct stat64 *), __lxstat64(int, const char *, struct stat64 *);
extern int __fxstat64(int, int, struct stat64 *), __fxstatat64(int, int, const char *, struct stat64 *, int);
extern int __xmknod(int, const char *, mode_t, dev_t *), __xmknodat(int, int, const char *, mode_t, dev_t *);
#define OLD(name) __asm__(".symver " #name ", " #name "@GLIBC_2.2.5")
#define OLD_AT(name) __asm__(".symver " #name ", " #name "@GLIBC_2.4")
OLD(__xstat);
OLD(__lxstat);
OLD(__fxstat);
OLD(__xstat64);
OLD(__lxstat64);
OLD(__fxstat64);
OLD(__xmknod);
OLD_AT(__fxstatat);
OLD_AT(__fxstatat64);
OLD_AT(__xmknodat);

/* What the compiler puts in their place with _FORTIFY_SOURCE. */
extern int __open_2(const char *, int), __open64_2(const char *, int);
extern int __openat_2(int, const char *, int), __openat64_2(int, const char *, int);
extern ssize_t __read_chk(int, void *, size_t, size_t), __pread_chk(int, void *, size_t, off_t, size_t);
extern ssize_t __pread64_chk(int, void *, size_t, off64_t, size_t);
extern ssize_t __readlink_chk(const char *, char *, size_t, size_t);
extern ssize_t __readlinkat_chk(int, const char *, char *, size_t, size_t);

/* What libc calls itself. */
extern int __open(const char *, int, ...), __open64(const char *, int, ...), __close(int), __dup2(int, int);
extern ssize_t __read(int, void *, size_t), __write(int, const void *, size_t);
extern ssize_t __pread64(int, void *, size_t, off64_t), __pwrite64(int, const void *, size_t, off64_t);

static void opened(int descriptor)
{
    char text[8] = {0};
    ssize_t count = pread(descriptor, text, 4, 0);
    printf("    access %d at %lld, %zd bytes \"%s\"\n", fcntl(descriptor, F_GETFL) & O_ACCMODE,
           (long long)lseek(descriptor, 0, SEEK_CUR), count, text);
    SHOW(close(descriptor));
}

static void opening(void)
{
    int d, f;
    char text[16] = {0};
    SHOW_OPEN(f, creat(at("file"), 0640));
    SHOW(write(f, "content", 7));
    SHOW(close(f));
    SHOW_OPEN(d, open(base, O_RDONLY | O_DIRECTORY));
    /* An adopted directory: names relative to it go by request. */
    struct stat s;
    SHOW(fstatat(d, "file", &s, 0) + fstatat(d, "file", &s, 0));
    SHOW_OPEN(f, open(at("file"), O_RDWR));
    opened(f);
    SHOW_OPEN(f, open64(at("file"), O_RDONLY));
    opened(f);
    SHOW_OPEN(f, __open(at("file"), O_RDONLY));
    opened(f);
    SHOW_OPEN(f, __open64(at("file"), O_RDONLY));
    SHOW(__read(f, text, 3) + __pread64(f, text, 3, 1));
    SHOW(__close(f));
    SHOW_OPEN(f, openat(d, "file", O_RDWR));
    opened(f);
    SHOW_OPEN(f, openat64(d, "file", O_WRONLY | O_APPEND));
    opened(f);
    SHOW_OPEN(f, creat64(at("made"), 0600));
    opened(f);
    SHOW_OPEN(f, __open_2(at("file"), O_RDONLY));
    opened(f);
    SHOW_OPEN(f, __open64_2(at("file"), O_RDWR));
    opened(f);
    SHOW_OPEN(f, __openat_2(d, "file", O_RDONLY));
    opened(f);
    SHOW_OPEN(f, __openat64_2(d, "none", O_RDONLY));
    struct open_how how = {.flags = O_RDWR, .resolve = RESOLVE_BENEATH};
    SHOW_OPEN(f, (int)syscall(SYS_openat2, d, "file", &how, sizeof how));
    opened(f);
    how.flags = O_RDWR | 1ULL << 40;
    SHOW_OPEN(f, (int)syscall(SYS_openat2, d, "file", &how, sizeof how));
    how.flags = O_RDONLY;
    SHOW_OPEN(f, (int)syscall(SYS_openat2, d, "../file", &how, sizeof how));
    SHOW_OPEN(f, open(at("file"), O_RDWR | O_CREAT | O_EXCL, 0600));
    SHOW_OPEN(f, open(at("file/below"), O_RDONLY));
    SHOW_OPEN(f, open(base, O_RDWR));
    SHOW_OPEN(f, open(at("file"), O_RDONLY | O_DIRECTORY));
    SHOW_OPEN(f, open(at("file"), O_PATH));
    SHOW(read(f, text, 4));
    SHOW(fstat(f, &s) + (int)s.st_size);
    SHOW(close(f));
    SHOW(close(f));
    SHOW(close(d));
}

static void content(void)
{
    static char block[10000];
    char text[64];
    struct iovec two[2] = {{text, 5}, {text + 10, 5}};
    int f;
    for (size_t i = 0; i < sizeof block; i++)
        block[i] = (char)('a' + i % 23);
    SHOW_OPEN(f, open(at("bytes"), O_RDWR | O_CREAT | O_TRUNC, 0644));
    SHOW(write(f, block, sizeof block) + __write(f, "tail", 4));
    SHOW(lseek(f, 100, SEEK_SET) + lseek64(f, 10, SEEK_CUR));
    SHOW(read(f, text, 10));
    SHOW(readv(f, two, 2) + lseek(f, 0, SEEK_CUR));
    SHOW(writev(f, two, 2) + lseek(f, 0, SEEK_CUR));
    SHOW(pread(f, text, 20, 9995));
    SHOW(pread64(f, text, 20, 9990));
    SHOW(pwrite(f, "one", 3, 50));
    SHOW(pwrite64(f, "two", 3, 60) + __pwrite64(f, "three", 5, 70));
    SHOW(preadv(f, two, 2, 48));
    SHOW(preadv64(f, two, 2, 58));
    SHOW(preadv2(f, two, 2, 68, 0));
    SHOW(preadv64v2(f, two, 2, -1, 0));
    SHOW(pwritev(f, two, 2, 200));
    SHOW(pwritev64(f, two, 2, 300));
    SHOW(pwritev2(f, two, 2, 400, RWF_DSYNC));
    SHOW(pwritev64v2(f, two, 2, 500, 0));
    SHOW(__read_chk(f, text, 10, sizeof text) + __pread_chk(f, text, 10, 3, sizeof text));
    SHOW(__pread64_chk(f, text, 10, 9999, sizeof text));
    SHOW(pread(f, text, 5, -1));
    SHOW(lseek(f, -1, SEEK_SET));
    SHOW(lseek(f, 0, SEEK_END));
    SHOW(ftruncate(f, 9000) + ftruncate64(f, 8999));
    SHOW(truncate(at("bytes"), 8998) + truncate64(at("bytes"), 8997));
    SHOW(fallocate(f, 0, 0, 12000) + fallocate64(f, FALLOC_FL_KEEP_SIZE, 0, 20000));
    SHOW(posix_fallocate(f, 12000, 100) + posix_fallocate64(f, 12100, 100));
    SHOW(posix_fallocate(f, -1, 100));
    SHOW(lseek(f, 0, SEEK_DATA));
    SHOW(lseek(f, 1 << 20, SEEK_HOLE));
    SHOW(fsync(f) + fdatasync(f));
    SHOW(syncfs(f));
    sync();
    SHOW(syncfs(-1));
    SHOW(syscall(SYS_syncfs, f) + syscall(SYS_sync));
    SHOW(sync_file_range(f, 0, 4096, SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER));
    SHOW(posix_fadvise(f, 0, 0, POSIX_FADV_SEQUENTIAL) + posix_fadvise64(f, 0, 0, POSIX_FADV_DONTNEED));
    SHOW(readahead(f, 0, 8192));
    SHOW(close(f));
    SHOW_CONTENT(at("bytes"));
}

static void between_files(void)
{
    int f, g, ends[2], others[2];
    char text[64] = {0};
    off_t from = 10, to = 20;
    SHOW_OPEN(f, open(at("bytes"), O_RDWR));
    SHOW_OPEN(g, open(at("target"), O_RDWR | O_CREAT | O_TRUNC, 0644));
    SHOW(pwrite(f, "by the library", 14, 0) + pwrite(f, "by the library", 14, 0));
    SHOW(copy_file_range(f, &from, g, &to, 100, 0));
    SHOW(copy_file_range(f, &from, f, &from, 100, 0));
    SHOW(copy_file_range(f, NULL, g, NULL, 10, 7));
    from = 0;
    SHOW(sendfile(g, f, &from, 30) + sendfile64(g, f, &from, 30));
    SHOW(pipe(ends) + pipe2(others, O_CLOEXEC));
    loff_t at_offset = 5;
    SHOW(splice(f, &at_offset, ends[1], NULL, 40, 0));
    SHOW(tee(ends[0], others[1], 20, 0));
    SHOW(read(others[0], text, sizeof text));
    printf("    \"%s\"\n", text);
    at_offset = 200;
    SHOW(splice(ends[0], NULL, g, &at_offset, 40, 0));
    SHOW(at_offset);
    struct iovec one = {text, 10};
    SHOW(vmsplice(ends[1], &one, 1, 0));
    SHOW(splice(ends[0], NULL, g, NULL, 10, 0));
    SHOW(close(ends[0]) + close(ends[1]) + close(others[0]) + close(others[1]));
    /* What was spliced is seen by the library, and the other way round. */
    SHOW(pread(g, text, 20, 200) + pread(g, text, 20, 200));
    SHOW(pwrite(g, "seen", 4, 200));
    SHOW(close(f) + close(g));
    SHOW_CONTENT(at("target"));
}

static void attributes(void)
{
    struct stat s;
    struct stat64 t;
    struct statx x;
    int d, f;
    dev_t none = 0, odd = 1;
    SHOW_OPEN(d, open(base, O_RDONLY | O_DIRECTORY));
    SHOW_OPEN(f, open(at("file"), O_RDWR));
    SHOW(symlink("file", at("soft")));
    long long r;
#define SIZE(call, s) (r = (call), r < 0 ? r : (long long)(s).st_size)
    SHOW((SIZE(stat(at("soft"), &s), s)));
    SHOW((SIZE(stat64(at("soft"), &t), t)));
    SHOW((SIZE(lstat(at("soft"), &s), s)));
    SHOW((SIZE(lstat64(at("soft"), &t), t)));
    SHOW((SIZE(fstat(f, &s), s)));
    SHOW((SIZE(fstat64(f, &t), t)));
    SHOW((SIZE(fstatat(d, "soft", &s, AT_SYMLINK_NOFOLLOW), s)));
    SHOW((SIZE(fstatat64(d, "soft", &t, 0), t)));
    SHOW((SIZE(__xstat(1, at("soft"), &s), s)));
    SHOW((SIZE(__lxstat(1, at("soft"), &s), s)));
    SHOW((SIZE(__fxstat(1, f, &s), s)));
    SHOW((SIZE(__fxstatat(1, d, "soft", &s, 0), s)));
    SHOW((SIZE(__xstat64(1, at("soft"), &t), t)));
    SHOW((SIZE(__lxstat64(1, at("soft"), &t), t)));
    SHOW((SIZE(__fxstat64(1, f, &t), t)));
    SHOW((SIZE(__fxstatat64(1, d, "none", &t, 0), t)));
    SHOW(__xstat(7, at("soft"), &s));
    SHOW(statx(d, "soft", AT_SYMLINK_NOFOLLOW, STATX_TYPE | STATX_SIZE, &x) + (int)x.stx_size);
    SHOW(statx(f, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &x) + (int)x.stx_size);
    SHOW(statx(f, "", AT_EMPTY_PATH, 1U << 31, &x));
    SHOW(access(at("file"), R_OK) + euidaccess(at("file"), W_OK) + eaccess(at("file"), F_OK));
    SHOW(faccessat(d, "file", R_OK, AT_EACCESS));
    SHOW(access(at("file"), X_OK));
    struct statfs fs;
    struct statfs64 fs64;
    struct statvfs vfs;
    struct statvfs64 vfs64;
    SHOW(statfs(at("file"), &fs) + fstatfs(f, &fs) + (fs.f_blocks > 0) + (int)fs.f_namelen);
    SHOW(statfs64(at("file"), &fs64) + fstatfs64(f, &fs64) + (fs64.f_blocks > 0));
    SHOW(statvfs(at("file"), &vfs) + fstatvfs(f, &vfs) + (vfs.f_blocks > 0) + (int)vfs.f_namemax);
    SHOW(statvfs64(at("file"), &vfs64) + fstatvfs64(f, &vfs64) + (vfs64.f_blocks > 0));
    SHOW(statfs(at("none"), &fs));
    SHOW(pathconf(at("file"), _PC_NAME_MAX) + fpathconf(f, _PC_LINK_MAX) - fpathconf(f, _PC_LINK_MAX));
    SHOW(__xmknod(0, at("old"), S_IFREG | 0600, &none) + __xmknodat(0, d, "older", S_IFIFO | 0600, &none));
    SHOW(__xmknod(3, at("oldest"), S_IFREG | 0600, &odd));
    SHOW_STAT(at("older"));
    SHOW(chmod(at("file"), 0604) + fchmod(f, 0614));
    SHOW(fchmodat(d, "file", 0624, 0));
    SHOW(chown(at("file"), 1, 2) + lchown(at("soft"), 3, 4) + fchown(f, 5, -1));
    SHOW(fchownat(d, "soft", 6, 7, AT_SYMLINK_NOFOLLOW) + fchownat(f, "", -1, 8, AT_EMPTY_PATH));
    SHOW_STAT(at("file"));
    SHOW(lstat(at("soft"), &s) + (int)s.st_uid * 10 + (int)s.st_gid);
    struct timespec times[2] = {{1, 2}, {3, 4}};
    struct timeval values[2] = {{5, 6}, {7, 8}};
    struct utimbuf buffer = {9, 10};
#define TIMES(call) (r = (call), stat(at("file"), &s), r < 0 ? r : (long long)(s.st_atime * 100 + s.st_mtime))
    SHOW((TIMES(utimensat(d, "file", times, 0))));
    SHOW((TIMES(futimens(f, times))));
    SHOW((TIMES(utimes(at("file"), values))));
    SHOW((TIMES(lutimes(at("soft"), values))));
    SHOW((TIMES(futimes(f, values))));
    SHOW((TIMES(futimesat(d, "file", values))));
    SHOW((TIMES(utime(at("file"), &buffer))));
    SHOW((SIZE(lstat(at("soft"), &s), s) + s.st_mtime));
    char target[64] = {0};
    SHOW(__readlink_chk(at("soft"), target, 20, sizeof target) + __readlinkat_chk(d, "soft", target, 2, sizeof target));
    SHOW(close(f) + close(d));
}

static void stdio(void)
{
    char line[64];
    FILE *file = fopen(at("lines"), "w+");
    SHOW(fprintf(file, "first\nsecond\n") + fflush(file));
    SHOW(ftruncate(fileno(file), 13) + fseek(file, 6, SEEK_SET));
    SHOW(fgets(line, sizeof line, file) != NULL);
    printf("    %s", line);
    SHOW(fclose(file));
    SHOW((file = freopen(at("lines"), "r", fopen64(at("lines"), "r"))) != NULL);
    SHOW((file = freopen64(at("lines"), "a", file)) != NULL);
    SHOW(fputs("third\n", file) >= 0);
    SHOW(fclose(file));
    SHOW((file = fdopen(open(at("lines"), O_RDONLY), "r")) != NULL);
    int lines = 0;
    while (fgets(line, sizeof line, file))
        lines++;
    SHOW(lines + fclose(file));
    SHOW_CONTENT(at("lines"));
}

static void mapping(void)
{
    int f;
    char text[8] = {0};
    SHOW_OPEN(f, open(at("mapped"), O_RDWR | O_CREAT | O_TRUNC, 0644));
    SHOW(ftruncate(f, 8192) + pwrite(f, "abcd", 4, 0) + pwrite(f, "abcd", 4, 4096));
    char *shared = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
    char *private = mmap64(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, f, 4096);
    SHOW(memcmp(shared, "abcd", 4) + memcmp(private, "abcd", 4));
    memcpy(shared, "ABCD", 4);
    memcpy(private, "ABCD", 4);
    SHOW(pread(f, text, 4, 0) + memcmp(text, "ABCD", 4));
    SHOW(pwrite(f, "efgh", 4, 4));
    SHOW(memcmp(shared, "ABCDefgh", 8));
    SHOW(msync(shared, 8192, MS_SYNC));
    unsigned char resident[2];
    SHOW(mincore(shared, 8192, resident) + (resident[0] & 1));
    SHOW(madvise(shared, 8192, MADV_WILLNEED) + mprotect(shared, 4096, PROT_READ));
    shared = mremap(shared, 8192, 4096, 0);
    SHOW(shared != MAP_FAILED);
    SHOW(munmap(shared, 4096) + munmap(private, 4096) + close(f));
    SHOW_CONTENT(at("mapped"));
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    base = argv[1];
    umask(022);
    opening();
    content();
    between_files();
    attributes();
    stdio();
    mapping();
    return 0;
}
