/* Readiness, asynchronous input and output, rings, locks between processes. */
#include "surface.h"
#include <linux/io_uring.h>

static int fresh(const char *name)
{
    int f = open(at(name), O_RDWR | O_CREAT | O_TRUNC, 0644);
    if (pwrite(f, "0123456789", 10, 0) != 10 || pwrite(f, "0123456789", 10, 0) != 10)
        abort();
    return f;
}

static void ready(void)
{
    int f = fresh("ready"), e, n, count;
    struct pollfd polled = {.fd = f, .events = POLLIN | POLLOUT};
    struct timespec now = {0, 0};
    struct timeval zero = {0, 0};
    fd_set in, out;
    FD_ZERO(&in);
    FD_ZERO(&out);
    FD_SET(f, &in);
    FD_SET(f, &out);
    SHOW(poll(&polled, 1, 0) + polled.revents * 100);
    SHOW(ppoll(&polled, 1, &now, NULL) + polled.revents * 100);
    SHOW(select(f + 1, &in, &out, NULL, &zero));
    SHOW(pselect(f + 1, &in, &out, NULL, &now, NULL));
    SHOW_OPEN(e, epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event event = {.events = EPOLLIN};
    /* FUSE's files can be waited for (docs/semantics.md), and are always ready. */
    SHOW(epoll_ctl(e, EPOLL_CTL_ADD, f, &event) == 0 ? epoll_wait(e, &event, 1, 0) : errno == EPERM);
    SHOW_OPEN(n, inotify_init1(IN_NONBLOCK));
    SHOW(inotify_add_watch(n, at("ready"), IN_OPEN) > 0);
    SHOW(inotify_add_watch(n, at("none"), IN_OPEN));
    SHOW(ioctl(f, FIONREAD, &count) + count);
    SHOW(ioctl(f, TIOCGWINSZ, &count));
    SHOW(isatty(f));
    SHOW(errno);
    SHOW(ttyname(f) == NULL);
    SHOW(fcntl(f, F_SETFL, O_APPEND | O_NONBLOCK) + fcntl(f, F_GETFL) % 65536);
    SHOW(pwrite(f, "appended", 8, 0) + lseek(f, 0, SEEK_END));
    SHOW(fcntl(f, F_SETFL, 0) + pwrite(f, "again", 5, 0));
    SHOW(close(f) + close(e) + close(n));
    SHOW_CONTENT(at("ready"));
}

static void asynchronous(void)
{
    int f = fresh("aio");
    char text[16] = {0};
    struct aiocb block = {.aio_fildes = f, .aio_buf = (char[]){"asynchronous"}, .aio_nbytes = 12, .aio_offset = 3};
    struct aiocb other = {.aio_fildes = f, .aio_buf = text, .aio_nbytes = 8, .aio_offset = 2, .aio_lio_opcode = LIO_READ};
    const struct aiocb *one[] = {&block};
    struct aiocb *list[] = {&other};
    SHOW(aio_write(&block) + aio_suspend(one, 1, NULL) + aio_error(&block));
    SHOW(aio_return(&block));
    SHOW(lio_listio(LIO_WAIT, list, 1, NULL) + aio_error(&other));
    SHOW(aio_return(&other) + memcmp(text, "2asynchr", 8));
    SHOW(aio_read(&other) + aio_suspend((const struct aiocb *const *)list, 1, NULL));
    SHOW(aio_return(&other));
    SHOW(aio_fsync(O_SYNC, &block) + aio_suspend(one, 1, NULL) + aio_error(&block));
    SHOW(aio_return(&block) + (aio_cancel(f, NULL) == AIO_ALLDONE));
    aio_context_t context = 0;
    struct io_event events[2];
    char bytes[16] = "by the kernel";
    struct iocb request = {.aio_lio_opcode = IOCB_CMD_PWRITE, .aio_fildes = (unsigned)f, .aio_buf = (uintptr_t)bytes, .aio_nbytes = 13, .aio_offset = 20};
    struct iocb *requests[] = {&request};
    SHOW(syscall(SYS_io_setup, 4, &context));
    SHOW(syscall(SYS_io_submit, context, 1, requests));
    SHOW(syscall(SYS_io_getevents, context, 1, 2, events, NULL));
    SHOW(events[0].res);
    request.aio_lio_opcode = IOCB_CMD_PREAD;
    request.aio_offset = 0;
    SHOW(syscall(SYS_io_submit, context, 1, requests));
    SHOW(syscall(SYS_io_pgetevents, context, 1, 2, events, NULL, NULL));
    SHOW(events[0].res + memcmp(bytes, "012asynchrono", 13));
    SHOW(syscall(SYS_io_cancel, context, &request, events));
    SHOW(syscall(SYS_io_destroy, context));
    SHOW(pread(f, text, 10, 20) + memcmp(text, "by the ker", 10));
    SHOW(close(f));
    SHOW_CONTENT(at("aio"));
}

/* Whether another process may lock: it has the environment of the other way, when there is one. */
static int other_may(const char *kind)
{
    char command[2 * PATH_MAX];
    const char *prefix = getenv("SURFACE_OTHER");
    snprintf(command, sizeof command, "%s %s %s %s", prefix ? prefix : "", getenv("SURFACE_SELF"), base, kind);
    fflush(stdout);
    int status = system(command);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int try(const char *kind)
{
    int f = open(at("locked"), O_RDWR);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 10, .l_len = 5};
    int result = -1;
    if (strcmp(kind, "posix") == 0)
        result = fcntl(f, F_SETLK, &lock);
    else if (strcmp(kind, "ofd") == 0)
        result = fcntl(f, F_OFD_SETLK, &lock);
    else if (strcmp(kind, "bsd") == 0)
        result = flock(f, LOCK_EX | LOCK_NB);
    else if (strcmp(kind, "lockf") == 0)
        result = lseek(f, 10, SEEK_SET) == 10 ? lockf(f, F_TLOCK, 5) : -2;
    return result == 0 ? 100 : errno;
}

static void locks(void)
{
    int f = fresh("locked"), g;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 12, .l_len = 1}, asked = lock;
    SHOW(other_may("posix"));
    SHOW(fcntl(f, F_SETLK, &lock));
    SHOW(other_may("posix"));
    SHOW(other_may("lockf"));
    SHOW(other_may("bsd"));
    SHOW(fcntl(f, F_GETLK, &asked) + (asked.l_type == F_UNLCK));
    /* Any close of the file by this process lets go of its POSIX locks. */
    SHOW_OPEN(g, open(at("locked"), O_RDONLY));
    SHOW(pread(g, &(char[4]){0}, 4, 0) + close(g));
    SHOW(other_may("posix"));
    SHOW(fcntl(f, F_OFD_SETLK, &lock));
    SHOW_OPEN(g, open(at("locked"), O_RDWR));
    SHOW(fcntl(g, F_OFD_SETLK, &lock));
    SHOW(other_may("ofd"));
    SHOW(close(g) + (other_may("posix") == EAGAIN));
    lock.l_type = F_UNLCK;
    SHOW(fcntl(f, F_OFD_SETLK, &lock));
    SHOW(other_may("ofd"));
    SHOW(flock(f, LOCK_SH));
    SHOW(other_may("bsd"));
    SHOW(flock(f, LOCK_UN));
    SHOW(other_may("bsd"));
    SHOW(lseek(f, 10, SEEK_SET) + lockf(f, F_LOCK, 5));
    SHOW(other_may("lockf"));
    SHOW(lockf64(f, F_ULOCK, 5));
    SHOW(other_may("lockf"));
    SHOW(fcntl(f, F_GETLEASE));
    SHOW(pread(f, &(char[4]){0}, 4, 0) + close(f));
}

