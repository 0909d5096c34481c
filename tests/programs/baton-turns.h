/* The operations of one turn of baton.c. */

static void send_descriptor(int socket, int sent)
{
    union { struct cmsghdr header; char room[CMSG_SPACE(sizeof(int))]; } control = {0};
    struct iovec part = {"x", 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    control.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.header), &sent, sizeof sent);
    need(sendmsg(socket, &message, 0) == 1);
}

static int received(int socket)
{
    union { struct cmsghdr header; char room[CMSG_SPACE(sizeof(int))]; } control = {0};
    char byte;
    int found = -1;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    need(recvmsg(socket, &message, 0) == 1);
    memcpy(&found, CMSG_DATA(&control.header), sizeof found);
    need(found >= 0);
    return found;
}

/* What is made after a file's last write is not older than the file, and the file gets no younger by itself. */
static void make_newer(int pause)
{
    struct stat made, file, later;
    int is_written = (int)below(2);
    uint64_t before = coarse_ns();
    int fd = open(model->other_path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    need(fd >= 0);
    if (is_written)
        need(write(fd, "x", 1) == 1);
    need(!close(fd));
    need(!stat(model->other_path, &made) && !stat(model->path, &file));
    check_attributes(&file, "stat");
    int64_t seconds = made.st_mtim.tv_sec - file.st_mtim.tv_sec, younger = seconds * 1000000000 + made.st_mtim.tv_nsec - file.st_mtim.tv_nsec;
    /* What is only made has its time from the branch's filesystem, whose clock may be some ticks behind that of the service. */
    uint64_t made_ns = (uint64_t)made.st_mtim.tv_sec * 1000000000u + (uint64_t)made.st_mtim.tv_nsec;
    if (younger < 0 && (is_written || made_ns < before))
        wrong("what was %s later is %ld ns older", is_written ? "written" : "made", -younger);
    usleep((useconds_t)pause);
    need(!stat(model->path, &later));
    if (later.st_mtim.tv_sec != file.st_mtim.tv_sec || later.st_mtim.tv_nsec != file.st_mtim.tv_nsec || later.st_size != file.st_size)
        wrong("the file has changed by itself");
    need(!unlink(model->other_path));
}

/* r m f e: looks at the content; s l: at the attributes; Z: makes another file; y: has it synced; a w: writes; t T: truncates; n k: names;
 * g: gets the writer's descriptor; G: uses it; d: gives it back; o: has the file open from here on; q: has not. */
static const char TURNS[] = "ZZrrrmmffeeslssslyaawtTnkgGGGdoq";

static void turn_of_other(char what, int socket)
{
    size_t length;
    int fd = -1;
    switch (what) {
    case 'r': check_pread(fd = opened(O_RDONLY), 0); break;
    case 'm': check_map(fd = opened(O_RDONLY)); break;
    case 'f': check_sendfile(fd = opened(O_RDONLY)); break;
    case 'e':
        fd = opened(O_RDONLY);
        if (lseek(fd, 0, SEEK_END) != model->size)
            wrong("it ends at %ld instead of %ld", (long)lseek(fd, 0, SEEK_END), model->size);
        break;
    case 's': check_stat(); break;
    case 'l': check_list(); break;
    case 'Z': make_newer((int)below(2) * 2500); break;
    case 'y': need(!fsync(fd = opened(O_RDONLY))); break;
    case 'a': {
        fd = opened(O_WRONLY | O_APPEND);
        for (int count = 1 + (int)below(10); count-- > 0;) {
            unsigned char *bytes = piece(&length);
            need(write(fd, bytes, length) == (ssize_t)length);
            put(bytes, length, model->size);
        }
        break;
    }
    case 'w': {
        fd = opened(O_RDWR);
        unsigned char *bytes = piece(&length);
        int64_t at = (int64_t)below((uint64_t)model->size + 1);
        need(pwrite(fd, bytes, length, at) == (ssize_t)length);
        put(bytes, length, at);
        break;
    }
    case 't':
        resize((int64_t)below((uint64_t)model->size + 5000));
        need(!truncate(model->path, model->size));
        break;
    case 'T':
        fd = opened(O_WRONLY | O_TRUNC);
        resize(0);
        break;
    case 'n':
        need(!rename(model->path, model->other_path));
        memcpy(found_bytes, model->path, sizeof model->path);
        memcpy(model->path, model->other_path, sizeof model->path);
        memcpy(model->other_path, found_bytes, sizeof model->other_path);
        break;
    case 'k':
        need(!link(model->path, model->other_path));
        fd = open(model->other_path, O_RDONLY | O_CLOEXEC);
        need(fd >= 0);
        check_pread(fd, 0);
        need(!unlink(model->other_path));
        break;
    case 'g':
        if (given >= 0)
            close(given);
        given = received(socket);
        given_description = model->description;
        check_pread(given, 0);
        break;
    case 'G':
        if (given < 0)
            break;
        /* The writer may have opened the file anew since. */
        for (int count = (int)below(6); count-- > 0 && given_description == model->description;)
            write_on(given, 0);
        check_pread(given, 0);
        break;
    case 'd':
        if (given >= 0)
            need(!close(given));
        given = -1;
        break;
    case 'o':
        if (held < 0)
            held = opened(O_RDONLY);
        check_pread(held, 0);
        break;
    case 'q':
        if (held >= 0) {
            check_map(held);
            need(!close(held));
        }
        held = -1;
        break;
    /* The file is another from here on. */
    case 'z':
        if (held >= 0)
            need(!close(held));
        if (given >= 0)
            need(!close(given));
        held = given = -1;
        break;
    }
    if (fd >= 0)
        need(!close(fd));
    model->returned_ns = now_ns(CLOCK_REALTIME);
}

static void give_turn(int number, char what)
{
    model->what = what;
    atomic_store(&model->turn, number);
    wait_for_turn(NOBODY);
    model->what = '-';
}

/* A program that has inherited the descriptor, and the model. */
static int heir(int fd, int memory)
{
    model = mmap(NULL, sizeof *model, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (model == MAP_FAILED)
        return 2;
    who = "heir";
    check_pread(fd, 0);
    write_on(fd, 0);
    check_map(fd);
    return 0;
}

static void have_child(int fd, const char *program, int memory)
{
    char descriptor[16], number[16];
    int how = (int)below(4);
    model->what = (char)('0' + how);
    pid_t child = fork();
    need(child >= 0);
    if (child == 0) {
        who = "child";
        if (how == 0) {
            check_pread(fd, 0);
            for (int count = 5; count-- > 0;)
                write_on(fd, 0);
            _exit(0);
        }
        if (how == 1) {
            check_pread(fd, 1);
            for (int count = 3; count-- > 0;)
                write_on(fd, 1);
            raw(SYS_exit_group, 0, 0, 0, 0, 0);
        }
        snprintf(descriptor, sizeof descriptor, "%d", fd);
        snprintf(number, sizeof number, "%d", memory);
        fcntl(fd, F_SETFD, 0);
        if (how == 2)
            unsetenv("LD_PRELOAD");
        execl(program, program, "heir", descriptor, number, NULL);
        _exit(99);
    }
    /* How it does without anybody who waits is the same; but the model has one at a time. */
    int status;
    need(waitpid(child, &status, 0) == child);
    if (status)
        wrong("a child ended with %x", (unsigned)status);
    model->returned_ns = now_ns(CLOCK_REALTIME);
    model->what = '-';
}

static void own_turn(int *fd, const char *program, int memory)
{
    struct stat found;
    switch (below(12)) {
    case 0: check_pread(*fd, 0); break;
    case 1:
        need(!fstat(*fd, &found));
        check_attributes(&found, "fstat");
        break;
    case 2: check_stat(); break;
    case 3: check_map(*fd); break;
    case 4:
        resize((int64_t)below((uint64_t)model->size + 5000));
        need(!ftruncate(*fd, model->size));
        model->returned_ns = now_ns(CLOCK_REALTIME);
        break;
    case 5: need(!(below(2) ? fsync(*fd) : fdatasync(*fd))); break;
    case 6:
        model->offset = below(2) ? model->size : (int64_t)below((uint64_t)model->size + 1);
        need(lseek(*fd, model->offset, SEEK_SET) == model->offset);
        break;
    case 7:
        model->offset = lseek(*fd, 0, SEEK_END);
        if (model->offset != model->size)
            wrong("it ends at %ld instead of %ld", model->offset, model->size);
        break;
    case 8: {
        need(!close(*fd));
        *fd = opened(O_RDWR | (model->appends ? O_APPEND : 0));
        model->description++;
        model->offset = 0;
        break;
    }
    case 9: {
        ssize_t count = read(*fd, found_bytes, 5000);
        int64_t left = model->size - model->offset;
        left = left < 0 ? 0 : left > 5000 ? 5000 : left;
        if (count != left || memcmp(found_bytes, model->bytes + model->offset, (size_t)left))
            wrong("read at %ld of %ld: %zd", model->offset, model->size, count);
        model->offset += left;
        break;
    }
    case 10: make_newer((int)below(2) * 2500); break;
    default: have_child(*fd, program, memory);
    }
    if (lseek(*fd, 0, SEEK_CUR) != model->offset)
        wrong("the offset is %ld instead of %ld", (long)lseek(*fd, 0, SEEK_CUR), model->offset);
}

static void one_file(const char *folder, int number, const int *sockets, const char *program, int memory)
{
    snprintf(model->path, sizeof model->path, "%s/b%d", folder, number);
    snprintf(model->other_path, sizeof model->other_path, "%s/c%d", folder, number);
    model->appends = (int)below(2);
    model->size = model->offset = 0;
    model->description++;
    model->mtime_ns = 0;
    model->begun_ns = 0;
    model->returned_ns = UINT64_MAX;
    int fd = opened(O_RDWR | O_CREAT | O_EXCL | (model->appends ? O_APPEND : 0));
    /* Alone for a while, or among others from the beginning. */
    int alone = (int)below(4);
    for (int round = 0; round < ROUNDS_OF_A_FILE && model->size < SIZE_MAX_BYTES; round++) {
        run_of_writes(fd);
        if (below(3) == 0)
            usleep((useconds_t)below(2500));
        if (below(4) < (uint64_t)alone) {
            own_turn(&fd, program, memory);
            continue;
        }
        int other = (int)below(OTHERS);
        char what = TURNS[below(sizeof TURNS - 1)];
        if (what == 'g')
            send_descriptor(sockets[other], fd);
        give_turn(other, what);
    }
    for (int other = 0; other < OTHERS; other++) {
        give_turn(other, 'r');
        give_turn(other, 'z');
    }
    need(!close(fd));
    need(!unlink(model->path));
}
