/* ends FILE SECONDS ASKING: the end of a file that grows never moves back. One process appends to the file and asks where it ends; another
 * overwrites its beginning all the time; when ASKING is 1, a third asks where it ends by system calls of its own. Each has a descriptor of
 * its own. Nobody may find an end before one that it knows of. Prints how often somebody did. */
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "raw.h"

enum { PIECE = 8192, LONGEST = 64 << 20 };

static const char *path;
static _Atomic long *end;
static _Atomic long *wrong;

static int opened(void)
{
    int descriptor = open(path, O_RDWR);
    if (descriptor < 0) {
        perror(path);
        exit(1);
    }
    return descriptor;
}

static void overwrite(void)
{
    char bytes[64] = {1};
    int descriptor = opened();
    while (pwrite(descriptor, bytes, sizeof bytes, 0) == sizeof bytes)
        ;
    exit(1);
}

static void ask_the_kernel(void)
{
    int descriptor = opened();
    for (;;) {
        long known = atomic_load(end);
        if (raw(SYS_lseek, descriptor, 0, SEEK_END, 0, 0) < known)
            atomic_fetch_add(&wrong[2], 1);
    }
}

static pid_t begun(void (*work)(void))
{
    pid_t child = fork();
    if (child == 0)
        work();
    return child;
}

int main(int count, char **arguments)
{
    static char piece[PIECE] = "piece";
    if (count != 4)
        return 2;
    int is_asking = atoi(arguments[3]);
    path = arguments[1];
    end = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    wrong = end + 1;
    int descriptor = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (descriptor < 0 || pwrite(descriptor, piece, PIECE, 0) != PIECE)
        return 1;
    pid_t children[] = {begun(overwrite), is_asking ? begun(ask_the_kernel) : 0};
    long size = PIECE;
    for (time_t stop = time(NULL) + atoi(arguments[2]); time(NULL) < stop && size < LONGEST;) {
        if (pwrite(descriptor, piece, PIECE, size) != PIECE)
            return 1;
        size += PIECE;
        atomic_store(end, size);
        if (lseek(descriptor, 0, SEEK_END) != size)
            atomic_fetch_add(&wrong[0], 1);
        if (raw(SYS_lseek, descriptor, 0, SEEK_END, 0, 0) != size)
            atomic_fetch_add(&wrong[1], 1);
        struct stat seen;
        if (fstat(descriptor, &seen) != 0 || seen.st_size != size)
            atomic_fetch_add(&wrong[3], 1);
    }
    for (int child = 0; child < 1 + is_asking; child++) {
        kill(children[child], SIGKILL);
        waitpid(children[child], NULL, 0);
    }
    printf("%ld %ld %ld %ld wrong\n", wrong[0], wrong[1], wrong[2], wrong[3]);
    if (size < 50 * PIECE)
        printf("only %ld bytes were written\n", size);
    return 0;
}