/* One operation by io_uring, and what it returned. An `offset` of -1 is the descriptor's own. */
static long by_ring(int operation, int f, void *buffer, unsigned length, long offset)
{
    static struct io_uring_params parameters;
    static struct io_uring_sqe *entry;
    static char *rings;
    static int ring = -1;
    if (ring < 0) {
        if ((ring = (int)syscall(SYS_io_uring_setup, 1, &parameters)) < 0)
            return -errno;
        size_t length = parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned);
        size_t other = parameters.cq_off.cqes + parameters.cq_entries * sizeof(struct io_uring_cqe);
        rings = mmap(NULL, length > other ? length : other, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
        entry = mmap(NULL, sizeof *entry, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
        if (rings == MAP_FAILED || entry == MAP_FAILED)
            abort();
    }
    unsigned *tail = (unsigned *)(rings + parameters.sq_off.tail), *head = (unsigned *)(rings + parameters.cq_off.head);
    *entry = (struct io_uring_sqe){.opcode = operation, .fd = f, .addr = (uintptr_t)buffer, .len = length, .off = offset};
    *(unsigned *)(rings + parameters.sq_off.array) = 0;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) != 1)
        abort();
    struct io_uring_cqe *done = (struct io_uring_cqe *)(rings + parameters.cq_off.cqes);
    int result = done[*head % parameters.cq_entries].res;
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return result;
}

