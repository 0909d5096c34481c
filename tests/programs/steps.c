/* One open file, driven step by step from standard input; built both dynamic (for the library) and static (for the kernel's
 * path). Every command is answered by one line: "ok VALUE" or "error ERRNO". Content is written as one repeated byte.
 *
 *   open PATH FLAGS    close              pread OFFSET LENGTH    pwrite OFFSET LENGTH BYTE
 *   append LENGTH BYTE size               truncate LENGTH        sync
 *   map LENGTH         mread OFFSET LEN   mwrite OFFSET LEN BYTE unmap
 *   textmap LENGTH     (private, to be read only)
 *   send OFFSET LENGTH (a hash of what sendfile copies)
 *   rename FROM TO     unlink PATH        statsize PATH          exit
 *   link FROM TO       symlink TO PATH    mkdir PATH             chmod PATH MODE
 *   look PATH          (a hash of what lstat says of it)
 *   facts              (a hash of what fstat says; an error when the kernel says something else, or statx does)
 *   cut LENGTH         (ftruncate by the system call itself)
 *   end LENGTH BYTE    (pwritev2 with RWF_APPEND)             left    (FIONREAD)
 *   appending          (O_APPEND from here on)                 where   (the offset)
 *   shorten PATH LENGTH
 *   swap PLACE         (goes on with the open file that lies there, and leaves this one there)
 *   times PATH SECONDS chown PATH UID GID */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { BUFFER = 1 << 20, PLACES = 32 };
static unsigned char buffer[BUFFER];

static void answer(long long result, unsigned long long value)
{
    if (result < 0)
        printf("error %d\n", errno);
    else
        printf("ok %llu\n", value);
    fflush(stdout);
}

/* FNV-1a: the test computes the same over what it expects. */
static uint64_t hash(const unsigned char *bytes, size_t count)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < count; i++)
        h = (h ^ bytes[i]) * 0x100000001b3u;
    return h;
}

