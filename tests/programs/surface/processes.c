/* Processes: descriptors that are passed on, closed by code that does not know them, limited; signals, threads that end inside calls. */
#include "surface.h"

extern char **environ;
extern pid_t __vfork(void) __attribute__((returns_twice));
extern int __clone(int (*)(void *), void *, int, void *, ...), pivot_root(const char *, const char *);
extern int capset(void *, const void *), fcntl64(int, int, ...);
static char *self;

static int fresh(const char *name, int flags)
{
    int f = open(at(name), O_RDWR | O_CREAT | O_TRUNC | flags, 0644);
    /* Two of these, and the library has adopted it. */
    if (pwrite(f, "0123456789", 10, 0) != 10 || pwrite(f, "0123456789", 10, 0) != 10)
        abort();
    return f;
}

static int ended(pid_t child)
{
    int status = -1;
    return waitpid(child, &status, 0) == child ? status : -1;
}

/* The offset is one for all who inherited the description. */
static void forks(void)
{
    int f = fresh("fork", 0), status;
    char text[8];
    SHOW(lseek(f, 2, SEEK_SET) + read(f, text, 2));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int right = read(f, text, 3) == 3 && pread(f, text, 1, 9) == 1 && pwrite(f, "child", 5, 10) == 5;
        _exit(right ? 3 : 4);
    }
    SHOW(ended(child));
    SHOW(lseek(f, 0, SEEK_CUR) + pread(f, text, 5, 10));
    SHOW(read(f, text, 3) + write(f, "parent", 6));
    child = vfork();
    if (child == 0) {
        char other[4];
        _exit(pread(f, other, 1, 0) == 1 && pwrite(f, "v", 1, 30) == 1 ? 5 : 6);
    }
    SHOW(ended(child));
    child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0)
        _exit(pwrite(f, "c", 1, 31) == 1 ? 7 : 8);
    SHOW(ended(child));
    child = _Fork();
    if (child == 0)
        _exit(pwrite(f, "F", 1, 32) == 1 ? 9 : 10);
    SHOW(ended(child));
    SHOW(lseek(f, 0, SEEK_CUR));
    char command[PATH_MAX];
    snprintf(command, sizeof command, "printf system >>%s/fork", base);
    SHOW(system(command));
    snprintf(command, sizeof command, "wc -c <%s/fork", base);
    FILE *from = popen(command, "r");
    SHOW(fscanf(from, "%d", &status) + status);
    SHOW(pclose(from));
    SHOW(close(f));
    SHOW_CONTENT(at("fork"));
}

static int in_clone(void *argument)
{
    return pwrite(*(int *)argument, "clone", 5, 0) == 5 ? 11 : 12;
}

static void clones(void)
{
    static char stack[64 * 1024] __attribute__((aligned(16)));
    int f = fresh("clone", 0);
    fflush(stdout);
    pid_t child = clone(in_clone, stack + sizeof stack, SIGCHLD, &f);
    SHOW(ended(child));
    SHOW(close(f));
    SHOW_CONTENT(at("clone"));
}

static void spawned(void)
{
    posix_spawn_file_actions_t actions;
    pid_t child;
    char program[] = "cat", *arguments[] = {program, NULL};
    int f = fresh("spawn", O_CLOEXEC);
    SHOW(posix_spawn_file_actions_init(&actions));
    SHOW(posix_spawn_file_actions_addopen(&actions, 0, at("spawn"), O_RDONLY, 0));
    SHOW(posix_spawn_file_actions_addopen(&actions, 1, at("spawned"), O_WRONLY | O_CREAT, 0640));
    SHOW(posix_spawn_file_actions_adddup2(&actions, 1, 9) + posix_spawn_file_actions_addclose(&actions, 9));
    SHOW(posix_spawn(&child, "/bin/cat", &actions, NULL, arguments, environ));
    SHOW(ended(child));
    SHOW(posix_spawnp(&child, "cat", &actions, NULL, arguments, environ));
    SHOW(ended(child));
    SHOW(posix_spawn_file_actions_addopen(&actions, 5, at("none"), O_RDONLY, 0));
    SHOW(posix_spawnp(&child, "cat", &actions, NULL, arguments, environ));
    SHOW(posix_spawn_file_actions_destroy(&actions));
    SHOW(close(f));
    SHOW_CONTENT(at("spawned"));
    SHOW_STAT(at("spawned"));
}

