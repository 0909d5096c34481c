/* Every way to ask for durability, one at a time, from standard input; built both dynamic (for the library) and static (for the kernel's
 * path). A command is "WAY PATH". It ends when the way says that what it did is durable, and is answered by "ok 0" or "error ERRNO".
 *
 * All ways have the same effect: the file at PATH, which must not exist, is created with a page of 'a' and synced, and then gets
 * a page of 'b' behind it. Ways whose name begins with "size_" make the file two pages long instead. Those that begin with "name-" give a
 * synced file a name in PATH, which is a directory, or remove one from there: see `names`. */
#include <aio.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PAGE = 4096 };
static unsigned char bytes[2][PAGE] __attribute__((aligned(PAGE)));
static struct iovec second = {bytes[1], PAGE};

static int is_whole(ssize_t count)
{
    if (count == PAGE)
        return 0;
    if (count >= 0)
        errno = EIO;
    return -1;
}

static int put(int fd)
{
    return is_whole(pwrite(fd, bytes[1], PAGE, PAGE));
}

static int put_by(int fd, int flags)
{
    return is_whole(pwritev2(fd, &second, 1, PAGE, flags));
}

/* libaio: one operation, waited for. */
static int asynchronous(int fd, int operation, int flags)
{
    aio_context_t context = 0;
    struct iocb block = {.aio_fildes = fd, .aio_lio_opcode = operation, .aio_rw_flags = flags}, *blocks = &block;
    struct io_event event = {0};
    if (operation == IOCB_CMD_PWRITE) {
        block.aio_buf = (uintptr_t)bytes[1];
        block.aio_nbytes = PAGE;
        block.aio_offset = PAGE;
    }
    if (syscall(SYS_io_setup, 1, &context) < 0)
        return -1;
    int r = -1;
    long ended = syscall(SYS_io_submit, context, 1, &blocks);
    /* What the kernel does in this thread for others interrupts the wait, as a signal does. */
    while (ended == 1 && (ended = syscall(SYS_io_getevents, context, 1, 1, &event, NULL)) < 0 && errno == EINTR)
        ended = 1;
    if (ended == 1) {
        r = event.res < 0 ? -1 : operation == IOCB_CMD_PWRITE ? is_whole(event.res) : 0;
        if (event.res < 0)
            errno = (int)-event.res;
    }
    int error = errno;
    syscall(SYS_io_destroy, context);
    errno = error;
    return r;
}

/* io_uring: the same. */
static int by_ring(int fd, int operation, int flags)
{
    struct io_uring_params parameters = {0};
    int ring = (int)syscall(SYS_io_uring_setup, 1, &parameters);
    if (ring < 0)
        return -1;
    size_t length = parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned);
    size_t other = parameters.cq_off.cqes + parameters.cq_entries * sizeof(struct io_uring_cqe);
    length = other > length ? other : length;
    char *rings = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *entry =
        mmap(NULL, sizeof *entry, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES);
    int r = -1;
    if (rings != MAP_FAILED && entry != MAP_FAILED) {
        memset(entry, 0, sizeof *entry);
        entry->opcode = (unsigned char)operation;
        entry->fd = fd;
        if (operation == IORING_OP_WRITE) {
            entry->addr = (uintptr_t)bytes[1];
            entry->len = PAGE;
            entry->off = PAGE;
        }
        entry->rw_flags = flags;
        ((unsigned *)(rings + parameters.sq_off.array))[0] = 0;
        __atomic_store_n((unsigned *)(rings + parameters.sq_off.tail), 1, __ATOMIC_RELEASE);
        if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1) {
            struct io_uring_cqe *done = (struct io_uring_cqe *)(rings + parameters.cq_off.cqes);
            r = done->res < 0 ? -1 : operation == IORING_OP_WRITE ? is_whole(done->res) : 0;
            if (done->res < 0)
                errno = -done->res;
        }
    }
    int error = errno;
    munmap(rings, length);
    munmap(entry, sizeof *entry);
    close(ring);
    errno = error;
    return r;
}

static int store(int fd)
{
    if (ftruncate(fd, 2 * PAGE) < 0)
        return -1;
    char *map = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        return -1;
    memset(map + PAGE, 'b', PAGE);
    int r = msync(map, 2 * PAGE, MS_SYNC);
    return munmap(map, 2 * PAGE) < 0 ? -1 : r;
}

