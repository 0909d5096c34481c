/* Order of operations: what one process does in some order, nobody sees in another. It writes a number to file X, and then gives a sign
 * of the number in another way. A process that has seen the sign must find the number in X.
 *
 *   afterwards FOLDER SIGNS STATIC     gives SIGNS signs of each kind; STATIC is this program without the library. Prints "right", or
 *                                      what is wrong
 *
 * The watching process is this program with the words "watch FOLDER MEMORY SIGN GROWS". */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RECORD = 128, NUMBERS = 4096, ROW = 6 };

/* How the number is told. */
enum { OVERWRITTEN, APPENDED, LENGTHENED, RENAMED, CREATED, MADE, LINKED, MODE_SET, BY_ANOTHER, SIGNS };
static const char *const names[SIGNS] = {"a write", "an append", "a truncation", "a rename", "a new file", "a new directory", "a new link", "a mode",
                                         "another process's write"};

struct shared {
    _Atomic int over, watching, wrong;
    _Atomic long seen, zeros;
};

static struct shared *shared;
static const char *folder;

static void needed(int fine, int line, const char *what)
{
    if (fine)
        return;
    if (shared)
        atomic_store(&shared->wrong, 1);
    dprintf(2, "wrong: line %d: %s: %s\n", line, what, strerror(errno));
    _exit(1);
}

#define need(what) needed((what), __LINE__, #what)

static char *in_folder(const char *name, long number)
{
    static char rooms[4][4096];
    static int last;
    char *room = rooms[last = (last + 1) % 4];
    snprintf(room, sizeof rooms[0], number < 0 ? "%s/%s" : "%s/%s%ld", folder, name, number);
    return room;
}

static void make_record(uint64_t *record, long number)
{
    for (int n = 0; n < RECORD / 8; n++)
        record[n] = (uint64_t)number * 0x9e3779b97f4a7c15u + (uint64_t)n;
}

/* The greatest number of a name that begins so, or of its size or mode, that this process sees now. */
static long sign_seen(int sign, int y)
{
    struct stat found;
    long number = 0, most = 0;
    switch (sign) {
    case OVERWRITTEN:
    case BY_ANOTHER: need(pread(y, &number, sizeof number, 0) == sizeof number); return number;
    case APPENDED: need(!stat(in_folder("y", -1), &found)); return found.st_size / 8;
    case LENGTHENED: need(!fstat(y, &found)); return found.st_size;
    case MODE_SET: need(!stat(in_folder("y", -1), &found)); return found.st_mode & 0777;
    }
    DIR *directory = opendir(in_folder("names", -1));
    need(directory != NULL);
    for (struct dirent *entry; (entry = readdir(directory));)
        most = (number = strtol(entry->d_name, NULL, 10)) > most ? number : most;
    closedir(directory);
    return most;
}

static int has_number(int x, long number)
{
    uint64_t found[RECORD / 8], expected[RECORD / 8];
    make_record(expected, number);
    ssize_t count = pread(x, found, RECORD, number * RECORD);
    if (count == RECORD && !memcmp(found, expected, RECORD))
        return 1;
    fprintf(stderr, "%zd bytes, beginning with %lx\n", count, count > 0 ? found[0] : 0);
    return 0;
}

static int watch(int memory, int sign, int grows)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    need(shared != MAP_FAILED);
    int y = open(in_folder("y", -1), O_RDONLY | O_CLOEXEC), last = 0;
    need(y >= 0);
    atomic_store(&shared->watching, 1);
    while (!atomic_load(&shared->over)) {
        long number = sign_seen(sign, y);
        if (number <= last)
            continue;
        int x = open(in_folder("x", -1), O_RDONLY | O_CLOEXEC);
        need(x >= 0);
        if (!has_number(x, number)) {
            /* Of a file that grows, the kernel may show zeros in the place of what is appended (docs/semantics.md). */
            need(!posix_fadvise(x, 0, 0, POSIX_FADV_DONTNEED));
            int right = has_number(x, number);
            if (!right || !grows) {
                fprintf(stderr, "wrong: %s told number %ld, which is not in the file%s\n", names[sign], number, right ? ", but a little later" : "");
                atomic_store(&shared->wrong, 1);
                return 1;
            }
            atomic_fetch_add(&shared->zeros, 1);
        }
        need(!close(x));
        last = (int)number;
        atomic_fetch_add(&shared->seen, 1);
    }
    return 0;
}

static void give_sign(int sign, int y, long number, const int *pipes)
{
    char byte;
    switch (sign) {
    case OVERWRITTEN: need(pwrite(y, &number, sizeof number, 0) == sizeof number); return;
    case APPENDED: need(pwrite(y, &number, sizeof number, (number - 1) * 8) == sizeof number); return;
    case LENGTHENED: need(!ftruncate(y, number)); return;
    case RENAMED:
        need(!rename(in_folder("names/", number - 1), in_folder("names/", number)));
        return;
    case CREATED: {
        int fd = open(in_folder("names/", number), O_WRONLY | O_CREAT | O_EXCL, 0644);
        need(fd >= 0 && !close(fd));
        return;
    }
    case MADE: need(!mkdir(in_folder("names/", number), 0755)); return;
    case LINKED: need(!link(in_folder("y", -1), in_folder("names/", number))); return;
    case MODE_SET: need(!fchmod(y, (mode_t)number)); return;
    case BY_ANOTHER:
        need(write(pipes[1], &number, sizeof number) == sizeof number && read(pipes[2], &byte, 1) == 1);
    }
}

