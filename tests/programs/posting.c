/* Many small writes to files that others look at: every write that has returned is visible to all, complete, in order and once,
 * whoever looks, and whatever becomes of the writer.
 *
 *   posting storm FOLDER BOARD SECONDS SEED PROGRAM STATIC ["lying"]   all of it; PROGRAM runs by the library, STATIC by the kernel
 *   posting check FOLDER BOARD                                         what the last of it has left, when nobody writes any more
 *
 * and as parts of it
 *
 *   posting write FOLDER BOARD SEED INDEX LIES      writes file after file
 *   posting look FOLDER BOARD SEED PART             looks at them, and is a guest of some
 *
 * Says "right" and what was done, or what is wrong on standard error. All of it is true of any correct filesystem. */
#include "posting.h"
#include "posting-looks.h"
#include "posting-writes.h"

static void visit(int index, int part)
{
    char path[4096];
    struct file *file = &board->files[index];
    if (atomic_load(&file->kind) != APPENDED || atomic_load(&file->is_over) || atomic_load(&file->parts[WRITER].bytes) > LOG_MAX)
        return;
    int fd = open(path_of(path, index), O_WRONLY | O_APPEND | O_CLOEXEC);
    need(fd >= 0);
    be_guest(index, fd, part, 0, 1 + (int)below(8));
    need(!close(fd));
}

static void look(int part)
{
    while (!atomic_load(&board->stop)) {
        int all = atomic_load(&board->next_file), index;
        all = all < FILES ? all : FILES;
        if (all == 0)
            continue;
        index = below(4) ? all - 1 - (int)below(all < 3 ? (uint64_t)all : 3) : (int)below((uint64_t)all);
        if (atomic_load(&board->files[index].kind) == NOTHING) {
            sched_yield();
            continue;
        }
        uint64_t what = below(20);
        if (!atomic_load(&board->is_crowded))
            look_at_stopped(index);
        else if (what == 0)
            visit(index, part);
        else if (what < 6)
            look_at_stopped(index);
        else
            look_at(index, (int)below(LOOKS));
    }
}

static const char *words_of_all[2], *board_path;

/* One of the parts, by the library or without. */
static pid_t start(int is_static, const char *what, int number, int more)
{
    char seed[32], one[32], other[32];
    snprintf(seed, sizeof seed, "%lu", below(1u << 30) + 1);
    snprintf(one, sizeof one, "%d", number);
    snprintf(other, sizeof other, "%d", more);
    const char *words[] = {words_of_all[is_static], what, folder, board_path, seed, one, other, NULL};
    pid_t child = fork();
    need(child >= 0);
    if (child == 0) {
        execv(words[0], (char **)(uintptr_t)words);
        _exit(99);
    }
    return child;
}

static int ended(pid_t child)
{
    int status = 0;
    need(waitpid(child, &status, 0) == child);
    return status;
}

/* Where somebody who takes a killed writer's place can go on, or -1. */
static int left_by(int pid)
{
    int last = -1;
    for (int index = 0; index < FILES; index++) {
        struct file *file = &board->files[index];
        if (atomic_load(&file->writer_pid) != pid || atomic_load(&file->kind) == NOTHING || atomic_load(&file->is_over))
            continue;
        check_file(index);
        struct part *writer = &file->parts[WRITER], *handler = &file->parts[HANDLER];
        uint64_t started = atomic_load(&writer->started);
        if (atomic_load(&file->kind) != APPENDED || atomic_load(&handler->started) != atomic_load(&handler->returned)) {
            atomic_store(&file->is_over, 1);
            continue;
        }
        for (uint64_t number = atomic_load(&writer->returned); number < started; number++)
            leave(file, number);
        atomic_store(&writer->returned, started);
        last = index;
    }
    return last;
}

static void check_all(void)
{
    int all = atomic_load(&board->next_file);
    for (int index = 0; index < all && index < FILES; index++)
        if (atomic_load(&board->files[index].kind) != NOTHING)
            check_file(index);
}

static void remove_all(void)
{
    char path[4096];
    for (int index = 0; index < FILES; index++)
        unlink(path_of(path, index));
    need(!rmdir(folder));
}

enum { WRITERS_MAX = 2, LOOKERS_MAX = 2 };

