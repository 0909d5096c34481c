/* Operations of the differential test on open files. */

enum { MAP_BYTES_MAX = 1 << 19 };

static struct map {
    unsigned char *at;
    size_t length;
    off_t offset;
    struct stat file;
} maps[SLOTS];

static sigjmp_buf bus_error;
static volatile sig_atomic_t in_map;
static int mailbox = -1;
static char mailbox_path[100];

/* Pipes are not in a filesystem: what is written to them moves times of the name by rules of their own. */
static int is_pipe(int descriptor)
{
    struct stat found;
    return fstat(descriptor, &found) == 0 && S_ISFIFO(found.st_mode);
}

static void do_open(char **w)
{
    int slot = slot_of(w[0]);
    struct place at = place(w[1]);
    if (slots[slot] >= 0) {
        say_done(close(slots[slot]));
        say(" ");
    }
    slots[slot] = -1;
    /* Nobody comes to the other end of a pipe. */
    int found = openat(at.directory, at.path, (int)number(w[2]) | O_NONBLOCK, (mode_t)number(w[3]));
    slots[slot] = found;
    say_done(found);
}

static void do_close(char **w)
{
    int slot = slot_of(w[0]);
    say_done(close(slots[slot]));
    slots[slot] = -1;
}

static void do_dup(char **w)
{
    int from = descriptor_of(w[0]), to = slot_of(w[1]);
    if (from < 0 || slot_of(w[0]) == to) {
        say("-");
        return;
    }
    if (slots[to] >= 0)
        say_done(dup2(from, slots[to]));
    else
        say_done(slots[to] = dup(from));
}

static size_t length_of(const char *word)
{
    long long length = number(word);
    return length < 0 ? 0 : length > DATA_MAX ? DATA_MAX : (size_t)length;
}

/* Three parts, the middle one empty. */
static void split(struct iovec *parts, size_t length)
{
    parts[0] = (struct iovec){data, length / 3};
    parts[1] = (struct iovec){data + length / 3, 0};
    parts[2] = (struct iovec){data + length / 3, length - length / 3};
}

static void say_read(ssize_t count)
{
    say_result(count);
    if (count > 0)
        say(" %016llx", (unsigned long long)hash(1, data, (size_t)count));
}

static void do_read(char **w)
{
    int descriptor = descriptor_of(w[0]);
    is_pipe(descriptor) ? say("-") : say_read(read(descriptor, data, length_of(w[1])));
}

static void do_readv(char **w)
{
    int descriptor = descriptor_of(w[0]);
    struct iovec parts[3];
    split(parts, length_of(w[1]));
    is_pipe(descriptor) ? say("-") : say_read(readv(descriptor, parts, 3));
}

static void do_pread(char **w)
{
    say_read(pread(descriptor_of(w[0]), data, length_of(w[2]), number(w[1])));
}

static void do_preadv(char **w)
{
    struct iovec parts[3];
    split(parts, length_of(w[2]));
    say_read(preadv(descriptor_of(w[0]), parts, 3, number(w[1])));
}

static void do_write(char **w)
{
    int descriptor = descriptor_of(w[0]);
    size_t length = length_of(w[1]);
    fill(data, length, (uint64_t)number(w[2]));
    is_pipe(descriptor) ? say("-") : say_result(write(descriptor, data, length));
}

static void do_writev(char **w)
{
    int descriptor = descriptor_of(w[0]);
    struct iovec parts[3];
    size_t length = length_of(w[1]);
    fill(data, length, (uint64_t)number(w[2]));
    split(parts, length);
    is_pipe(descriptor) ? say("-") : say_result(writev(descriptor, parts, 3));
}

static void do_pwrite(char **w)
{
    size_t length = length_of(w[2]);
    fill(data, length, (uint64_t)number(w[3]));
    say_result(pwrite(descriptor_of(w[0]), data, length, number(w[1])));
}

/* Small writes, one right after the other, at the descriptor's own place or from an offset on; after so many of them a look at what there is. */
static void do_burst(char **w)
{
    enum { COUNT_MAX = 64, LENGTH_MAX = 8192 };
    int descriptor = descriptor_of(w[0]), at_offset = strcmp(w[2], "-") != 0;
    long long count = number(w[1]), from = number(w[2]), look = number(w[5]);
    size_t length = length_of(w[3]) < LENGTH_MAX ? length_of(w[3]) : LENGTH_MAX;
    struct stat found;
    if (is_pipe(descriptor)) {
        say("-");
        return;
    }
    for (long long done = 0; done < count && done < COUNT_MAX; done++) {
        fill(data, length, (uint64_t)(number(w[4]) + done));
        ssize_t written = at_offset ? pwrite(descriptor, data, length, from + done * (long long)length) : write(descriptor, data, length);
        if (written != (ssize_t)length || done == count - 1)
            say_result(written);
        if (written < 0)
            return;
        if (look == 0 || done % look != look - 1)
            continue;
        say(" after %lld", done);
        if (fstat(descriptor, &found))
            say_result(-1);
        else
            say(" size %lld ", (long long)found.st_size);
        say_read(pread(descriptor, data, length, done % 2 ? from : found.st_size > (off_t)length ? found.st_size - (off_t)length : 0));
        say(" at %lld ", (long long)lseek(descriptor, 0, SEEK_CUR));
    }
}

