/* Small reads of files by several threads, repeated while descriptors are closed and their numbers get other files, while children are
 * forked (also by a signal handler that has interrupted a read), and while another process writes the same content.
 *
 *   glances make FOLDER
 *   glances read FOLDER SECONDS      prints "right READS", or what is wrong
 *   glances write FOLDER SECONDS */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Descriptors of the first files stay open, and are more than a session has places for: the first ones and those after PLACES of them
 * have the same places, and SHARED of these are read most. */
enum { FILES = 150, KEPT = 140, CHANGED = 10, PLACES = 128, SHARED = 8, WORDS = 8192, PIECE = 160, READERS = 3, CHILD_READS = 50 };

static struct {
    int fd, file;
    pthread_rwlock_t lock;
} open_files[KEPT + CHANGED];

static const char *folder;
static _Atomic long reads;
static _Atomic int over;
static volatile sig_atomic_t in_child;

static void must(int done, const char *what)
{
    if (!done) {
        perror(what);
        fflush(stdout);
        _exit(1);
    }
}

/* Behind the words are zeros, as far as makes a file worth knowing of its closings. */
static const off_t LENGTH = 2 << 20;

static uint64_t word_of(int file, long at)
{
    return at >= WORDS ? 0 : ((uint64_t)file << 32 | (uint64_t)at) * 0x9e3779b97f4a7c15u + 1;
}

static uint64_t next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

static int open_file(int file, int flags)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%d", folder, file);
    int fd = open(path, flags, 0600);
    must(fd >= 0, path);
    return fd;
}

/* Whether what is read somewhere in a file is what stands there. */
static int is_right(int fd, int file, uint64_t *state)
{
    uint64_t words[PIECE] = {0};
    long at = (long)(next(state) % WORDS), count = 1 + (long)(next(state) % PIECE);
    ssize_t length = count * (ssize_t)sizeof *words, got = pread(fd, words, (size_t)length, at * (long)sizeof *words);
    if (got != length) {
        printf("file %d at %ld: %zd bytes of %zd, %s\n", file, at, got, length, strerror(errno));
        return 0;
    }
    for (long n = 0; n < count; n++) {
        if (words[n] != word_of(file, at + n)) {
            printf("file %d at %ld: %lx\n", file, at + n, (long)words[n]);
            return 0;
        }
    }
    atomic_fetch_add_explicit(&reads, 1, memory_order_relaxed);
    return 1;
}

static void end_in_child(int right)
{
    if (in_child) {
        fflush(stdout);
        _exit(!right);
    }
}

/* The first one, which is interrupted, takes no locks: in the child nobody would give them back. It reads files whose places nobody
 * takes, so that it seldom waits. */
static void *reader(void *argument)
{
    uint64_t state = 88172645463325252u + (uint64_t)(intptr_t)argument;
    while (!atomic_load_explicit(&over, memory_order_relaxed)) {
        int slot = (int)(next(&state) % (KEPT + CHANGED));
        if (!argument)
            slot = PLACES / 2 + slot % SHARED;
        else if (next(&state) % 8)
            slot = slot % SHARED + (slot & 64 ? PLACES : 0);
        if (argument)
            pthread_rwlock_rdlock(&open_files[slot].lock);
        /* Some of them one after the other, for which a segment is worth its while. */
        for (int n = 0; n < 100; n++) {
            int right = is_right(open_files[slot].fd, open_files[slot].file, &state);
            end_in_child(right);
            must(right, "a read");
        }
        if (argument)
            pthread_rwlock_unlock(&open_files[slot].lock);
    }
    return NULL;
}

static void *changer(void *argument)
{
    uint64_t state = 1234567;
    (void)argument;
    while (!atomic_load(&over)) {
        int slot = KEPT + (int)(next(&state) % CHANGED), file = (int)(next(&state) % FILES);
        pthread_rwlock_wrlock(&open_files[slot].lock);
        must(close(open_files[slot].fd) == 0, "close");
        open_files[slot].fd = open_file(file, O_RDONLY);
        open_files[slot].file = file;
        pthread_rwlock_unlock(&open_files[slot].lock);
        usleep(2000);
    }
    return NULL;
}

static void ended_well(pid_t child)
{
    int status;
    must(waitpid(child, &status, 0) == child, "waitpid");
    must(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child");
}

static void fork_in_handler(int signal)
{
    (void)signal;
    int before = errno;
    pid_t child = fork();
    must(child >= 0, "fork");
    if (child)
        ended_well(child);
    else
        in_child = 1;
    errno = before;
}

static void read_all(double seconds)
{
    pthread_t threads[READERS + 1];
    uint64_t state = 7654321;
    for (int slot = 0; slot < KEPT + CHANGED; slot++) {
        open_files[slot].file = slot;
        open_files[slot].fd = open_file(slot, O_RDONLY);
        pthread_rwlock_init(&open_files[slot].lock, NULL);
        /* Their places are given in this order. */
        for (int n = 0; n < 4; n++)
            must(is_right(open_files[slot].fd, slot, &state), "a read");
    }
    must(signal(SIGUSR1, fork_in_handler) != SIG_ERR, "signal");
    for (long n = 0; n < READERS; n++)
        must(pthread_create(&threads[n], NULL, reader, (void *)(intptr_t)n) == 0, "pthread_create");
    must(pthread_create(&threads[READERS], NULL, changer, NULL) == 0, "pthread_create");
    for (time_t end = time(NULL) + (time_t)seconds; time(NULL) < end;) {
        usleep(5000);
        must(pthread_kill(threads[0], SIGUSR1) == 0, "pthread_kill");
        pid_t child = fork();
        must(child >= 0, "fork");
        if (!child) {
            for (int n = 0; n < CHILD_READS; n++) {
                int slot = (int)(next(&state) % 8);
                if (!is_right(open_files[slot].fd, open_files[slot].file, &state)) {
                    fflush(stdout);
                    _exit(1);
                }
            }
            _exit(0);
        }
        ended_well(child);
    }
    atomic_store(&over, 1);
    for (int n = 0; n <= READERS; n++)
        pthread_join(threads[n], NULL);
    printf("right %ld\n", atomic_load(&reads));
}

static void write_all(double seconds)
{
    uint64_t state = 24681357;
    for (time_t end = time(NULL) + (time_t)seconds; time(NULL) < end;) {
        int file = (int)(next(&state) % FILES), fd = open_file(file, O_WRONLY);
        for (int n = 0; n < 50; n++) {
            long at = (long)(next(&state) % WORDS);
            uint64_t word = word_of(file, at);
            must(pwrite(fd, &word, sizeof word, at * (long)sizeof word) == sizeof word, "pwrite");
        }
        must(close(fd) == 0, "close");
    }
}

static void make_all(void)
{
    static uint64_t words[WORDS];
    for (int file = 0; file < FILES; file++) {
        for (long at = 0; at < WORDS; at++)
            words[at] = word_of(file, at);
        int fd = open_file(file, O_WRONLY | O_CREAT);
        must(write(fd, words, sizeof words) == sizeof words && ftruncate(fd, LENGTH) == 0, "write");
        must(close(fd) == 0, "close");
    }
}

int main(int count, char **arguments)
{
    must(count >= 3, "arguments");
    folder = arguments[2];
    if (!strcmp(arguments[1], "make"))
        make_all();
    else if (!strcmp(arguments[1], "read"))
        read_all(atof(arguments[3]));
    else
        write_all(atof(arguments[3]));
    return 0;
}
