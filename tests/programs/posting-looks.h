/* Ways to look at a file that others write meanwhile. */

static unsigned char seen_bytes[ROOM];
static sigjmp_buf bus_error;

/* What this process saw last of each file. */
static struct { uint64_t mtime_ns, size; } seen_last[FILES];

static uint64_t time_of(const struct stat *found)
{
    return (uint64_t)found->st_mtim.tv_sec * 1000000000u + (uint64_t)found->st_mtim.tv_nsec;
}

static int are_attributes_right(int index, const struct known *known, const struct stat *found, const char *way)
{
    uint64_t size = (uint64_t)found->st_size, mtime = time_of(found);
    if (size < known->bytes)
        return complain("by %s: size %lu, where %lu bytes had been written", way, size, known->bytes);
    if (size < seen_last[index].size)
        return complain("by %s: size %lu, after %lu", way, size, seen_last[index].size);
    if (mtime < seen_last[index].mtime_ns)
        return complain("by %s: changed at %lu, after %lu", way, mtime, seen_last[index].mtime_ns);
    if (mtime < known->begun_ns)
        return complain("by %s: changed at %lu, where a write was begun at %lu", way, mtime, known->begun_ns);
    if (mtime > now_ns(CLOCK_REALTIME))
        return complain("by %s: changed in the future", way);
    seen_last[index].size = size;
    seen_last[index].mtime_ns = mtime;
    return 1;
}

/* The kernel may show zeros in the place of what is being appended while somebody reads, until that page changes again
 * (docs/semantics.md): then the file is right without what the kernel keeps of it. */
static int is_right_below_zeros(int index, const struct known *known, int fd, size_t size)
{
    static unsigned char again[ROOM];
    char before[sizeof complaint];
    if (!atomic_load(&board->is_crowded) || size < known->bytes)
        return 0;
    strcpy(before, complaint);
    need(!posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED));
    ssize_t count = pread(fd, again, sizeof again, 0);
    int right = count >= (ssize_t)size && is_right(&board->files[index], known, again, (size_t)count);
    for (size_t at = 0; right && at < size; at++)
        right = seen_bytes[at] == again[at] || seen_bytes[at] == 0;
    if (right) {
        atomic_fetch_add(&board->zeros, 1);
        return 1;
    }
    strcpy(complaint, before);
    return 0;
}

static int is_content_right(int index, const struct known *known, int fd, size_t size)
{
    return is_right(&board->files[index], known, seen_bytes, size) || is_right_below_zeros(index, known, fd, size);
}

static size_t read_all(int fd)
{
    size_t size = 0;
    for (ssize_t part; (part = read(fd, seen_bytes + size, sizeof seen_bytes - size)) != 0; size += (size_t)part)
        need(part > 0);
    return size;
}

static size_t pread_all(int fd)
{
    size_t size = 0, piece = 512u << below(10);
    for (ssize_t part; (part = pread(fd, seen_bytes + size, piece < sizeof seen_bytes - size ? piece : sizeof seen_bytes - size,
                                     (off_t)size)) != 0; size += (size_t)part)
        need(part > 0);
    return size;
}

static size_t send_all(int fd)
{
    int memory = memfd_create("sent", MFD_CLOEXEC);
    need(memory >= 0);
    off_t from = 0;
    for (ssize_t part; (part = sendfile(memory, fd, &from, 1 << 20)) != 0;)
        need(part > 0);
    need(pread(memory, seen_bytes, sizeof seen_bytes, 0) == (ssize_t)from);
    close(memory);
    return (size_t)from;
}

static void on_bus_error(int signal)
{
    (void)signal;
    siglongjmp(bus_error, 1);
}

/* What a mapping shows. It may end before the size that was told, of a write that is under way: what had been written is in it. */
static size_t map_all(int fd, int flags)
{
    enum { PAGE = 4096 };
    struct stat found;
    need(!fstat(fd, &found));
    size_t size = (size_t)found.st_size;
    if (size == 0)
        return 0;
    unsigned char *mapped = mmap(NULL, size, PROT_READ, flags, fd, 0);
    need(mapped != MAP_FAILED);
    volatile size_t at = 0;
    if (sigsetjmp(bus_error, 1))
        ;
    else
        for (; at < size; at += PAGE)
            memcpy(seen_bytes + at, mapped + at, size - at < PAGE ? size - at : PAGE);
    need(!munmap(mapped, size));
    return at < size ? at : size;
}

