/* The size of a file that another process appends to: once it has been opened, it is at least as long as what had been written when that
 * was looked up.
 *
 *     openings write FILE BOARD SECONDS    appends, and says on the board how many bytes its writes have returned for
 *     openings look FILE BOARD SECONDS     opens the file, looks at the board, and asks the kernel in ways that use the size it knows
 *
 * Exits with 1 and says so when the file was shorter. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <time.h>
#include <unistd.h>

/* Nothing of a file is posted for 100 ms after somebody has opened it. */
static const struct timespec between = {0, 110 * 1000 * 1000};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void fail(const char *what) {
    perror(what);
    exit(2);
}

static void write_until(const char *file, _Atomic uint64_t *board, double end) {
    char data[64];
    int out = open(file, O_WRONLY | O_CREAT, 0600);
    if (out < 0)
        fail("open");
    memset(data, 'd', sizeof data);
    while (now() < end) {
        if (write(out, data, sizeof data) != sizeof data)
            fail("write");
        *board += sizeof data;
    }
}

static uint64_t size_of(int in, uint64_t written, int way) {
    if (way) {
        int readable = 0;
        if (ioctl(in, FIONREAD, &readable) < 0)
            fail("FIONREAD");
        return (unsigned)readable;
    }
    int out = open("/dev/null", O_WRONLY);
    off_t at = written > 65536 ? written - 65536 : 0;
    for (ssize_t count; (count = sendfile(out, in, &at, 1 << 20)) > 0;)
        ;
    close(out);
    return at;
}

int main(int count, char **arguments) {
    if (count != 5)
        return 2;
    int shared = open(arguments[3], O_RDWR | O_CREAT, 0600);
    if (shared < 0 || ftruncate(shared, 4096) < 0)
        fail("board");
    _Atomic uint64_t *board = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
    if (board == MAP_FAILED)
        fail("mmap");
    double end = now() + atof(arguments[4]);
    if (!strcmp(arguments[1], "write")) {
        write_until(arguments[2], board, end);
        return 0;
    }
    for (int round = 0; now() < end; round++) {
        int in = open(arguments[2], O_RDONLY);
        if (in >= 0) {
            uint64_t written = *board, size = size_of(in, written, round % 2);
            if (size < written) {
                printf("by %s %lu bytes of %lu\n", round % 2 ? "FIONREAD" : "sendfile", size, written);
                return 1;
            }
            close(in);
        }
        nanosleep(&between, NULL);
    }
    return 0;
}
