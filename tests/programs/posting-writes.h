/* The writers: each writes files in runs of small writes, looks at them itself, forks, and is interrupted, stopped and killed. */

static sigjmp_buf way_back;
static volatile sig_atomic_t in_write, alarms;
static volatile int own_fd = -1, own_index = -1;

/* A writer that only says that its writes have returned, and does them later: what the test has to find. */
static int is_liar;
static unsigned char held_back[16 * RECORD_MAX];
static size_t held_bytes, held_count;

static void come_clean(int fd)
{
    if (held_bytes)
        need(write(fd, held_back, held_bytes) == (ssize_t)held_bytes);
    held_bytes = held_count = 0;
}

static ssize_t lie(int fd, const unsigned char *bytes, size_t length)
{
    memcpy(held_back + held_bytes, bytes, length);
    held_bytes += length;
    if (++held_count == 16)
        come_clean(fd);
    return (ssize_t)length;
}

static void has_returned(struct part *part, uint64_t number, uint64_t length, uint64_t begun)
{
    atomic_store(&part->begun_ns, begun);
    atomic_fetch_add(&part->bytes, length);
    atomic_store(&part->returned, number + 1);
    atomic_fetch_add(&board->writes, 1);
}

/* The next record, by a call that appends. */
static ssize_t append(int fd, const unsigned char *bytes, size_t length, int how)
{
    struct iovec parts[2] = {{(void *)(uintptr_t)bytes, length / 3}, {(void *)(uintptr_t)(bytes + length / 3), length - length / 3}};
    if (is_liar)
        return lie(fd, bytes, length);
    if (how == 1)
        return writev(fd, parts, 2);
    if (how == 2)
        return pwrite(fd, bytes, length, 0);
    return write(fd, bytes, length);
}

static void append_as(int index, int fd, int which, int bare)
{
    static unsigned char records[PARTS][RECORD_MAX];
    struct part *part = &board->files[index].parts[which];
    uint64_t number = atomic_load(&part->returned), begun = now_ns(CLOCK_REALTIME_COARSE);
    uint32_t length = make_record(records[which], index, which, number);
    atomic_store(&part->started, number + 1);
    long done = bare ? raw(SYS_write, fd, (long)records[which], length, 0, 0) : write(fd, records[which], length);
    if (done != (long)length)
        wrong("an append of %u bytes to file %d as %d: %ld, %s", length, index, which, done, strerror(errno));
    has_returned(part, number, length, begun);
}

/* One of several guests of a kind at a time; who has to wait does without. */
static void be_guest(int index, int fd, int which, int bare, int count)
{
    struct part *part = &board->files[index].parts[which];
    if (atomic_flag_test_and_set(&part->taken))
        return;
    while (count-- > 0 && !atomic_load(&board->files[index].is_over) && atomic_load(&part->returned) < NUMBERS / 64)
        append_as(index, fd, which, bare);
    atomic_flag_clear(&part->taken);
}

static void on_alarm(int signal)
{
    (void)signal;
    int before = errno, leaves = ++alarms % 3 == 0;
    if (own_fd < 0)
        return;
    for (int count = alarms % 4; count-- > 0 && atomic_load(&board->files[own_index].parts[HANDLER].returned) < NUMBERS / 64;)
        append_as(own_index, own_fd, HANDLER, 0);
    errno = before;
    if (in_write && leaves)
        siglongjmp(way_back, 1);
}

/* The next write of its kind. */
static void write_once(int index, int fd, int how)
{
    static unsigned char bytes[RECORD_MAX];
    struct file *file = &board->files[index];
    struct part *part = &file->parts[WRITER];
    int kind = atomic_load(&file->kind);
    uint64_t number = atomic_load(&part->started), begun = now_ns(CLOCK_REALTIME_COARSE), sectors = 0, first = 0;
    size_t length;
    if (kind == BLOCKS) {
        first = sector_of(number, &sectors);
        for (uint64_t sector = 0; sector < sectors; sector++)
            make_sector(bytes + sector * SECTOR, index, number, first + sector);
        length = sectors * SECTOR;
    } else {
        length = make_record(bytes, index, WRITER, number);
    }
    atomic_store(&part->started, number + 1);
    volatile ssize_t done = -1;
    if (sigsetjmp(way_back, 1)) {
        in_write = 0;
        leave(file, number);
        atomic_store(&part->returned, number + 1);
        return;
    }
    in_write = 1;
    if (kind == APPENDED)
        done = append(fd, bytes, length, how);
    else if (kind == AT_OFFSET)
        done = write(fd, bytes, length);
    else
        done = pwrite(fd, bytes, length, kind == BLOCKS ? (off_t)(first * SECTOR) : (off_t)atomic_load(&part->bytes));
    in_write = 0;
    if (done != (ssize_t)length)
        wrong("a write of %zu bytes to file %d of kind %d: %zd, %s", length, index, kind, done, strerror(errno));
    has_returned(part, number, length, begun);
}