static void do_pwritev(char **w)
{
    struct iovec parts[3];
    size_t length = length_of(w[2]);
    fill(data, length, (uint64_t)number(w[3]));
    split(parts, length);
    say_result(pwritev(descriptor_of(w[0]), parts, 3, number(w[1])));
}

static void do_seek(char **w)
{
    int descriptor = descriptor_of(w[0]);
    struct stat found;
    /* Offsets of directories are the filesystem's own. */
    if (fstat(descriptor, &found) == 0 && S_ISDIR(found.st_mode))
        say("-");
    else
        say_result(lseek(descriptor, number(w[1]), (int)number(w[2])));
}

static int is_zero(int descriptor, off_t from, off_t to)
{
    while (from < to) {
        size_t part = to - from < DATA_MAX ? (size_t)(to - from) : DATA_MAX;
        ssize_t count = pread(descriptor, data, part, from);
        if (count <= 0)
            return 0;
        for (ssize_t i = 0; i < count; i++)
            if (data[i])
                return 0;
        from += count;
    }
    return 1;
}

/* Where holes are is the filesystem's choice, but that they read as zeros and lie within the file is not. */
static void do_holes(char **w)
{
    int descriptor = descriptor_of(w[0]);
    off_t from = number(w[1]), before = lseek(descriptor, 0, SEEK_CUR);
    struct stat found;
    if (fstat(descriptor, &found) || !S_ISREG(found.st_mode)) {
        say("-");
        return;
    }
    off_t hole = lseek(descriptor, from, SEEK_HOLE);
    if (hole < 0)
        say_result(hole);
    else
        say(hole >= from && hole <= found.st_size ? "within" : "outside");
    off_t there = lseek(descriptor, from, SEEK_DATA);
    int none = there < 0 && errno == ENXIO && from < found.st_size && from >= 0;
    int readable = (fcntl(descriptor, F_GETFL) & O_ACCMODE) != O_WRONLY;
    if (there < 0 && !none)
        say(" "), say_result(there);
    else
        say(!readable || is_zero(descriptor, from, none ? found.st_size : there) ? " zeros" : " lost data");
    lseek(descriptor, before, SEEK_SET);
}

static void do_ftruncate(char **w)
{
    say_done(ftruncate(descriptor_of(w[0]), number(w[1])));
}

static void do_fallocate(char **w)
{
    say_done(fallocate(descriptor_of(w[0]), (int)number(w[1]), number(w[2]), number(w[3])));
}

static void do_copy(char **w)
{
    off_t from = number(w[1]), to = number(w[3]);
    int at_offsets = strcmp(w[1], "-") != 0;
    say_result(copy_file_range(descriptor_of(w[0]), at_offsets ? &from : NULL, descriptor_of(w[2]),
                               at_offsets ? &to : NULL, length_of(w[4]), 0));
}

static void do_sendfile(char **w)
{
    off_t from = number(w[2]);
    if (is_pipe(descriptor_of(w[0])) || is_pipe(descriptor_of(w[1])))
        say("-");
    else
        say_result(sendfile(descriptor_of(w[0]), descriptor_of(w[1]), strcmp(w[2], "-") ? &from : NULL, length_of(w[3])));
}

static void do_fsync(char **w)
{
    say_done(fsync(descriptor_of(w[0])));
}

static void do_fdatasync(char **w)
{
    say_done(fdatasync(descriptor_of(w[0])));
}

static void do_setfl(char **w)
{
    say_done(fcntl(descriptor_of(w[0]), F_SETFL, (int)number(w[1]) | O_NONBLOCK));
}

static struct flock lock_of(char **w)
{
    return (struct flock){.l_type = (short)(*w[2] == 'r' ? F_RDLCK : *w[2] == 'w' ? F_WRLCK : F_UNLCK),
                          .l_whence = SEEK_SET, .l_start = number(w[3]), .l_len = number(w[4])};
}

static void do_lock(char **w)
{
    struct flock lock = lock_of(w);
    say_done(fcntl(descriptor_of(w[0]), *w[1] == 'o' ? F_OFD_SETLK : F_SETLK, &lock));
}

static void do_getlock(char **w)
{
    struct flock lock = lock_of(w);
    int result = fcntl(descriptor_of(w[0]), *w[1] == 'o' ? F_OFD_GETLK : F_GETLK, &lock);
    say_done(result);
    if (result == 0)
        say(" %d %lld %lld", lock.l_type, (long long)lock.l_start, (long long)lock.l_len);
}

static void do_flock(char **w)
{
    say_done(flock(descriptor_of(w[0]), (*w[1] == 'r' ? LOCK_SH : *w[1] == 'w' ? LOCK_EX : LOCK_UN) | LOCK_NB));
}

static void on_bus_error(int signal)
{
    if (!in_map)
        _exit(128 + signal);
    siglongjmp(bus_error, 1);
}

void catch_bus_errors(void)
{
    signal(SIGBUS, on_bus_error);
}

