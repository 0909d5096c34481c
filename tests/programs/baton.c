/* Coherence at a hand-over: one process writes a file in runs of small writes, then another one, with or without the library, does one
 * thing with the file, and so on. Each begins when the other is done, and must find exactly what all have done so far.
 *
 *   baton FOLDER SEED ROUNDS STATIC     STATIC is this program without the library; prints "right ROUNDS", or what is wrong
 *
 * The others are this program with the words "other MEMORY SOCKET NUMBER". */
#include "raw.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { SIZE_MAX_BYTES = 300 << 10, ROOM = 1 << 20, PIECE_MAX = 4096, OTHERS = 2, ROUNDS_OF_A_FILE = 40, NOBODY = -1 };

/* What everybody knows: the file as it is to be, and whose turn it is. */
struct model {
    _Atomic int turn, over;
    char what;
    char path[4096], other_path[4096];
    int64_t size, offset, number, length;
    int appends, description;
    uint64_t mtime_ns, begun_ns, returned_ns, seed;
    unsigned char bytes[ROOM];
};

static struct model *model;
static const char *who = "writer";
static uint64_t dice;
static int given = -1, given_description, held = -1;

static uint64_t below(uint64_t limit)
{
    dice ^= dice << 13;
    dice ^= dice >> 7;
    dice ^= dice << 17;
    return (dice >> 11) % limit;
}

__attribute__((format(printf, 1, 2), noreturn)) static void wrong(const char *format, ...)
{
    char text[800];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (model)
        atomic_store(&model->over, 1);
    dprintf(2, "wrong (%s, '%c', seed %lu, write %ld, appends %d): %s\n", who, model ? model->what : '-', model ? model->seed : 0,
            model ? (long)model->number : 0, model ? model->appends : 0, text);
    _exit(1);
}

static void needed(int fine, int line, const char *what)
{
    if (!fine)
        wrong("line %d: %s: %s", line, what, strerror(errno));
}

#define need(what) needed((what), __LINE__, #what)

static uint64_t now_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t coarse_ns(void)
{
    return now_ns(CLOCK_REALTIME_COARSE);
}

/* Waits for a turn; nobody is late for long but on a machine that does something else. */
static void wait_for_turn(int mine)
{
    for (long spins = 0; atomic_load(&model->turn) != mine; spins++) {
        if (atomic_load(&model->over))
            _exit(mine == NOBODY);
        if (spins < 3000)
            sched_yield();
        else
            usleep(100);
    }
}

/* What the next write is of: bytes that say which it was. */
static unsigned char *piece(size_t *length)
{
    static unsigned char bytes[PIECE_MAX];
    int64_t number = ++model->number;
    *length = below(8) ? 128 + below(400) : 128 + below(PIECE_MAX - 127);
    for (size_t n = 0; n < *length; n++)
        bytes[n] = (unsigned char)((uint64_t)number * 0x9e3779b97f4a7c15u >> (n % 7 * 8)) ^ (unsigned char)(n / 64);
    model->begun_ns = coarse_ns();
    return bytes;
}

static void put(const unsigned char *bytes, size_t length, int64_t at)
{
    if (at > model->size)
        memset(model->bytes + model->size, 0, (size_t)(at - model->size));
    memcpy(model->bytes + at, bytes, length);
    model->size = at + (int64_t)length > model->size ? at + (int64_t)length : model->size;
}

static void resize(int64_t size)
{
    if (size > model->size)
        memset(model->bytes + model->size, 0, (size_t)(size - model->size));
    model->size = size;
}

/* By write(), on the description that all have. */
static void write_on(int fd, int bare)
{
    size_t length;
    unsigned char *bytes = piece(&length);
    long done = bare ? raw(SYS_write, fd, (long)bytes, (long)length, 0, 0) : write(fd, bytes, length);
    if (done != (long)length)
        wrong("write of %zu: %ld, %s", length, done, strerror(errno));
    int64_t at = model->appends ? model->size : model->offset;
    put(bytes, length, at);
    model->offset = at + (int64_t)length;
}

static void write_at(int fd)
{
    size_t length;
    unsigned char *bytes = piece(&length);
    /* At the end, across it, over what is there, and seldom beyond. */
    int64_t end = model->size, at = below(3) == 0 ? end : (int64_t)below((uint64_t)end + 1);
    at = below(30) == 0 ? end + (int64_t)below(9000) : at;
    need(pwrite(fd, bytes, length, at) == (ssize_t)length);
    /* Linux appends here, too. */
    put(bytes, length, model->appends ? end : at);
}

static void run_of_writes(int fd)
{
    int copy = below(15) == 0 ? dup(fd) : -1, way = (int)below(4);
    for (int count = 1 + (int)below(30); count-- > 0 && model->size < SIZE_MAX_BYTES;) {
        int to = copy >= 0 && count % 3 == 0 ? copy : fd;
        if (way < 2 || (way == 2 && count % 2))
            write_on(to, 0);
        else
            write_at(to);
    }
    if (copy >= 0)
        need(!close(copy));
    model->returned_ns = now_ns(CLOCK_REALTIME);
}

static void same(const unsigned char *found, int64_t size, const char *way)
{
    if (size != model->size)
        wrong("%s: %ld bytes instead of %ld", way, size, model->size);
    for (int64_t at = 0; at < size; at++)
        if (found[at] != model->bytes[at])
            wrong("%s: byte %ld of %ld is %x instead of %x", way, at, size, found[at], model->bytes[at]);
}

static unsigned char found_bytes[ROOM];

