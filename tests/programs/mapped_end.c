/* Maps what it has just written, up to its end, while others change the file's attributes: the kernel has to know the end by then.
 *
 *   change FILE STOP         changes the mode of FILE, until STOP is there
 *   map FILE STOP ROUNDS     makes FILE so often anew, writes it, maps it whole and reads the last byte; makes STOP at the end
 */
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PIECE_MAX = 4000, PIECES_MAX = 20, BYTE = 7 };

static sigjmp_buf bus_error;

static void on_bus_error(int number)
{
    (void)number;
    siglongjmp(bus_error, 1);
}

static void need(int truth, const char *what)
{
    if (!truth) {
        perror(what);
        exit(2);
    }
}

static int change(const char *file, const char *stop)
{
    while (access(stop, F_OK)) {
        /* It is not there at all times. */
        (void)chmod(file, 0600);
        (void)chmod(file, 0644);
    }
    return 0;
}

int main(int count, char **arguments)
{
    if (count == 4 && !strcmp(arguments[1], "change"))
        return change(arguments[2], arguments[3]);
    if (count != 5 || strcmp(arguments[1], "map"))
        return 2;
    const char *file = arguments[2];
    volatile int rounds = atoi(arguments[4]), cut = 0;
    struct sigaction action = {.sa_handler = on_bus_error, .sa_flags = SA_NODEFER};
    need(!sigaction(SIGBUS, &action, NULL), "sigaction");
    static char piece[PIECE_MAX];
    memset(piece, BYTE, sizeof piece);
    for (volatile int round = 0; round < rounds; round++) {
        int fd = open(file, O_RDWR | O_CREAT | O_TRUNC, 0644);
        need(fd >= 0, "open");
        off_t end = 0;
        for (int left = 3 + rand() % PIECES_MAX; left > 0; left--) {
            size_t length = 1 + (size_t)rand() % PIECE_MAX;
            need(pwrite(fd, piece, length, end) == (ssize_t)length, "pwrite");
            end += (off_t)length;
        }
        char *mapped = mmap(NULL, (size_t)end, PROT_READ, MAP_SHARED, fd, 0);
        need(mapped != MAP_FAILED, "mmap");
        if (sigsetjmp(bus_error, 1))
            cut++;
        else
            need(((volatile char *)mapped)[end - 1] == BYTE, "the last byte");
        need(!munmap(mapped, (size_t)end) && !close(fd), "munmap");
        if (round % 3 == 0)
            need(!unlink(file), "unlink");
    }
    int fd = open(arguments[3], O_CREAT | O_WRONLY, 0644);
    need(fd >= 0 && !close(fd), "stop");
    printf("%d of %d mappings ended too early\n", cut, rounds);
    return cut > 0;
}