/* A child that has forked without the library's knowledge of what it does. */
static void bare_child(int index, int fd)
{
    struct file *file = &board->files[index];
    struct known known = known_of(file);
    size_t size = 0;
    for (long part; (part = raw(SYS_pread64, fd, (long)(seen_bytes + size), (long)(sizeof seen_bytes - size), (long)size, 0)) > 0;)
        size += (size_t)part;
    if (!is_right(file, &known, seen_bytes, size))
        wrong("file %d of kind %d by a child without the library: %s", index, atomic_load(&file->kind), complaint);
    if (atomic_load(&file->kind) == APPENDED)
        be_guest(index, fd, BARE_GUEST, 1, 3);
    raw(SYS_exit_group, 0, 0, 0, 0, 0);
}

static pid_t have_child(int index, int fd, int may_read)
{
    int bare = may_read && below(2), how = (int)below(LOOKS);
    /* What it writes in the handler is in nobody's way here. */
    pid_t child = fork();
    need(child >= 0);
    if (child)
        return child;
    own_fd = -1;
    what_am_i = bare ? "bare child" : "child";
    if (bare)
        bare_child(index, fd);
    look_at(index, how);
    if (atomic_load(&board->files[index].kind) == APPENDED)
        be_guest(index, fd, GUEST, 0, 3);
    if (may_read)
        look_by(index, fd, LOOK_PREAD);
    _exit(0);
}

static void end_child(pid_t child)
{
    int status;
    while (waitpid(child, &status, 0) < 0)
        need(errno == EINTR);
    if (status)
        wrong("a child ended with %x", (unsigned)status);
}

static void look_myself(int index, int fd, int may_read)
{
    int how = (int)below(LOOKS);
    int crowded = atomic_load(&board->is_crowded);
    if (crowded && (!may_read || below(4) == 0)) {
        look_at(index, how);
        return;
    }
    if (!may_read)
        how = LOOK_END;
    /* The handler moves the offset. */
    if (how == LOOK_READ && own_fd >= 0)
        how = LOOK_PREAD;
    if (how == LOOK_READ)
        need(lseek(fd, 0, SEEK_SET) == 0);
    look_by(index, fd, how);
    atomic_fetch_add(&board->looks, 1);
}

static int open_own(int index, int kind, int is_new)
{
    static const int flags[KINDS] = {[APPENDED] = O_APPEND};
    char path[4096];
    /* One in four is open only to be written, where nobody has to read by its offset. */
    int access = kind != AT_OFFSET && below(4) == 0 ? O_WRONLY : O_RDWR;
    int fd = open(path_of(path, index), access | flags[kind] | O_CLOEXEC | (is_new ? O_CREAT | O_EXCL : 0), 0644);
    need(fd >= 0);
    return fd;
}

static void write_file(int index, int kind, int is_new, int has_alarms)
{
    struct file *file = &board->files[index];
    struct part *part = &file->parts[WRITER];
    int fd = open_own(index, kind, is_new), may_read = (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR;
    atomic_store(&file->writer_pid, (int)getpid());
    atomic_store(&file->kind, kind);
    int runs = 3 + (int)below(60);
    own_index = index;
    own_fd = has_alarms ? fd : -1;
    while (runs-- > 0 && atomic_load(&part->bytes) < LOG_MAX && atomic_load(&part->started) < NUMBERS / 4 && !atomic_load(&board->stop)) {
        pid_t child = atomic_load(&board->is_crowded) && below(25) == 0 && !is_liar ? have_child(index, fd, may_read) : 0;
        int copy = below(20) == 0 ? dup(fd) : -1, how = below(4) ? 0 : (int)below(3);
        for (int count = 1 + (int)below(below(3) ? 20 : 80); count-- > 0;)
            write_once(index, copy >= 0 && count % 2 ? copy : fd, how);
        if (copy >= 0)
            need(!close(copy));
        if (child)
            end_child(child);
        if (below(3) == 0)
            usleep((useconds_t)below(3000));
        come_clean(fd);
        if (below(3))
            look_myself(index, fd, may_read);
    }
    own_fd = -1;
    if (below(4) == 0)
        need(!fsync(fd));
    need(!close(fd));
    atomic_store(&file->is_over, 1);
    if (atomic_load(&board->is_crowded))
        look_at(index, (int)below(LOOKS));
}

/* Writes file after file; first on, if somebody was killed there. */
static void write_on(int index, int lies)
{
    int has_alarms = !lies && below(3) == 0;
    is_liar = lies;
    if (has_alarms) {
        struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
        struct timeval often = {0, 1000 + (suseconds_t)below(4000)};
        struct itimerval timer = {often, often};
        need(!sigaction(SIGALRM, &action, NULL) && !setitimer(ITIMER_REAL, &timer, NULL));
    }
    if (index >= 0)
        write_file(index, APPENDED, 0, has_alarms);
    while (!atomic_load(&board->stop)) {
        index = atomic_fetch_add(&board->next_file, 1);
        if (index >= FILES)
            return;
        write_file(index, has_alarms || lies ? APPENDED : APPENDED + (int)below(KINDS - APPENDED), 1, has_alarms);
    }
}