static void check_pread(int fd, int bare)
{
    long size = 0, part = 1;
    for (; part > 0; size += part) {
        long room = ROOM - size;
        part = bare ? raw(SYS_pread64, fd, (long)(found_bytes + size), room, size, 0) : pread(fd, found_bytes + size, (size_t)room, size);
        if (part < 0)
            wrong("pread at %ld: %ld", size, part);
    }
    same(found_bytes, size, bare ? "pread by a system call" : "pread");
}

static void check_sendfile(int fd)
{
    int memory = memfd_create("sent", MFD_CLOEXEC);
    off_t from = 0;
    for (ssize_t part; (part = sendfile(memory, fd, &from, ROOM)) != 0;)
        need(part > 0);
    need(pread(memory, found_bytes, ROOM, 0) == from);
    close(memory);
    same(found_bytes, from, "sendfile");
}

static void check_map(int fd)
{
    struct stat found;
    need(!fstat(fd, &found));
    if (found.st_size != model->size)
        wrong("fstat before a mapping: %ld instead of %ld", found.st_size, model->size);
    if (found.st_size == 0)
        return;
    void *mapped = mmap(NULL, (size_t)found.st_size, PROT_READ, below(2) ? MAP_SHARED : MAP_PRIVATE, fd, 0);
    need(mapped != MAP_FAILED);
    same(mapped, found.st_size, "mapping");
    munmap(mapped, (size_t)found.st_size);
}

static void check_attributes(const struct stat *found, const char *way)
{
    uint64_t mtime = (uint64_t)found->st_mtim.tv_sec * 1000000000u + (uint64_t)found->st_mtim.tv_nsec;
    if (found->st_size != model->size)
        wrong("%s: size %ld instead of %ld", way, found->st_size, model->size);
    if (mtime < model->mtime_ns || mtime < model->begun_ns)
        wrong("%s: changed at %lu, after %lu had been seen and a write was begun at %lu", way, mtime, model->mtime_ns, model->begun_ns);
    /* Whenever a write is done, its time is that of the call. */
    if (mtime > model->returned_ns)
        wrong("%s: changed at %lu, when all had returned at %lu", way, mtime, model->returned_ns);
    model->mtime_ns = mtime;
}

static void check_stat(void)
{
    struct stat found;
    need(!stat(model->path, &found));
    check_attributes(&found, "stat");
}

static void check_list(void)
{
    char directory[4096];
    snprintf(directory, sizeof directory, "%s", model->path);
    char *name = strrchr(directory, '/');
    *name++ = 0;
    DIR *listed = opendir(directory);
    need(listed != NULL);
    int is_there = 0;
    for (struct dirent *entry; (entry = readdir(listed));) {
        struct stat found;
        if (strcmp(entry->d_name, name))
            continue;
        need(!fstatat(dirfd(listed), name, &found, AT_SYMLINK_NOFOLLOW));
        check_attributes(&found, "readdir");
        is_there = 1;
    }
    closedir(listed);
    need(is_there);
}

static int opened(int flags)
{
    int fd = open(model->path, flags | O_CLOEXEC, 0644);
    need(fd >= 0);
    return fd;
}

#include "baton-turns.h"

/* One of the others: does what the writer wants, when it is its turn. */
static int other(int memory, int socket, int number)
{
    model = mmap(NULL, sizeof *model, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (model == MAP_FAILED)
        return 2;
    who = number ? "other with the library" : "other without";
    dice = model->seed * 1000003 + (uint64_t)number + 1;
    for (;;) {
        wait_for_turn(number);
        turn_of_other(model->what, socket);
        atomic_store(&model->turn, NOBODY);
    }
}

int main(int count, char **words)
{
    if (count == 5 && !strcmp(words[1], "other"))
        return other(atoi(words[2]), atoi(words[3]), atoi(words[4]));
    if (count == 4 && !strcmp(words[1], "heir"))
        return heir(atoi(words[2]), atoi(words[3]));
    if (count != 5)
        return 2;
    int memory = memfd_create("model", 0), sockets[OTHERS];
    need(memory >= 0 && !ftruncate(memory, sizeof *model));
    model = mmap(NULL, sizeof *model, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    need(model != MAP_FAILED);
    model->seed = strtoull(words[2], NULL, 0);
    dice = model->seed * 0x9e3779b97f4a7c15u + 1;
    atomic_store(&model->turn, NOBODY);
    for (int number = 0; number < OTHERS; number++) {
        int ends[2];
        char descriptor[16], socket[16], own[16];
        need(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends));
        sockets[number] = ends[0];
        snprintf(descriptor, sizeof descriptor, "%d", memory);
        snprintf(socket, sizeof socket, "%d", ends[1]);
        snprintf(own, sizeof own, "%d", number);
        pid_t child = fork();
        need(child >= 0);
        if (child == 0) {
            fcntl(ends[1], F_SETFD, 0);
            execl(number ? words[0] : words[4], words[0], "other", descriptor, socket, own, NULL);
            _exit(99);
        }
        close(ends[1]);
    }
    int rounds = atoi(words[3]);
    for (int round = 0; round < rounds; round += ROUNDS_OF_A_FILE)
        one_file(words[1], round, sockets, words[4], memory);
    atomic_store(&model->over, 1);
    for (int status, failed = 0; wait(&status) > 0 || (errno == EINTR);)
        if ((failed |= status))
            wrong("one of the others ended with %x", (unsigned)failed);
    printf("right %d rounds, %ld writes\n", rounds, (long)model->number);
    return 0;
}
