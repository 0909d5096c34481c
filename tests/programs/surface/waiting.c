/* Readiness, asynchronous input and output, locks between processes. */
#include "surface.h"

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
    locks();
    return 0;
}
