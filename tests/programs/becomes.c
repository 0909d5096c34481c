/* becomes DIRECTORY: gives away its rights by system calls that the library does not see, and goes on working in the directory until the
 * library's session is another one, or none, and for a while after that. Nothing may fail. Prints how many bytes were appended to "log". */
#include <err.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "raw.h"

enum { OF_LIBRARY = 500, OF_LIBRARY_END = 600, ROUNDS = 100, LONG = 20000 };

#define WORKS(act) \
    do { \
        if (!(act)) \
            err(1, "%s, line %d", #act, __LINE__); \
    } while (0)

static int log_file, long_file;
static off_t written;

/* Whether the library has a socket; `cookie` is that of the one it has, by which it differs from all others. */
static int session(uint64_t *cookie)
{
    for (int number = OF_LIBRARY; number < OF_LIBRARY_END; number++) {
        socklen_t length = sizeof *cookie;
        if (raw(SYS_getsockopt, number, SOL_SOCKET, SO_COOKIE, (long)cookie, (long)&length) == 0)
            return 1;
    }
    return 0;
}

static void step(void)
{
    static char content[LONG], found[LONG];
    struct stat status;
    char record[18];
    snprintf(record, sizeof record, "record %09ld\n", (long)written);
    WORKS(write(log_file, record, 17) == 17);
    written += 17;
    memset(content, 'a' + (int)(written % 26), LONG);
    WORKS(pwrite(long_file, content, LONG, written) == LONG);
    WORKS(pread(long_file, found, LONG, written) == LONG && memcmp(content, found, LONG) == 0);
    WORKS(mkdir("directory", 0777) == 0);
    WORKS(rmdir("directory") == 0);
    int other = open("other", O_RDWR | O_CREAT | O_EXCL, 0666);
    WORKS(other >= 0);
    WORKS(pwrite(other, "content", 7, 0) == 7 && pread(other, found, 9, 0) == 7);
    WORKS(close(other) == 0);
    WORKS(rename("other", "renamed") == 0);
    WORKS(stat("renamed", &status) == 0 && status.st_size == 7);
    WORKS(unlink("renamed") == 0);
}

int main(int argc, char **argv)
{
    uint64_t before, now;
    struct stat status;
    WORKS(argc == 2 && chdir(argv[1]) == 0);
    log_file = open("log", O_RDWR | O_CREAT | O_APPEND, 0666);
    long_file = open("long", O_RDWR | O_CREAT, 0666);
    WORKS(log_file >= 0 && long_file >= 0);
    for (int round = 0; round < ROUNDS; round++)
        step();
    if (!session(&before))
        errx(1, "the library has no session");
    WORKS(raw(SYS_setgroups, 0, 0, 0, 0, 0) == 0);
    WORKS(raw(SYS_setresgid, 1000, 1000, 1000, 0, 0) == 0);
    WORKS(raw(SYS_setresuid, 1000, 1000, 1000, 0, 0) == 0);
    while (session(&now) && now == before)
        step();
    for (int round = 0; round < ROUNDS; round++)
        step();
    WORKS(fstat(log_file, &status) == 0 && status.st_size == written);
    printf("%ld\n", (long)written);
    return 0;
}