int main(void)
{
    char line[4096], command[32], a[2048], b[2048];
    long long x, y, z;
    int fd = -1, places[PLACES];
    unsigned char *map = NULL;
    size_t map_length = 0;

    for (int place = 0; place < PLACES; place++)
        places[place] = -1;
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "%31s", command) != 1)
            continue;
        const char *rest = line + strlen(command);
        if (!strcmp(command, "open") && sscanf(rest, "%2047s %lli", a, &x) == 2) {
            fd = open(a, (int)x, 0644);
            answer(fd, 0);
        } else if (!strcmp(command, "close")) {
            answer(close(fd), 0);
            fd = -1;
        } else if (!strcmp(command, "pread") && sscanf(rest, "%lli %lli", &x, &y) == 2 && y <= BUFFER) {
            ssize_t n = pread(fd, buffer, (size_t)y, x);
            answer(n, n < 0 ? 0 : hash(buffer, (size_t)n));
        } else if (!strcmp(command, "pwrite") && sscanf(rest, "%lli %lli %lli", &x, &y, &z) == 3 && y <= BUFFER) {
            memset(buffer, (int)z, (size_t)y);
            ssize_t n = pwrite(fd, buffer, (size_t)y, x);
            answer(n, (unsigned long long)n);
        } else if (!strcmp(command, "append") && sscanf(rest, "%lli %lli", &x, &y) == 2 && x <= BUFFER) {
            memset(buffer, (int)y, (size_t)x);
            ssize_t n = write(fd, buffer, (size_t)x);
            answer(n, (unsigned long long)n);
        } else if (!strcmp(command, "size")) {
            struct stat st;
            int r = fstat(fd, &st);
            answer(r, (unsigned long long)st.st_size);
        } else if (!strcmp(command, "statsize") && sscanf(rest, "%2047s", a) == 1) {
            struct stat st;
            int r = stat(a, &st);
            answer(r, (unsigned long long)st.st_size);
        } else if (!strcmp(command, "truncate") && sscanf(rest, "%lli", &x) == 1) {
            answer(ftruncate(fd, x), 0);
        } else if (!strcmp(command, "sync")) {
            answer(fsync(fd), 0);
        } else if (!strcmp(command, "map") && sscanf(rest, "%lli", &x) == 1) {
            map_length = (size_t)x;
            map = mmap(NULL, map_length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            answer(map == MAP_FAILED ? -1 : 0, 0);
        } else if (!strcmp(command, "persistent") && sscanf(rest, "%lli", &x) == 1) {
            void *found = mmap(NULL, x, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
            answer(found == MAP_FAILED ? -1 : 0, 0);
        } else if (!strcmp(command, "send") && sscanf(rest, "%lli %lli", &x, &y) == 2 && y <= BUFFER) {
            int target = memfd_create("steps", 0);
            off_t from = x;
            ssize_t n = sendfile(target, fd, &from, (size_t)y);
            if (n >= 0)
                n = pread(target, buffer, (size_t)n, 0);
            close(target);
            answer(n, n < 0 ? 0 : hash(buffer, (size_t)n));
        } else if (!strcmp(command, "textmap") && sscanf(rest, "%lli", &x) == 1) {
            map_length = (size_t)x;
            map = mmap(NULL, map_length, PROT_READ, MAP_PRIVATE, fd, 0);
            answer(map == MAP_FAILED ? -1 : 0, 0);
        } else if (!strcmp(command, "mread") && sscanf(rest, "%lli %lli", &x, &y) == 2 && (size_t)(x + y) <= map_length) {
            answer(0, hash(map + x, (size_t)y));
        } else if (!strcmp(command, "mwrite") && sscanf(rest, "%lli %lli %lli", &x, &y, &z) == 3 &&
                   (size_t)(x + y) <= map_length) {
            memset(map + x, (int)z, (size_t)y);
            answer(0, 0);
        } else if (!strcmp(command, "unmap")) {
            answer(munmap(map, map_length), 0);
            map_length = 0;
        } else if (!strcmp(command, "rename") && sscanf(rest, "%2047s %2047s", a, b) == 2) {
            answer(rename(a, b), 0);
        } else if (!strcmp(command, "unlink") && sscanf(rest, "%2047s", a) == 1) {
            answer(unlink(a), 0);
        } else if (!strcmp(command, "link") && sscanf(rest, "%2047s %2047s", a, b) == 2) {
            answer(link(a, b), 0);
        } else if (!strcmp(command, "symlink") && sscanf(rest, "%2047s %2047s", a, b) == 2) {
            answer(symlink(a, b), 0);
        } else if (!strcmp(command, "mkdir") && sscanf(rest, "%2047s", a) == 1) {
            answer(mkdir(a, 0755), 0);
        } else if (!strcmp(command, "chmod") && sscanf(rest, "%2047s %lli", a, &x) == 2) {
            answer(chmod(a, (mode_t)x), 0);
        } else if (!strcmp(command, "look") && sscanf(rest, "%2047s", a) == 1) {
            struct stat st;
            int r = lstat(a, &st);
            uint64_t seen[] = {st.st_ino, st.st_mode, st.st_nlink, st.st_size, (uint64_t)st.st_mtime, (uint64_t)st.st_mtim.tv_nsec};
            answer(r, r ? 0 : hash((unsigned char *)seen, sizeof seen));
        } else if (!strcmp(command, "facts")) {
            struct stat st, kernels;
            memset(&st, 0xff, sizeof st);
            memset(&kernels, 0xff, sizeof kernels);
            int r = fstat(fd, &st);
            if (r == 0 && (r = (int)syscall(SYS_fstat, fd, &kernels)) == 0 && memcmp(&st, &kernels, sizeof st)) {
                errno = ENOTRECOVERABLE;
                r = -1;
            }
            unsigned masks[] = {STATX_BASIC_STATS, STATX_BASIC_STATS | STATX_BTIME, STATX_BASIC_STATS | STATX_MNT_ID};
            for (int n = 0; r == 0 && n < 3; n++) {
                struct statx long_st, long_kernels;
                memset(&long_st, 0xff, sizeof long_st);
                memset(&long_kernels, 0xff, sizeof long_kernels);
                r = statx(fd, "", AT_EMPTY_PATH, masks[n], &long_st);
                if (r == 0 && (r = (int)syscall(SYS_statx, fd, "", AT_EMPTY_PATH, masks[n], &long_kernels)) == 0 &&
                    memcmp(&long_st, &long_kernels, sizeof long_st)) {
                    errno = ENOTRECOVERABLE;
                    r = -1;
                }
            }
            answer(r, r ? 0 : hash((unsigned char *)&st, sizeof st));
        } else if (!strcmp(command, "end") && sscanf(rest, "%lli %lli", &x, &y) == 2 && x <= BUFFER) {
            struct iovec piece = {buffer, (size_t)x};
            memset(buffer, (int)y, (size_t)x);
            ssize_t n = pwritev2(fd, &piece, 1, 0, RWF_APPEND);
            answer(n, (unsigned long long)n);
        } else if (!strcmp(command, "left")) {
            int left = 0;
            int r = ioctl(fd, FIONREAD, &left);
            answer(r, (unsigned long long)left);
        } else if (!strcmp(command, "appending")) {
            answer(fcntl(fd, F_SETFL, O_APPEND), 0);
        } else if (!strcmp(command, "where")) {
            off_t at = lseek(fd, 0, SEEK_CUR);
            answer(at, (unsigned long long)at);
        } else if (!strcmp(command, "cut") && sscanf(rest, "%lli", &x) == 1) {
            answer(syscall(SYS_ftruncate, fd, x), 0);
        } else if (!strcmp(command, "shorten") && sscanf(rest, "%2047s %lli", a, &x) == 2) {
            answer(truncate(a, x), 0);
        } else if (!strcmp(command, "times") && sscanf(rest, "%2047s %lli", a, &x) == 2) {
            struct timespec times[2] = {{.tv_sec = x, .tv_nsec = 1}, {.tv_sec = x + 1, .tv_nsec = 2}};
            answer(utimensat(AT_FDCWD, a, times, 0), 0);
        } else if (!strcmp(command, "chown") && sscanf(rest, "%2047s %lli %lli", a, &x, &y) == 3) {
            answer(chown(a, (uid_t)x, (gid_t)y), 0);
        } else if (!strcmp(command, "swap") && sscanf(rest, "%lli", &x) == 1 && x >= 0 && x < PLACES) {
            int there = places[x];
            places[x] = fd;
            fd = there;
            answer(0, 0);
        } else if (!strcmp(command, "exit")) {
            return 0;
        } else {
            printf("what? %s", line);
            fflush(stdout);
        }
    }
    return 0;
}