/* Writes what it is told, by a descriptor of its own. */
static void relay(int from, int to)
{
    int y = open(in_folder("y", -1), O_WRONLY | O_CLOEXEC);
    for (long number; read(from, &number, sizeof number) == sizeof number;)
        need(pwrite(y, &number, sizeof number, 0) == sizeof number && write(to, "x", 1) == 1);
    _exit(0);
}

static void remove_names(void)
{
    DIR *directory = opendir(in_folder("names", -1));
    need(directory != NULL);
    for (struct dirent *entry; (entry = readdir(directory));)
        if (entry->d_name[0] != '.')
            need(!unlinkat(dirfd(directory), entry->d_name, entry->d_type == DT_DIR ? AT_REMOVEDIR : 0));
    closedir(directory);
}

/* The same with one that watches; X is appended to, or has its length from the beginning. */
static void one(int sign, int grows, int memory, const char *program, int signs)
{
    char words[2][16];
    uint64_t record[RECORD / 8];
    int there[2], back[2], pipes[3] = {-1, -1, -1};
    atomic_store(&shared->over, 0);
    atomic_store(&shared->watching, 0);
    int y = open(in_folder("y", -1), O_RDWR | O_CREAT | O_TRUNC, 0644), x = open(in_folder("x", -1), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    long zero = 0;
    need(x >= 0 && y >= 0 && (sign == APPENDED || sign == LENGTHENED || pwrite(y, &zero, sizeof zero, 0) == sizeof zero));
    make_record(record, 0);
    need(write(x, record, RECORD) == RECORD && (grows || !ftruncate(x, (NUMBERS * ROW + 1L) * RECORD)));
    if (sign == MODE_SET)
        need(!fchmod(y, 0));
    if (sign == RENAMED) {
        int fd = open(in_folder("names/", 0), O_WRONLY | O_CREAT, 0644);
        need(fd >= 0 && !close(fd));
    }
    pid_t other = 0;
    if (sign == BY_ANOTHER) {
        need(!pipe2(there, O_CLOEXEC) && !pipe2(back, O_CLOEXEC));
        pipes[1] = there[1], pipes[2] = back[0];
        other = fork();
        if (other == 0) {
            close(there[1]);
            relay(there[0], back[1]);
        }
    }
    snprintf(words[0], sizeof words[0], "%d", memory);
    snprintf(words[1], sizeof words[1], "%d", sign);
    pid_t watcher = fork();
    need(watcher >= 0);
    if (watcher == 0) {
        execl(program, program, "watch", folder, words[0], words[1], grows ? "1" : "0", NULL);
        _exit(99);
    }
    while (!atomic_load(&shared->watching) && !atomic_load(&shared->wrong))
        sched_yield();
    /* A mode has no more numbers. */
    int most = sign == MODE_SET && signs > 0777 ? 0777 : signs < NUMBERS ? signs : NUMBERS;
    long next = 1;
    for (long number = 1; number <= most && !atomic_load(&shared->wrong); number++) {
        /* Some signs are of more than one. */
        for (int row = number % 8 ? 1 : ROW; row > 0; row--, next++) {
            make_record(record, next);
            need(pwrite(x, record, RECORD, next * RECORD) == RECORD);
        }
        give_sign(sign, y, number, pipes);
        if (number % 4 == 0)
            sched_yield();
    }
    atomic_store(&shared->over, 1);
    int status = 0;
    need(waitpid(watcher, &status, 0) == watcher);
    if (other) {
        close(there[0]), close(there[1]), close(back[0]), close(back[1]);
        need(waitpid(other, NULL, 0) == other);
    }
    if (status || atomic_load(&shared->wrong)) {
        dprintf(2, "wrong: by %s to %s, X %s: %x\n", names[sign], program, grows ? "grows" : "has its length", (unsigned)status);
        exit(1);
    }
    need(!close(x) && !close(y));
    remove_names();
}

int main(int count, char **words)
{
    folder = count > 2 ? words[count == 6 ? 2 : 1] : NULL;
    if (count == 6 && !strcmp(words[1], "watch"))
        return watch(atoi(words[3]), atoi(words[4]), atoi(words[5]));
    if (count != 4)
        return 2;
    int memory = memfd_create("shared", 0);
    need(memory >= 0 && !ftruncate(memory, sizeof *shared));
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    need(shared != MAP_FAILED && !mkdir(in_folder("names", -1), 0755));
    for (int sign = 0; sign < SIGNS; sign++)
        for (int how = 0; how < 4; how++)
            one(sign, how % 2, memory, words[how < 2 ? 3 : 0], atoi(words[2]));
    need(!rmdir(in_folder("names", -1)));
    printf("right: %ld signs seen, zeros %ld times\n", atomic_load(&shared->seen), atomic_load(&shared->zeros));
    return 0;
}