/* Programs that close what they do not know, and go on. */
static void closing(void)
{
    char text[16], path[64];
    int f = fresh("close", 0), g;
    SHOW_OPEN(g, dup(f));
    SHOW(pread(g, text, 10, 0) + pread(g, text, 10, 0) + lseek(g, 4, SEEK_SET) + lseek(f, 0, SEEK_CUR));
    SHOW(dup2(f, 400) + dup3(f, 401, O_CLOEXEC));
    SHOW(fcntl(f, F_DUPFD, 402) + fcntl(f, F_DUPFD_CLOEXEC, 403) + fcntl(f, F_DUPFD, 2000000000));
    SHOW(fcntl(401, F_GETFD) + fcntl(403, F_GETFD) * 10 + fcntl(400, F_GETFD));
    SHOW(dup3(f, f, 0));
    SHOW(pread(400, text, 10, 0) + pwrite(402, "four", 4, 4));
    SHOW(close_range(400, 402, CLOSE_RANGE_CLOEXEC) + fcntl(402, F_GETFD));
    SHOW(close_range(400, 403, 0));
    SHOW(pread(402, text, 10, 0));
    SHOW(close_range(10, 5, 0));
    snprintf(path, sizeof path, "/proc/self/fd/%d", f);
    SHOW_OPEN(g, open(path, O_RDONLY));
    SHOW(pread(g, text, 10, 0) + read(g, text, 3) + close(g));
    snprintf(path, sizeof path, "/dev/fd/%d", f);
    SHOW_OPEN(g, open(path, O_RDWR));
    SHOW(pwrite(g, "five", 4, 12) + close(g));
    char link[PATH_MAX] = {0};
    SHOW(readlink(path, link, sizeof link) - (ssize_t)strlen(at("close")));
    SHOW(strcmp(link, at("close")));
    for (int i = 3; i < 1024; i++)
        if (i != f)
            close(i);
    SHOW(pread(f, text, 10, 0) + pwrite(f, "still", 5, 20));
    SHOW(access(at("close"), R_OK) + access(at("none"), R_OK));
    int high = dup2(f, 3);
    SHOW(high);
    closefrom(4);
    SHOW(pread(3, text, 10, 0) + pwrite(3, "there", 5, 25));
    SHOW(syscall(SYS_close_range, 4, ~0U, 0));
    SHOW(pwrite(3, "!", 1, 30) + syscall(SYS_close, 3));
    SHOW(pread(3, text, 10, 0));
    SHOW_CONTENT(at("close"));
}

static int send_one(int socket, int f, int many)
{
    char byte = 'x', control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec vector = {&byte, 1};
    struct mmsghdr message = {.msg_hdr = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control}};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message.msg_hdr);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof f);
    memcpy(CMSG_DATA(head), &f, sizeof f);
    return many ? sendmmsg(socket, &message, 1, 0) : (int)sendmsg(socket, &message.msg_hdr, 0);
}

static int receive_one(int socket, int many)
{
    char byte, control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec vector = {&byte, 1};
    struct mmsghdr message = {.msg_hdr = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control}};
    int f = -1;
    if ((many ? recvmmsg(socket, &message, 1, 0, NULL) : (int)recvmsg(socket, &message.msg_hdr, 0)) == 1)
        memcpy(&f, CMSG_DATA(CMSG_FIRSTHDR(&message.msg_hdr)), sizeof f);
    return f;
}

/* Descriptors handed to another process, and back: the offset goes on. */
static void handed_over(void)
{
    int ends[2], f = fresh("handed", 0), back;
    char text[16];
    SHOW(lseek(f, 1, SEEK_SET));
    SHOW(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int got = receive_one(ends[1], 0), own = open(at("back"), O_RDWR | O_CREAT, 0644);
        int right = read(got, text, 4) == 4 && pwrite(got, "HANDED", 6, 20) == 6 && pwrite(own, "back", 4, 0) == 4;
        right &= lseek(own, 2, SEEK_SET) == 2 && send_one(ends[1], own, 1) == 1;
        _exit(right ? 13 : 14);
    }
    SHOW(send_one(ends[0], f, 0));
    SHOW((back = receive_one(ends[0], 1)) >= 0);
    SHOW(ended(child));
    SHOW(lseek(f, 0, SEEK_CUR) + read(f, text, 2));
    SHOW(read(back, text, 9) + pwrite(back, "again", 5, 4) + pread(back, text, 9, 0));
    SHOW(close(f) + close(back) + close(ends[0]) + close(ends[1]));
    SHOW_CONTENT(at("handed"));
    SHOW_CONTENT(at("back"));
}

