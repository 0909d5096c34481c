/* Processes that are killed, or whose service is. Each runs until an operation fails, reports that, and exits with 3: nothing waits for
 * ever. What it says on standard output was true when it said it.
 *
 *   busy DIRECTORY   replaces a file by rename, appends records, makes and removes names
 *   sync FILE        writes block after block and syncs each; says "synced N"
 *   map FILE         changes a shared mapping and msyncs it
 *   lock FILE        waits for a lock, then writes under it
 *   read FILE        reads it over and over */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BLOCK = 4096, BLOCKS = 64, WHOLE = 9000 };

static void needed(int fine, int line, const char *what)
{
    if (!fine) {
        fprintf(stderr, "line %d: %s: %s\n", line, what, strerror(errno));
        exit(3);
    }
}

#define need(what) needed((what), __LINE__, #what)

static int opened(const char *path, int flags)
{
    int fd = open(path, flags, 0644);
    need(fd >= 0);
    return fd;
}

static void busy(const char *directory)
{
    char whole[4096], new[4096], log[4096], name[4096], other[4096];
    static unsigned char bytes[WHOLE];
    snprintf(whole, sizeof whole, "%s/whole", directory);
    snprintf(new, sizeof new, "%s/new-%d", directory, (int)getpid());
    snprintf(log, sizeof log, "%s/log", directory);
    int records = opened(log, O_WRONLY | O_CREAT | O_APPEND);
    for (uint64_t round = 0;; round++) {
        int fd = opened(new, O_WRONLY | O_CREAT | O_TRUNC);
        memset(bytes, (int)round, sizeof bytes);
        need(pwrite(fd, bytes, 5000, 0) == 5000);
        need(pwrite(fd, bytes + 5000, WHOLE - 5000, 5000) == WHOLE - 5000);
        need(!close(fd));
        need(!rename(new, whole));
        uint64_t record[2] = {(uint64_t)getpid() << 32 | round, ~((uint64_t)getpid() << 32 | round)};
        need(write(records, record, sizeof record) == sizeof record);
        snprintf(name, sizeof name, "%s/d-%d", directory, (int)getpid());
        snprintf(other, sizeof other, "%s/l-%d", directory, (int)getpid());
        need(!mkdir(name, 0755));
        need(!symlink("whole", other));
        need(!truncate(whole, WHOLE));
        need(!unlink(other));
        need(!rmdir(name));
    }
}

static void sync_blocks(const char *path)
{
    static unsigned char block[BLOCK];
    int fd = opened(path, O_RDWR | O_CREAT);
    for (uint64_t round = 1;; round++) {
        for (size_t at = 0; at < BLOCK; at += sizeof round)
            memcpy(block + at, &round, sizeof round);
        need(pwrite(fd, block, BLOCK, (off_t)(round % BLOCKS) * BLOCK) == BLOCK);
        need(!fsync(fd));
        printf("synced %llu\n", (unsigned long long)round);
        fflush(stdout);
    }
}

static void map(const char *path)
{
    int fd = opened(path, O_RDWR | O_CREAT);
    need(!ftruncate(fd, BLOCK * BLOCKS));
    unsigned char *bytes = mmap(NULL, BLOCK * BLOCKS, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    need(bytes != MAP_FAILED);
    for (unsigned round = 0;; round++) {
        memset(bytes + round % BLOCKS * BLOCK, (int)round, BLOCK);
        need(!msync(bytes, BLOCK * BLOCKS, MS_SYNC));
    }
}

static void lock(const char *path)
{
    int fd = opened(path, O_RDWR | O_CREAT);
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    need(!fcntl(fd, F_SETLKW, &whole));
    for (uint64_t round = 0;; round++)
        need(pwrite(fd, &round, sizeof round, 0) == sizeof round);
}

static void read_on(const char *path)
{
    static unsigned char bytes[1 << 17];
    int fd = opened(path, O_RDONLY);
    for (off_t at = 0;;) {
        ssize_t count = pread(fd, bytes, sizeof bytes, at);
        need(count >= 0);
        at = count ? at + count : 0;
        if (!count)
            need(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    }
}

int main(int count, char **words)
{
    if (count != 3)
        return 2;
    const char *what = words[1];
    if (!strcmp(what, "busy"))
        busy(words[2]);
    else if (!strcmp(what, "sync"))
        sync_blocks(words[2]);
    else if (!strcmp(what, "map"))
        map(words[2]);
    else if (!strcmp(what, "lock"))
        lock(words[2]);
    else if (!strcmp(what, "read"))
        read_on(words[2]);
    return 2;
}
