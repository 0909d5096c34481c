/* Direct writes beside readers that use the kernel's page cache: what has been written is what is read from then on.
 *
 * direct HOW PATH ROUNDS: writes a file of many pages anew in each round, past the page cache, while threads read it through the page cache
 * and by mappings, all by the kernel itself. When the writes of a round have ended, all of the file must be what they wrote, and
 * again when the readers have been waited for. HOW is "pwrite" (by the library, where it is preloaded), "libaio" or "io_uring". */
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, PIECES = 16, PIECE = 4 * PAGE, LENGTH = PIECES * PIECE, READERS = 3 };
static unsigned char content[LENGTH] __attribute__((aligned(PAGE)));
static const char *path;
static volatile int is_over;

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void *read_on(void *unused)
{
    static _Thread_local unsigned char buffer[LENGTH];
    int fd = open(path, O_RDONLY);
    if (fd < 0)
        fail("open");
    while (!is_over)
        for (long at = 0; at < LENGTH && !is_over; at += PIECE)
            syscall(SYS_pread64, fd, buffer, PIECE, at);
    close(fd);
    return unused;
}

/* A mapping in which pages are touched. */
static void *look_on(void *unused)
{
    int fd = open(path, O_RDONLY);
    if (fd < 0)
        fail("open");
    volatile unsigned char *map = mmap(NULL, LENGTH, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        fail("mmap");
    unsigned sum = 0;
    while (!is_over)
        for (long at = 0; at < LENGTH; at += PAGE)
            sum += map[at];
    munmap((void *)map, LENGTH);
    close(fd);
    return sum == 1 ? unused : NULL;
}

static void by_pwrite(int fd)
{
    for (long at = 0; at < LENGTH; at += PIECE)
        if (pwrite(fd, content + at, PIECE, at) != PIECE)
            fail("pwrite");
}

static void by_libaio(int fd)
{
    static aio_context_t context;
    static struct iocb blocks[PIECES], *list[PIECES];
    static struct io_event events[PIECES];
    if (!context && syscall(SYS_io_setup, PIECES, &context) < 0)
        fail("io_setup");
    for (int n = 0; n < PIECES; n++) {
        blocks[n] = (struct iocb){.aio_fildes = fd, .aio_lio_opcode = IOCB_CMD_PWRITE, .aio_nbytes = PIECE};
        blocks[n].aio_buf = (uintptr_t)(content + n * PIECE);
        blocks[n].aio_offset = n * PIECE;
        list[n] = &blocks[n];
    }
    if (syscall(SYS_io_submit, context, PIECES, list) != PIECES)
        fail("io_submit");
    if (syscall(SYS_io_getevents, context, PIECES, PIECES, events, NULL) != PIECES)
        fail("io_getevents");
    for (int n = 0; n < PIECES; n++)
        if (events[n].res != PIECE)
            fail("a write");
}

static void by_io_uring(int fd)
{
    static int ring = -1;
    static struct io_uring_params parameters;
    static char *rings;
    static struct io_uring_sqe *entries;
    if (ring < 0) {
        if ((ring = (int)syscall(SYS_io_uring_setup, PIECES, &parameters)) < 0)
            fail("io_uring_setup");
        size_t length = parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned);
        size_t other = parameters.cq_off.cqes + parameters.cq_entries * sizeof(struct io_uring_cqe);
        int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
        rings = mmap(NULL, length > other ? length : other, protection, flags, ring, IORING_OFF_SQ_RING);
        entries = mmap(NULL, PIECES * sizeof *entries, protection, flags, ring, IORING_OFF_SQES);
        if (rings == MAP_FAILED || entries == MAP_FAILED)
            fail("mmap");
    }
    unsigned *tail = (unsigned *)(rings + parameters.sq_off.tail), *order = (unsigned *)(rings + parameters.sq_off.array);
    unsigned *head = (unsigned *)(rings + parameters.cq_off.head);
    struct io_uring_cqe *done = (struct io_uring_cqe *)(rings + parameters.cq_off.cqes);
    unsigned first = *tail;
    for (unsigned n = 0; n < PIECES; n++) {
        struct io_uring_sqe *entry = &entries[(first + n) % parameters.sq_entries];
        *entry = (struct io_uring_sqe){.opcode = IORING_OP_WRITE, .fd = fd, .len = PIECE, .off = n * PIECE};
        entry->addr = (uintptr_t)(content + n * PIECE);
        order[(first + n) % parameters.sq_entries] = (first + n) % parameters.sq_entries;
    }
    __atomic_store_n(tail, first + PIECES, __ATOMIC_RELEASE);
    if (syscall(SYS_io_uring_enter, ring, PIECES, PIECES, IORING_ENTER_GETEVENTS, NULL, 0) != PIECES)
        fail("io_uring_enter");
    for (unsigned n = 0; n < PIECES; n++)
        if (done[(*head + n) % parameters.cq_entries].res != PIECE)
            fail("a write");
    __atomic_store_n(head, *head + PIECES, __ATOMIC_RELEASE);
}

static int is_current(const char *when, int fd, long round)
{
    static unsigned char found[LENGTH];
    long count = syscall(SYS_pread64, fd, found, LENGTH, 0L);
    long stale = 0, first = -1, last = -1;
    for (long at = 0; at < LENGTH; at++)
        if (found[at] != content[at]) {
            stale++;
            last = at;
            first = first < 0 ? at : first;
        }
    if (count == LENGTH && !stale)
        return 1;
    printf("round %ld, %s: %ld of %d bytes, %ld of them not what was written", round, when, count, LENGTH, stale);
    if (stale)
        printf(" (%ld to %ld, the first is %d)", first, last, found[first]);
    puts("");
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    const char *how = argv[1];
    void (*write_all)(int) = !strcmp(how, "libaio") ? by_libaio : !strcmp(how, "io_uring") ? by_io_uring : by_pwrite;
    path = argv[2];
    long rounds = atol(argv[3]);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0644), check = open(path, O_RDONLY);
    if (fd < 0 || check < 0)
        fail(path);
    by_pwrite(fd);
    pthread_t threads[READERS + 1];
    for (int n = 0; n <= READERS; n++)
        pthread_create(&threads[n], NULL, n < READERS ? read_on : look_on, NULL);
    int is_right = 1;
    for (long round = 1; round <= rounds && is_right; round++) {
        memset(content, (int)(round % 250) + 1, LENGTH);
        write_all(fd);
        is_right = is_current("at once", check, round);
    }
    is_over = 1;
    for (int n = 0; n <= READERS; n++)
        pthread_join(threads[n], NULL);
    return is_right && is_current("at the end", check, rounds) ? 0 : 1;
}