/* In a child, because it does not come back from there. */
static int as_another(void)
{
    char text[16];
    int f = fresh("root's", 0), g, failed = 0;
    failed |= fchmod(f, 0600) != 0 || mkdir(at("theirs"), 0700) != 0 || chown(at("theirs"), 1000, 1000) != 0;
    failed |= access(at("root's"), R_OK) != 0;
    gid_t groups[2] = {1000, 2000};
    failed |= setgroups(2, groups) != 0 || setgid(1000) != 0 || setegid(1000) != 0 || setuid(1000) != 0;
    printf("    open %d %s\n", failed, open(at("root's"), O_RDONLY) < 0 ? strerrorname_np(errno) : "open");
    printf("    access %s\n", access(at("root's"), R_OK) < 0 ? strerrorname_np(errno) : "allowed");
    printf("    still %zd\n", pread(f, text, 10, 0));
    g = open(at("theirs/file"), O_RDWR | O_CREAT, 0644);
    printf("    own %zd %zd\n", pwrite(g, "mine", 4, 0), pwrite(g, "mine", 4, 0));
    struct stat s;
    failed = stat(at("theirs/file"), &s);
    printf("    stat %d uid %d gid %d\n", failed, s.st_uid, s.st_gid);
    failed = seteuid(0);
    printf("    back %d %d\n", failed, setresuid(0, 0, 0));
    printf("    chmod %s\n", chmod(at("root's"), 0666) < 0 ? strerrorname_np(errno) : "allowed");
    fflush(stdout);
    return 15;
}

static int for_a_while(void)
{
    int f = fresh("while", 0);
    int failed = fchmod(f, 0600) != 0 || access(at("while"), R_OK) != 0 || setresgid(-1, 1000, -1) != 0;
    failed |= setreuid(-1, 1000) != 0 || seteuid(1000) != 0;
    printf("    %d\n", failed);
    printf("    open %s\n", open(at("while"), O_RDONLY) < 0 ? strerrorname_np(errno) : "open");
    failed = seteuid(0) != 0 || setregid(-1, 0) != 0 || setresuid(-1, 0, -1) != 0 || initgroups("root", 0) != 0;
    printf("    %d\n", failed);
    printf("    open %s\n", open(at("while"), O_RDONLY) < 0 ? strerrorname_np(errno) : "open");
    failed = setfsuid(1000) != 0 || setfsuid(1000) != 1000;
    printf("    %d\n", failed);
    printf("    open %s\n", open(at("while"), O_RDONLY) < 0 ? strerrorname_np(errno) : "open");
    setfsuid(0);
    printf("    %d open %s\n", setfsgid(0), open(at("while"), O_RDONLY) < 0 ? strerrorname_np(errno) : "open");
    fflush(stdout);
    return 16;
}

static int elsewhere(void)
{
    int f = fresh("seen", 0);
    char text[16];
    int failed = mkdir(at("inner"), 0755) != 0 || access(at("seen"), R_OK) != 0;
    printf("    %d unshare %d\n", failed, unshare(CLONE_NEWNS));
    printf("    stat %d %zd\n", access(at("seen"), R_OK), pread(f, text, 10, 0));
    failed = chroot(base);
    printf("    chroot %d %d\n", failed, chdir("/"));
    printf("    inside %d %zd\n", access("/seen", R_OK), pread(f, text, 10, 0));
    printf("    outside %s\n", access(at("seen"), R_OK) < 0 ? strerrorname_np(errno) : "there");
    int g = open("/inner/file", O_RDWR | O_CREAT, 0644);
    printf("    %zd\n", pwrite(g, "inner", 5, 0) + pwrite(g, "inner", 5, 0));
    close(g);
    fflush(stdout);
    return 17;
}

