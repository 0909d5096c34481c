/* closings X Y: descriptors that are closed or replaced without the library's knowledge. X and Y are files of 2 MiB, of nothing but 'X'
 * and 'Y'. Reads X until that takes no system call, then makes the number stand for Y, or for nothing, in ways that the library does not
 * see, and reads again. Prints what went wrong. */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "raw.h"

static const char *path_x, *path_y;
static int failures;

static int raw_open(const char *path)
{
    return (int)raw(SYS_openat, AT_FDCWD, (long)path, O_RDONLY, 0, 0);
}

/* The byte the file is made of; or the error, as a negative number. */
static int look(int descriptor, off_t offset)
{
    char buffer[4096];
    ssize_t got = pread(descriptor, buffer, sizeof buffer, offset);
    if (got != sizeof buffer)
        return got < 0 ? -errno : -1000;
    return buffer[0] == buffer[4095] ? buffer[0] : -1001;
}

static void warm(int descriptor)
{
    for (int block = 0; block < 512; block++)
        look(descriptor, 4096 * block);
}

static void expect(const char *way, int descriptor, int byte)
{
    for (int round = 0; round < 50; round++) {
        int found = look(descriptor, 4096 * (round % 7));
        if (found != byte) {
            printf("%s: %d instead of %d in round %d\n", way, found, byte, round);
            failures++;
            return;
        }
    }
}

/* X, by a new descriptor that is read without system calls. */
static int fresh(void)
{
    int descriptor = open(path_x, O_RDONLY);
    warm(descriptor);
    expect("fresh", descriptor, 'X');
    return descriptor;
}

static void replace_by(const char *way, int number, int got)
{
    if (got != number)
        printf("%s: got %d, not %d\n", way, got, number), failures++;
    expect(way, number, 'Y');
    raw(SYS_close, number, 0, 0, 0, 0);
    expect(way, number, -EBADF);
}

static int in_child(void *number)
{
    raw(SYS_close, (long)number, 0, 0, 0, 0);
    return raw_open(path_y) != (long)number;
}

static int ring_close(int number)
{
    struct io_uring_params parameters = { 0 };
    int ring = (int)syscall(SYS_io_uring_setup, 2, &parameters);
    if (ring < 0)
        return -1;
    char *queue = mmap(NULL, parameters.sq_off.array + 2 * sizeof(unsigned), PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *entries = mmap(NULL, 2 * sizeof *entries, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
    memset(entries, 0, sizeof *entries);
    entries->opcode = IORING_OP_CLOSE;
    entries->fd = number;
    *(unsigned *)(queue + parameters.sq_off.array) = 0;
    __atomic_store_n((unsigned *)(queue + parameters.sq_off.tail), 1, __ATOMIC_RELEASE);
    long entered = syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0);
    close(ring);
    return entered == 1 ? 0 : -1;
}

static volatile int current, stop;

/* What is read of a number while it changes: X, Y, or nothing. After a change is over only what it brought. */
static void *swap(void *none)
{
    while (!stop) {
        int other = raw_open(path_y);
        raw(SYS_dup2, other, current, 0, 0, 0);
        raw(SYS_close, other, 0, 0, 0, 0);
        expect("swapped to Y", current, 'Y');
        other = raw_open(path_x);
        raw(SYS_dup2, other, current, 0, 0, 0);
        raw(SYS_close, other, 0, 0, 0, 0);
        expect("swapped to X", current, 'X');
    }
    return none;
}

static void without_system_calls(void)
{
    int number = fresh();
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_statx, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fcntl, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = { sizeof code / sizeof *code, code };
    raw(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    raw(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, (long)&program, 0, 0);
    expect("without looks", number, 'X');
    char a[100], b[5000];
    struct iovec pieces[] = { { a, sizeof a }, { b, sizeof b } };
    for (int round = 0; round < 50; round++)
        if (preadv(number, pieces, 2, 1000) != 5100 || a[0] != 'X' || b[4999] != 'X')
            printf("preadv\n"), failures++;
    for (int round = 0; round < 50; round++)
        if (read(number, b, sizeof b) != sizeof b || b[0] != 'X' || raw(SYS_lseek, number, 0, SEEK_CUR, 0, 0) != 5000 * (round + 1))
            printf("read\n"), failures++;
    if (pread(number, b, sizeof b, (2 << 20) - 10) != 10 || pread(number, b, sizeof b, 2 << 20) != 0)
        printf("end of file\n"), failures++;
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    path_x = arguments[1];
    path_y = arguments[2];
    setvbuf(stdout, NULL, _IOLBF, 0);
    int status = 0, child = fork();
    if (child == 0) {
        without_system_calls();
        _exit(failures != 0);
    }
    if (waitpid(child, &status, 0) != child || status != 0)
        printf("without system calls: %x\n", status), failures++;

    int number = fresh();
    raw(SYS_close, number, 0, 0, 0, 0);
    expect("raw close", number, -EBADF);

    number = fresh();
    raw(SYS_close, number, 0, 0, 0, 0);
    replace_by("raw close and open", number, raw_open(path_y));

    number = fresh();
    syscall(SYS_close, number);
    replace_by("syscall close and open", number, (int)syscall(SYS_openat, AT_FDCWD, path_y, O_RDONLY));

    number = fresh();
    int other = raw_open(path_y);
    replace_by("raw dup2", number, (int)raw(SYS_dup2, other, number, 0, 0, 0));
    number = fresh();
    replace_by("raw dup3", number, (int)raw(SYS_dup3, other, number, O_CLOEXEC, 0, 0));
    close(other);

    number = fresh();
    raw(SYS_close_range, number, number, 0, 0, 0);
    replace_by("raw close_range", number, raw_open(path_y));

    number = fresh();
    fclose(fdopen(number, "r"));
    replace_by("fclose", number, raw_open(path_y));

    number = fresh();
    FILE *stream = freopen(path_y, "r", fdopen(number, "r"));
    expect("freopen", fileno(stream), 'Y');
    fclose(stream);
    expect("freopen, fclose", number, -EBADF);

    number = fresh();
    static char stack[65536] __attribute__((aligned(16)));
    child = (int)raw(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0);
    if (child == 0)
        raw(SYS_exit_group, in_child((void *)(long)number), 0, 0, 0, 0);
    while (waitpid(child, &status, 0) < 0)
        ;
    replace_by("a child with the same descriptors", number, status == 0 ? number : -1);

    number = fresh();
    child = clone(in_child, stack + sizeof stack, CLONE_VM | CLONE_FILES | SIGCHLD, (void *)(long)number);
    while (waitpid(child, &status, 0) < 0)
        ;
    replace_by("a child with the same descriptors and memory", number, status == 0 ? number : -1);

    number = fresh();
    if (ring_close(number) == 0)
        replace_by("io_uring", number, raw_open(path_y));

    /* A duplicate that is closed changes nothing. */
    number = fresh();
    int second = (int)raw(SYS_dup, number, 0, 0, 0, 0);
    warm(second);
    raw(SYS_close, number, 0, 0, 0, 0);
    expect("the other of two", second, 'X');
    expect("the one of two", number, -EBADF);

    current = second;
    pthread_t threads[1];
    pthread_create(threads, NULL, swap, NULL);
    for (int round = 0; round < 300000; round++) {
        int found = look(current, 4096 * (round % 7));
        if (found != 'X' && found != 'Y' && found != -1001) {
            printf("while it is swapped: %d\n", found);
            failures++;
            break;
        }
    }
    stop = 1;
    pthread_join(threads[0], NULL);
    close(current);
    printf(failures ? "failed\n" : "right\n");
    return failures != 0;
}