static int posix(int fd, int operation)
{
    struct aiocb block = {.aio_fildes = fd, .aio_buf = bytes[1], .aio_nbytes = PAGE, .aio_offset = PAGE};
    const struct aiocb *blocks[] = {&block};
    if ((operation ? aio_fsync(operation, &block) : aio_write(&block)) < 0)
        return -1;
    while ((errno = aio_error(&block)) == EINPROGRESS)
        aio_suspend(blocks, 1, NULL);
    ssize_t result = errno ? -1 : aio_return(&block);
    return operation ? (int)result : is_whole(result);
}

/* A file beside it, whose second page is the one to be copied. */
static int source(const char *path)
{
    char name[4096];
    snprintf(name, sizeof name, "%s.source", path);
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
    return fd < 0 || put(fd) < 0 ? -1 : fd;
}

static int copied(const char *path, int fd, int by_sendfile)
{
    int from = source(path);
    off_t at = PAGE, to = PAGE;
    if (from < 0 || lseek(fd, PAGE, SEEK_SET) < 0)
        return -1;
    return is_whole(by_sendfile ? sendfile(fd, from, &at, PAGE) : copy_file_range(from, &at, fd, &to, PAGE, 0));
}

static int spliced(int fd)
{
    int ends[2];
    loff_t to = PAGE;
    if (pipe(ends) < 0 || write(ends[1], bytes[1], PAGE) != PAGE)
        return -1;
    int r = is_whole(splice(ends[0], NULL, fd, &to, PAGE, 0));
    close(ends[0]);
    close(ends[1]);
    return r;
}

/* The descriptor that goes on appending is opened so; this one does not any more. */
static int put_at_offset(int fd, int flags)
{
    return fcntl(fd, F_SETFL, 0) < 0 ? -1 : put_by(fd, flags);
}

static int appended(int fd)
{
    return is_whole(write(fd, bytes[1], PAGE));
}

struct way {
    const char *name;
    int flags;
    int (*act)(const char *path, int fd);
};
#define WAY(id, flags, ...) \
    static int way_##id(const char *path, int fd) { (void)path; return __VA_ARGS__; }
#include "durable-ways.h"
#undef WAY
#define WAY(id, flags, ...) {#id, flags, way_##id},
static const struct way ways[] = {
#include "durable-ways.h"
};

/* Names in a directory: made durable by the directory's fsync. */
static int names(const char *way, const char *path)
{
    int directory = open(path, O_RDONLY | O_DIRECTORY), fd = openat(directory, "old", O_RDWR | O_CREAT, 0644);
    if (directory < 0 || fd < 0 || put(fd) < 0 || fsync(fd) < 0 || fsync(directory) < 0)
        return -1;
    close(fd);
    int r = !strcmp(way, "name-link")     ? linkat(directory, "old", directory, "new", 0)
            : !strcmp(way, "name-rename") ? renameat(directory, "old", directory, "new")
            : !strcmp(way, "name-unlink") ? unlinkat(directory, "old", 0)
            : !strcmp(way, "name-make")   ? mkdirat(directory, "new", 0755)
                                          : (errno = EINVAL, -1);
    if (r == 0)
        r = fsync(directory);
    close(directory);
    return r;
}

static int run(const char *name, const char *path)
{
    if (!strncmp(name, "name-", 5))
        return names(name, path);
    for (size_t n = 0; n < sizeof ways / sizeof *ways; n++) {
        const struct way *way = &ways[n];
        if (strcmp(way->name, name))
            continue;
        int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0644);
        if (fd < 0 || pwrite(fd, bytes[0], PAGE, 0) != PAGE || fsync(fd) < 0)
            return -1;
        close(fd);
        fd = open(path, O_RDWR | way->flags);
        if (fd < 0)
            return -1;
        int r = way->act(path, fd), error = errno;
        /* It stays open: closing is no way. */
        errno = error;
        return r;
    }
    errno = EINVAL;
    return -1;
}

int main(void)
{
    char line[4096], way[64], path[2048];
    memset(bytes[0], 'a', PAGE);
    memset(bytes[1], 'b', PAGE);
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "%63s %2047s", way, path) != 2)
            break;
        if (run(way, path) < 0)
            printf("error %d\n", errno);
        else
            printf("ok 0\n");
        fflush(stdout);
    }
    return 0;
}