/* What few programs call. */
static int rare(void)
{
    static char stack[64 * 1024] __attribute__((aligned(16)));
    char text[16], *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int f = fresh("rare", 0), ends[2], terminal;
    wordexp_t words;
    SHOW((fcntl64(f, F_GETFL) & O_ACCMODE) + pkey_mprotect(page, 4096, PROT_READ, -1));
    SHOW(pread(f, page, 10, 0));
    SHOW(shmdt(page));
    SHOW(wordexp("two words", &words, WRDE_NOCMD) + (int)words.we_wordc);
    pid_t child = __vfork();
    if (child == 0)
        _Exit(pwrite(f, "V", 1, 1) == 1 ? 30 : 31);
    SHOW(ended(child));
    SHOW(ended(__clone(in_clone, stack + sizeof stack, SIGCHLD, &f)));
    fflush(stdout);
    child = forkpty(&terminal, NULL, NULL, NULL);
    if (child == 0)
        _exit(pwrite(f, "P", 1, 2) == 1 ? 32 : 33);
    SHOW(ended(child));
    SHOW(pipe(ends));
    fflush(stdout);
    child = fork();
    if (child == 0) {
        if (daemon(1, 1) == 0)
            pwrite(f, "D", 1, 3) == 1 && pwrite(f, "D", 1, 3) == 1 && write(ends[1], "done", 4) == 4 ? _exit(0) : _exit(1);
        _exit(34);
    }
    SHOW(close(ends[1]) + ended(child) + read(ends[0], text, 4));
    SHOW(pread(f, text, 10, 0) + (text[3] == 'D'));
    SHOW(pivot_root("/no-such-place", "/no-such-place"));
    int namespace = open("/proc/self/ns/mnt", O_RDONLY);
    SHOW(setns(namespace, CLONE_NEWNS));
    SHOW(fchown(f, 1000, 1000) + fchmod(f, 0600) + access(at("rare"), R_OK));
    struct {
        unsigned version;
        int pid;
    } head = {0x20080522, 0};
    unsigned none[6] = {0};
    SHOW(capset(&head, none));
    SHOW(open(at("rare"), O_RDONLY));
    SHOW(faccessat(AT_FDCWD, at("rare"), R_OK, AT_EACCESS));
    SHOW(pread(f, text, 10, 0));
    fflush(stdout);
    return 35;
}

static void in_child(int (*run)(void))
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0)
        _exit(run());
    SHOW(ended(child));
}

static volatile sig_atomic_t signals, failures;
static int handled_file;

static void count_signal(int number)
{
    (void)number;
    char byte;
    signals++;
    if (handled_file >= 0 && (pread(handled_file, &byte, 1, 0) != 1 || pwrite(handled_file, "h", 1, 5) != 1))
        failures++;
}

static void limits(void)
{
    struct rlimit before, now;
    int f = fresh("limited", 0), g;
    handled_file = -1;
    signal(SIGXFSZ, count_signal);
    SHOW(getrlimit(RLIMIT_FSIZE, &before));
    now = before;
    now.rlim_cur = 4096;
    SHOW(setrlimit(RLIMIT_FSIZE, &now));
    SHOW(pwrite(f, "inside", 6, 4090) + pwrite(f, "beyond", 6, 4093));
    SHOW(pwrite(f, "beyond", 6, 4096));
    SHOW(signals);
    SHOW(ftruncate(f, 5000));
    SHOW(fallocate(f, 0, 0, 5000));
    SHOW(signals);
    SHOW(prlimit(0, RLIMIT_FSIZE, &before, NULL));
    SHOW(pwrite(f, "beyond", 6, 4096));
    SHOW(prlimit64(0, RLIMIT_NOFILE, NULL, (void *)&before) + getrlimit(RLIMIT_NOFILE, &before));
    now = before;
    now.rlim_cur = 3;
    SHOW(setrlimit64(RLIMIT_NOFILE, (void *)&now));
    SHOW_OPEN(g, open(at("limited"), O_RDONLY));
    SHOW(pread(f, &(char[8]){0}, 8, 0) + access(at("limited"), R_OK));
    SHOW(dup(f));
    SHOW(setrlimit(RLIMIT_NOFILE, &before) + close(f));
    SHOW_CONTENT(at("limited"));
}

