/* ended DIRECTORY HOW ASKED: writes in a directory that may be posted; then one of the threads gives its rights away by a system call that the library does not see, and
 * the next request, which is of the directory ASKED, finds the library's session over, while another thread stands still in the middle of a call. What the kernel is asked for
 * right after that, as HOW says, has to be done with all that was written. Fails where it is not.
 *
 *   mmap sendfile copy left rwf setfl append
 *   store    maps "stored" and stores a byte, says so, and waits for a line */
#include <err.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "raw.h"

enum { PIECE = 1000, BEFORE = 20, AFTER = 40, SIZE = PIECE * (BEFORE + AFTER), ROOM = SIZE + PIECE };

#define WORKS(act) \
    do { \
        if (!(act)) \
            err(1, "%s, line %d", #act, __LINE__); \
    } while (0)
#define IS(found, wanted) \
    do { \
        long is = (found); \
        if (is != (wanted)) \
            errx(1, "%s is %ld and not %ld", #found, is, (long)(wanted)); \
    } while (0)

static int file, busy, stored;
static volatile int stands, has_changed;

/* Inside a call of the library, if it was in one. */
static void stand_still(int signal_number)
{
    (void)signal_number;
    stands = 1;
    for (;;)
        raw(SYS_pause, 0, 0, 0, 0, 0);
}

static void *sync_always(void *argument)
{
    for (;;) {
        WORKS(pwrite(busy, "busy", 4, 0) == 4);
        WORKS(fsync(busy) == 0);
    }
    return argument;
}

static void *become(void *argument)
{
    WORKS(raw(SYS_setresuid, 1000, 1000, 1000, 0, 0) == 0);
    has_changed = 1;
    for (;;)
        raw(SYS_pause, 0, 0, 0, 0, 0);
    return argument;
}

static long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void pause_until(long end_ms)
{
    while (now_ms() < end_ms)
        usleep(500);
}

static void append(int pieces)
{
    static char piece[PIECE];
    memset(piece, 'x', PIECE);
    while (pieces-- > 0)
        WORKS(write(file, piece, PIECE) == PIECE && pwrite(stored, piece, PIECE, 0) == PIECE);
}

static void has_at_end(const char *wanted)
{
    static char found[ROOM];
    long length = (long)strlen(wanted);
    IS(pread(file, found, ROOM, 0), SIZE + length);
    if (memcmp(found + SIZE, wanted, (size_t)length))
        errx(1, "%s is not at the end", wanted);
}

static long copied(int by_sendfile)
{
    int target = by_sendfile ? memfd_create("copy", 0) : open("copy", O_RDWR | O_CREAT, 0666);
    long sum = 0, count;
    off_t at = 0;
    WORKS(target >= 0);
    while ((count = by_sendfile ? sendfile(target, file, &at, ROOM) : copy_file_range(file, &at, target, NULL, ROOM, 0)) > 0)
        sum += count;
    WORKS(count == 0);
    return sum;
}

static void look(const char *how)
{
    struct iovec end = {"THE END", 7};
    int left;
    if (!strcmp(how, "mmap")) {
        volatile char *map = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, file, 0);
        WORKS(map != MAP_FAILED);
        IS(map[SIZE - 1], 'x');
    } else if (!strcmp(how, "sendfile") || !strcmp(how, "copy")) {
        IS(copied(!strcmp(how, "sendfile")), SIZE);
    } else if (!strcmp(how, "left")) {
        WORKS(lseek(file, 0, SEEK_SET) == 0 && ioctl(file, FIONREAD, &left) == 0);
        IS(left, SIZE);
    } else if (!strcmp(how, "rwf")) {
        IS(pwritev2(file, &end, 1, 0, RWF_APPEND), 7);
        has_at_end("THE END");
    } else if (!strcmp(how, "setfl") || !strcmp(how, "append")) {
        WORKS(!strcmp(how, "append") || fcntl(file, F_SETFL, O_APPEND) == 0);
        IS(write(file, "THE END", 7), 7);
        IS(lseek(file, 0, SEEK_CUR), SIZE + 7);
        has_at_end("THE END");
    } else if (!strcmp(how, "store")) {
        char *map = mmap(NULL, PIECE, PROT_READ | PROT_WRITE, MAP_SHARED, stored, 0);
        WORKS(map != MAP_FAILED);
        map[0] = 'N';
        puts("stored");
        fflush(stdout);
        getchar();
    } else {
        errx(1, "%s?", how);
    }
}

int main(int argc, char **argv)
{
    pthread_t syncing, becoming;
    char none[4096];
    WORKS(argc == 4 && chdir(argv[1]) == 0);
    const char *how = argv[2];
    snprintf(none, sizeof none, "%s/none", argv[3]);
    file = open("file", O_RDWR | O_CREAT | O_TRUNC | (strcmp(how, "append") ? 0 : O_APPEND), 0666);
    busy = open("busy", O_RDWR | O_CREAT, 0666);
    stored = open("stored", O_RDWR | O_CREAT, 0666);
    WORKS(file >= 0 && busy >= 0 && stored >= 0);
    append(BEFORE);
    signal(SIGUSR1, stand_still);
    WORKS(pthread_create(&syncing, NULL, sync_always, NULL) == 0);
    usleep(100000);
    WORKS(pthread_kill(syncing, SIGUSR1) == 0);
    while (!stands)
        usleep(1000);
    /* The service looks with a request when it has not looked for a second: with this one, and with the one after the change. */
    pause_until(now_ms() + 1100);
    unlink(none);
    long looked = now_ms();
    append(AFTER);
    WORKS(pthread_create(&becoming, NULL, become, NULL) == 0);
    while (!has_changed)
        usleep(1000);
    pause_until(looked + 1020);
    unlink(none);
    look(how);
    return 0;
}