static void episode(int lies)
{
    pid_t writers[WRITERS_MAX], lookers[LOOKERS_MAX];
    int count = 1 + (int)below(WRITERS_MAX), by_kernel = below(8) == 0, kills = (int)below(5);
    /* One that looks alone, or several at once. */
    int crowded = (int)below(2), lookers_count = crowded ? LOOKERS_MAX : 1, first = (int)below(2);
    memset(board->files, 0, sizeof board->files);
    atomic_store(&board->stop, 0);
    atomic_store(&board->next_file, 0);
    atomic_store(&board->is_crowded, crowded);
    memset(seen_last, 0, sizeof seen_last);
    need(!mkdir(folder, 0777));
    for (int n = 0; n < count; n++)
        writers[n] = start(by_kernel && !lies, "write", -1, lies);
    for (int n = 0; n < lookers_count; n++)
        lookers[n] = start((n + first) % 2 == 0, "look", (n + first) % 2 ? GUEST : BARE_GUEST, 0);
    while (kills-- > 0 && !lies && !atomic_load(&board->wrong)) {
        int n = (int)below((uint64_t)count);
        usleep((useconds_t)below(400000));
        need(!kill(writers[n], SIGKILL));
        int status = ended(writers[n]);
        if (WIFEXITED(status) && WEXITSTATUS(status))
            wrong("a writer ended with %x", (unsigned)status);
        int index = left_by(writers[n]);
        writers[n] = start(by_kernel, "write", index, 0);
        atomic_fetch_add(&board->kills, 1);
    }
    for (int tenths = 0; tenths < 5 && !atomic_load(&board->wrong); tenths++)
        usleep((useconds_t)below(200000));
    atomic_store(&board->stop, 1);
    int failed = 0;
    for (int n = 0; n < lookers_count; n++)
        failed |= ended(lookers[n]);
    for (int n = 0; n < count; n++) {
        if (failed)
            kill(writers[n], SIGKILL);
        int status = ended(writers[n]);
        failed |= failed ? 0 : status;
    }
    /* Children of writers that were killed. */
    for (int status; wait(&status) > 0;)
        failed |= status;
    if (failed || atomic_load(&board->wrong))
        wrong("one of its processes has failed (%x), see above", (unsigned)failed);
    check_all();
}

static int storm(const char *top, double seconds, int lies)
{
    char place[4096];
    uint64_t end = now_ns(CLOCK_MONOTONIC) + (uint64_t)(seconds * 1e9);
    int episodes = 0;
    need(!prctl(PR_SET_CHILD_SUBREAPER, 1));
    snprintf(place, sizeof place, "%s/posting", top);
    folder = place;
    for (;;) {
        episode(lies);
        episodes++;
        if (now_ns(CLOCK_MONOTONIC) > end)
            break;
        remove_all();
    }
    printf("right: %d episodes, %lu writes, %lu looks (%lu at a stopped writer), %lu writers killed; seen late %lu times, zeros %lu times\n",
           episodes, atomic_load(&board->writes), atomic_load(&board->looks), atomic_load(&board->stopped_looks), atomic_load(&board->kills),
           atomic_load(&board->late), atomic_load(&board->zeros));
    return 0;
}

int main(int count, char **words)
{
    if (count < 4)
        return 2;
    what_am_i = words[1];
    folder = words[2];
    board_path = words[3];
    use_board(board_path);
    need(signal(SIGBUS, on_bus_error) != SIG_ERR);
    if (!strcmp(words[1], "check")) {
        check_all();
        printf("right\n");
    } else if (!strcmp(words[1], "storm") && count >= 8) {
        dice ^= mix(strtoull(words[5], NULL, 0));
        words_of_all[0] = words[6];
        words_of_all[1] = words[7];
        return storm(words[2], atof(words[4]), count > 8);
    } else if (!strcmp(words[1], "write") && count == 7) {
        dice ^= mix(strtoull(words[4], NULL, 0));
        write_on(atoi(words[5]), atoi(words[6]));
    } else if (!strcmp(words[1], "look") && count == 7) {
        dice ^= mix(strtoull(words[4], NULL, 0));
        what_am_i = atoi(words[5]) == GUEST ? "look by the library" : "look by the kernel";
        look(atoi(words[5]));
    } else {
        return 2;
    }
    return 0;
}