/* A timer that fires all the time, with a handler that reads and writes itself. */
static void interrupted(int flags)
{
    struct sigaction action = {.sa_handler = count_signal, .sa_flags = flags};
    struct itimerval often = {{0, 2000}, {0, 2000}}, never = {{0, 0}, {0, 0}};
    int f = fresh("interrupted", 0), right = 0, ends[2];
    char text[8];
    handled_file = f;
    signals = 0;
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    for (int i = 0; i < 1000 || (signals < 5 && i < 1000000); i++)
        right += pwrite(f, "same", 4, 100) == 4 && pread(f, text, 4, 100) == 4 && memcmp(text, "same", 4) == 0 ? i < 1000 : 0;
    SHOW(right);
    SHOW(pipe(ends));
    if (!(flags & SA_RESTART))
        SHOW(read(ends[0], text, 1));
    setitimer(ITIMER_REAL, &never, NULL);
    SHOW((signals >= 5) + failures);
    signal(SIGALRM, SIG_DFL);
    SHOW(close(f) + close(ends[0]) + close(ends[1]));
}

static int thread_file;
static pthread_barrier_t begun;

static void *forever(void *argument)
{
    char text[64];
    pthread_setcanceltype(argument ? PTHREAD_CANCEL_ASYNCHRONOUS : PTHREAD_CANCEL_DEFERRED, NULL);
    pthread_barrier_wait(&begun);
    for (;;) {
        if (pread(thread_file, text, sizeof text, 0) < 10 || pwrite(thread_file, "thread", 6, 50) != 6)
            abort();
        pthread_testcancel();
    }
    return NULL;
}

static void *leave(void *argument)
{
    char text[64];
    if (pread(thread_file, text, sizeof text, 0) < 10)
        abort();
    pthread_exit(argument);
}

static void threads(void)
{
    pthread_t thread;
    void *result;
    int cancelled = 0, left = 0, right = 0;
    char text[64];
    thread_file = fresh("threads", 0);
    pthread_barrier_init(&begun, NULL, 2);
    for (int i = 0; i < 60; i++) {
        pthread_create(&thread, NULL, forever, NULL);
        pthread_barrier_wait(&begun);
        usleep((useconds_t)(i * 17 % 400));
        pthread_cancel(thread);
        pthread_join(thread, &result);
        cancelled += result == PTHREAD_CANCELED;
        pthread_create(&thread, NULL, leave, &left);
        pthread_join(thread, &result);
        left += result == &left;
    }
    SHOW(cancelled * 1000 + left);
    for (int i = 0; i < 100; i++)
        right += pread(thread_file, text, 6, 50) == 6 && memcmp(text, "thread", 6) == 0;
    SHOW(right);
    SHOW(close(thread_file));
    SHOW(access(at("threads"), R_OK));
}

static void executed(void)
{
    char option[] = "execute", *arguments[] = {self, option, (char *)(uintptr_t)base, NULL};
    int f = fresh("execute", 0);
    dup2(f, 77);
    fflush(stdout);
    for (int how = 0; how < 9; how++) {
        pid_t child = fork();
        if (child == 0) {
            switch (how) {
            case 0: execv(self, arguments); break;
            case 1: execve(self, arguments, environ); break;
            case 2: execvp(self, arguments); break;
            case 3: execl(self, self, option, base, (char *)NULL); break;
            case 4: execveat(AT_FDCWD, self, arguments, environ, 0); break;
            case 5: fexecve(open(self, O_RDONLY | O_CLOEXEC), arguments, environ); break;
            case 6: execvpe(self, arguments, environ); break;
            case 7: execlp(self, self, option, base, (char *)NULL); break;
            case 8: execle(self, self, option, base, (char *)NULL, environ); break;
            }
            _exit(99);
        }
        SHOW(ended(child));
    }
    SHOW(close(77) + close(f));
    SHOW_CONTENT(at("execute"));
}

int main(int argc, char **argv)
{
    if (argc == 3) {
        char text[16];
        return lseek(77, 0, SEEK_END) >= 10 && pwrite(77, "E", 1, 3) == 1 && pread(77, text, 10, 0) == 10 ? 21 : 22;
    }
    if (argc != 2)
        return 2;
    self = argv[0];
    base = argv[1];
    umask(022);
    forks();
    clones();
    spawned();
    handed_over();
    in_child(as_another);
    in_child(for_a_while);
    in_child(elsewhere);
    in_child(rare);
    limits();
    interrupted(0);
    interrupted(SA_RESTART);
    threads();
    executed();
    closing();
    return 0;
}
