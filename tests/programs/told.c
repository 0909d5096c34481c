/* Writes records as the test tells it, one step per line, and answers each with "ok VALUE" or "error ERRNO". What has returned and what
 * is synced is on a board, from which `posting check` knows what must be there.
 *
 *   open FOLDER BOARD INDEX APPENDS    a new file, INDEX of the board, which the process that opens the first file begins
 *   append COUNT                       COUNT records, up to the first failure
 *   run COUNT                          the same, as far as the file is looked at, and syncs after each COUNT, without end
 *   sync, data, close                  as the calls are called
 *   size, read                         what the process itself sees, which must be right
 *   mark                               what must be there is what was synced
 *   exit */
#include "posting.h"

/* A run writes no more than this, and then only syncs: who looks at the file has room for it. */
enum { RUN_MAX = ROOM / 2 };

static int fd = -1, own = -1, appends;

static int64_t answer(int64_t done)
{
    return done < 0 ? -(int64_t)errno : done;
}

static int64_t append_one(void)
{
    static unsigned char bytes[RECORD_MAX];
    struct part *part = &board->files[own].parts[WRITER];
    uint64_t number = atomic_load(&part->returned), begun = now_ns(CLOCK_REALTIME_COARSE);
    uint32_t length = make_record(bytes, own, WRITER, number);
    off_t end = (off_t)atomic_load(&part->bytes);
    atomic_store(&part->started, number + 1);
    ssize_t done = appends == 2 ? pwrite(fd, bytes, length, end) : write(fd, bytes, length);
    if (done >= 0 && done < (ssize_t)length) {
        /* Of a part of a record nobody knows anything. */
        need(!ftruncate(fd, end) && (appends || lseek(fd, end, SEEK_SET) == end));
        errno = ENOSPC;
        done = -1;
    }
    if (done < 0) {
        int why = errno;
        atomic_store(&part->started, number);
        errno = why;
        return answer(-1);
    }
    atomic_store(&part->begun_ns, begun);
    atomic_fetch_add(&part->bytes, length);
    atomic_store(&part->returned, number + 1);
    return 1;
}

static uint64_t bytes_of_own(void)
{
    return atomic_load(&board->files[own].parts[WRITER].bytes);
}

static int64_t append_many(long count)
{
    for (long done = 0; done < count; done++) {
        int64_t one = append_one();
        if (one < 0)
            return one;
    }
    return count;
}

static int64_t sync_all(int data)
{
    struct part *part = &board->files[own].parts[WRITER];
    uint64_t returned = atomic_load(&part->returned);
    int64_t done = answer(data ? fdatasync(fd) : fsync(fd));
    if (done == 0)
        atomic_store(&part->synced, returned);
    return done;
}

static int64_t open_file(const char *place, const char *board_path, int index, int how)
{
    static char kept[4096];
    char path[4096];
    snprintf(kept, sizeof kept, "%s", place);
    folder = kept;
    own = index;
    appends = how;
    use_board(board_path);
    fd = open(path_of(path, index), O_RDWR | O_CREAT | O_EXCL | (how == 1 ? O_APPEND : 0), 0644);
    if (fd < 0)
        return answer(-1);
    memset(&board->files[index], 0, sizeof board->files[index]);
    atomic_store(&board->files[index].kind, how == 1 ? APPENDED : how == 2 ? BY_PWRITE : AT_OFFSET);
    if (atomic_load(&board->next_file) <= index)
        atomic_store(&board->next_file, index + 1);
    return 0;
}

static int64_t read_file(void)
{
    static unsigned char bytes[ROOM];
    struct known known = known_of(&board->files[own]);
    size_t size = 0;
    for (ssize_t part; (part = pread(fd, bytes + size, sizeof bytes - size, (off_t)size)) != 0; size += (size_t)part)
        if (part < 0)
            return answer(-1);
    if (!is_right(&board->files[own], &known, bytes, size))
        wrong("file %d read by its writer: %s", own, complaint);
    return (int64_t)size;
}

int main(void)
{
    static char line[8192], place[4096], where[4096];
    what_am_i = "told";
    while (fgets(line, sizeof line, stdin)) {
        long count = 0;
        int index, how;
        int64_t done = -EINVAL;
        struct stat found;
        if (sscanf(line, "open %4000s %4000s %d %d", place, where, &index, &how) == 4)
            done = open_file(place, where, index, how);
        else if (sscanf(line, "append %ld", &count) == 1)
            done = append_many(count);
        else if (sscanf(line, "run %ld", &count) == 1)
            while ((done = append_many(bytes_of_own() < RUN_MAX ? count : 0)) >= 0 && (done = sync_all(0)) >= 0)
                ;
        else if (!strncmp(line, "sync", 4))
            done = sync_all(0);
        else if (!strncmp(line, "data", 4))
            done = sync_all(1);
        else if (!strncmp(line, "close", 5))
            done = answer(close(fd));
        else if (!strncmp(line, "size", 4))
            done = fstat(fd, &found) ? answer(-1) : (int64_t)found.st_size;
        else if (!strncmp(line, "read", 4))
            done = read_file();
        else if (!strncmp(line, "mark", 4)) {
            struct part *part = &board->files[own].parts[WRITER];
            atomic_store(&part->started, atomic_load(&part->returned) + 1);
            atomic_store(&part->returned, atomic_load(&part->synced));
            atomic_store(&part->begun_ns, 0);
            done = 0;
        } else if (!strncmp(line, "exit", 4))
            return 0;
        printf(done < 0 ? "error %ld\n" : "ok %ld\n", (long)(done < 0 ? -done : done));
        fflush(stdout);
    }
    return 0;
}