void unmap(int slot)
{
    if (maps[slot].at)
        munmap(maps[slot].at, maps[slot].length);
    maps[slot].at = NULL;
}

static void do_map(char **w)
{
    int slot = slot_of(w[0]);
    int protection = *w[1] == 'w' ? PROT_READ | PROT_WRITE : PROT_READ;
    unmap(slot);
    size_t length = length_of(w[3]);
    length = length > MAP_BYTES_MAX ? MAP_BYTES_MAX : length;
    fstat(slots[slot], &maps[slot].file);
    void *at = mmap(NULL, length, protection, MAP_SHARED, slots[slot], number(w[2]));
    say_done(at == MAP_FAILED ? -1 : 0);
    if (at == MAP_FAILED)
        return;
    maps[slot].at = at;
    maps[slot].length = length;
    maps[slot].offset = number(w[2]);
}

/* How much of a part of the mapping lies within the file: behind its end, up to the page's, anything may be read. */
static size_t within(int slot, size_t from, size_t length)
{
    struct map *map = &maps[slot];
    struct stat now;
    if (!map->at || fstat(slots[slot], &now) || now.st_ino != map->file.st_ino || now.st_dev != map->file.st_dev)
        return 0;
    off_t end = now.st_size - map->offset;
    size_t last = end < 0 ? 0 : (size_t)end < map->length ? (size_t)end : map->length;
    return from >= last ? 0 : length < last - from ? length : last - from;
}

static void do_map_read(char **w)
{
    int slot = slot_of(w[0]);
    size_t from = length_of(w[1]), length = within(slot, from, length_of(w[2]));
    in_map = 1;
    if (sigsetjmp(bus_error, 1)) {
        say("SIGBUS");
    } else {
        uint64_t found = length ? hash(1, maps[slot].at + from, length) : 0;
        say("%zu %016llx", length, (unsigned long long)found);
    }
    in_map = 0;
}

/* What was stored is written back at once: when else that happens, and moves the file's times, is the kernel's choice. */
static void do_map_write(char **w)
{
    int slot = slot_of(w[0]);
    size_t from = length_of(w[1]), length = within(slot, from, length_of(w[2]));
    int writable = (fcntl(slots[slot], F_GETFL) & O_ACCMODE) == O_RDWR;
    if (!length || !writable || *w[4] != 'w') {
        say("-");
        return;
    }
    fill(data, length, (uint64_t)number(w[3]));
    in_map = 1;
    if (sigsetjmp(bus_error, 1)) {
        say("SIGBUS");
    } else {
        if (mprotect(maps[slot].at, maps[slot].length, PROT_READ | PROT_WRITE))
            say("%s ", strerrorname_np(errno));
        else
            memcpy(maps[slot].at + from, data, length);
        say_done(msync(maps[slot].at, maps[slot].length, MS_SYNC));
    }
    in_map = 0;
}

static void do_unmap(char **w)
{
    unmap(slot_of(w[0]));
    say("0");
}

static struct sockaddr_un mailbox_of(int process)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int length = snprintf(address.sun_path, sizeof address.sun_path, "%s.%d", mailbox_path, process);
    if (length >= (int)sizeof address.sun_path) {
        fprintf(stderr, "differential: the mailbox's name is too long for a socket: %s.%d\n", mailbox_path, process);
        exit(2);
    }
    return address;
}

void open_mailbox(const char *path, int process)
{
    snprintf(mailbox_path, sizeof mailbox_path, "%s", path);
    struct sockaddr_un own = mailbox_of(process);
    mailbox = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    unlink(own.sun_path);
    if (mailbox < 0 || bind(mailbox, (struct sockaddr *)&own, sizeof own) || chmod(own.sun_path, 0777)) {
        perror("differential: the mailbox");
        exit(2);
    }
}

static int take(void)
{
    char byte;
    union { struct cmsghdr header; char room[CMSG_SPACE(sizeof(int))]; } control;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (recvmsg(mailbox, &message, MSG_CMSG_CLOEXEC) < 0)
        return -1;
    int found = -1;
    if (CMSG_FIRSTHDR(&message))
        memcpy(&found, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof found);
    return found;
}

void empty_mailbox(void)
{
    for (int found; (found = take()) >= 0;)
        close(found);
}

static void do_give(char **w)
{
    union { struct cmsghdr header; char room[CMSG_SPACE(sizeof(int))]; } control = {0};
    struct sockaddr_un other = mailbox_of((int)number(w[1]));
    struct iovec part = {"x", 1};
    struct msghdr message = {.msg_name = &other, .msg_namelen = sizeof other, .msg_iov = &part, .msg_iovlen = 1,
                             .msg_control = &control, .msg_controllen = sizeof control};
    control.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    int given = descriptor_of(w[0]);
    memcpy(CMSG_DATA(&control.header), &given, sizeof given);
    say_result(sendmsg(mailbox, &message, 0));
}

static void do_take(char **w)
{
    int slot = slot_of(w[0]);
    int found = take();
    say_done(found);
    if (found >= 0) {
        if (slots[slot] >= 0)
            close(slots[slot]);
        slots[slot] = found;
    }
}