/* By a ring, of a file whose content came by libc and by the ring. */
static void rings(void)
{
    static char text[64 << 10], found[1 << 20];
    memset(text, 'x', sizeof text);
    int f = open(at("rings"), O_RDWR | O_CREAT | O_TRUNC, 0644), a;
    SHOW(write(f, "by libc, ", 9) + by_ring(IORING_OP_WRITE, f, "by a ring, ", 11, -1));
    SHOW(lseek(f, 0, SEEK_CUR));
    SHOW(by_ring(IORING_OP_READ, f, found, sizeof found, 0));
    SHOW(memcmp(found, "by libc, by a ring, ", 21));
    SHOW(lseek(f, 3, SEEK_SET) + by_ring(IORING_OP_READ, f, found, 5, -1) + by_ring(IORING_OP_READ, f, found, 5, -1));
    SHOW(memcmp(found, " by a", 5) + lseek(f, 0, SEEK_CUR));
    SHOW(by_ring(IORING_OP_READ, f, found, sizeof found, -1) + by_ring(IORING_OP_READ, f, found, sizeof found, -1));
    /* Over the ends of pages, and many of them. */
    SHOW_OPEN(a, open(at("rings"), O_RDWR | O_APPEND));
    SHOW(by_ring(IORING_OP_WRITE, a, text, sizeof text, 0) + write(a, "mid", 3) + by_ring(IORING_OP_WRITE, a, "end", 3, -1));
    SHOW(by_ring(IORING_OP_READ, f, found, sizeof found, 0));
    SHOW(memcmp(found + 20, text, sizeof text) + memcmp(found + 20 + sizeof text, "midend", 7));
    SHOW(by_ring(IORING_OP_READ, f, found, sizeof found, 4096) + by_ring(IORING_OP_READ, f, found, 10, sizeof text + 23));
    /* No more than there is: docs/semantics.md, "Reads by a ring of a descriptor that appends". */
    SHOW(by_ring(IORING_OP_READ, a, found, 20, 0) + by_ring(IORING_OP_READ, a, found + 20, 3, sizeof text + 20));
    SHOW(memcmp(found, "by libc, by a ring, mid", 23));
    SHOW(close(f) + close(a) + unlink(at("rings")));
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return 2;
    base = argv[1];
    if (argc == 3)
        return try(argv[2]);
    umask(022);
    setenv("SURFACE_SELF", argv[0], 1);
    ready();
    asynchronous();
    rings();
    locks();
    return 0;
}