/* As `ls -l` does. */
static int is_listed_right(int index, const struct known *known)
{
    char path[4096], name[16];
    DIR *directory = opendir(folder);
    need(directory != NULL);
    snprintf(name, sizeof name, "%s", strrchr(path_of(path, index), '/') + 1);
    int is_there = 0, right = 1;
    for (struct dirent *entry; (entry = readdir(directory));) {
        struct stat found;
        if (strcmp(entry->d_name, name))
            continue;
        need(!fstatat(dirfd(directory), name, &found, AT_SYMLINK_NOFOLLOW));
        right = are_attributes_right(index, known, &found, "readdir");
        is_there = 1;
    }
    closedir(directory);
    return is_there ? right : complain("not listed");
}

enum { LOOK_READ, LOOK_PREAD, LOOK_SEND, LOOK_SHARED, LOOK_PRIVATE, LOOK_STAT, LOOK_LIST, LOOK_END, LOOK_FSYNC, LOOKS };

static const char *const look_names[] = {"read", "pread", "sendfile", "shared mapping", "private mapping", "stat", "readdir", "lseek", "fsync"};

static int is_seen_right(int index, int fd, int how)
{
    struct file *file = &board->files[index];
    struct known known = known_of(file);
    struct stat found;
    char path[4096];
    size_t size = 0;
    switch (how) {
    case LOOK_READ: size = read_all(fd); break;
    case LOOK_PREAD: size = pread_all(fd); break;
    case LOOK_SEND: size = send_all(fd); break;
    case LOOK_SHARED: size = map_all(fd, MAP_SHARED); break;
    case LOOK_PRIVATE: size = map_all(fd, MAP_PRIVATE); break;
    case LOOK_STAT:
        need(!stat(path_of(path, index), &found));
        if (!are_attributes_right(index, &known, &found, "stat"))
            return 0;
        need(!fstat(fd, &found));
        return are_attributes_right(index, &known, &found, "fstat");
    case LOOK_LIST: return is_listed_right(index, &known);
    case LOOK_END: return lseek(fd, 0, SEEK_END) >= (off_t)known.bytes || complain("it ends before what had been written");
    case LOOK_FSYNC: return !fsync(fd) || complain("%s", strerror(errno));
    }
    return is_content_right(index, &known, fd, size);
}

__attribute__((noreturn)) static void wrong_at(int index, int fd, int how)
{
    char before[sizeof complaint];
    strcpy(before, complaint);
    int later = is_seen_right(index, fd, LOOK_PREAD);
    wrong("file %d of kind %d by %s: %s; read again it is %s", index, atomic_load(&board->files[index].kind), look_names[how], before,
          later ? "right" : complaint);
}

/* As whoever has it open. */
static void look_by(int index, int fd, int how)
{
    if (!is_seen_right(index, fd, how))
        wrong_at(index, fd, how);
}

/* As anybody does that opens it. The kernel may answer once from before where others ask at that very moment (docs/semantics.md). */
static void look_at(int index, int how)
{
    char path[4096];
    for (int late = atomic_load(&board->is_crowded) ? 3 : 0;; late--) {
        int fd = open(path_of(path, index), O_RDONLY | O_CLOEXEC);
        need(fd >= 0);
        int right = is_seen_right(index, fd, how);
        if (!right && late == 0)
            wrong_at(index, fd, how);
        need(!close(fd));
        if (right)
            break;
        if (getenv("POSTING_SHOW"))
            dprintf(2, "late (%s): file %d of kind %d by %s: %s\n", what_am_i, index, atomic_load(&board->files[index].kind), look_names[how], complaint);
        atomic_fetch_add(&board->late, 1);
    }
    atomic_fetch_add(&board->looks, 1);
}

static int is_stopped(int pid)
{
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t count = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    char *state = count > 0 ? strrchr(text, ')') : NULL;
    /* One that has ended writes nothing either. */
    return !state || state[2] == 'T' || state[2] == 'Z' || state[2] == 'X';
}

/* Whoever writes it is stopped, wherever it is, for as long as somebody looks in many ways. */
static void look_at_stopped(int index)
{
    int pid = atomic_load(&board->files[index].writer_pid);
    if (pid <= 0 || kill(pid, SIGSTOP))
        return;
    while (!is_stopped(pid))
        sched_yield();
    for (int count = 1 + (int)below(4); count-- > 0;)
        look_at(index, (int)below(LOOKS));
    kill(pid, SIGCONT);
    atomic_fetch_add(&board->stopped_looks, 1);
}

static void check_file(int index)
{
    for (int how = LOOK_READ; how <= LOOK_LIST; how++)
        look_at(index, how);
}
