/* What happens around descriptors: fork and its kin, duplicates, threads, signals, mappings, limits, other rights. */
#include "check.h"
#include <sys/prctl.h>

const char *base;
extern char **environ;

static void in_child(void (*work)(int), int argument)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        work(argument);
        fflush(stdout);
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    printf("child ended %d\n", status);
}

static void append_from_child(int f)
{
    SHOW(write(f, "child ", 6));
    SHOW(reach(at("shared")));
    SHOW(pwrite(f, "C", 1, 0));
}

static void offsets(void)
{
    int f, g;
    char buffer[32] = {0};
    SHOW_OPEN(f, open(at("shared"), O_RDWR | O_CREAT, 0644));
    SHOW(write(f, "parent ", 7));
    in_child(append_from_child, f);
    SHOW(write(f, "again ", 6));
    SHOW_OPEN(g, dup(f));
    SHOW(write(g, "dup ", 4));
    SHOW(write(f, "end", 3));
    SHOW(lseek(g, 0, SEEK_CUR));
    SHOW_CONTENT(at("shared"));
    SHOW(dup2(f, 77));
    SHOW(pread(77, buffer, 6, 0));
    SHOW(strcmp(buffer, "Carent"));
    SHOW(close(77));
    SHOW(pread(77, buffer, 6, 0));
    SHOW(fcntl(f, F_DUPFD, 80));
    SHOW(pread(80, buffer, 6, 0));
    SHOW(close_range(78, 90, 0));
    SHOW(pread(80, buffer, 6, 0));
    SHOW(close(f) + close(g));
}

static void reuse_behind_our_back(void)
{
    char buffer[32] = {0};
    int f;
    SHOW_OPEN(f, open(at("first"), O_RDWR | O_CREAT, 0644));
    SHOW(pwrite(f, "first file", 10, 0));
    SHOW(pread(f, buffer, 5, 0));
    FILE *stream = fdopen(f, "r+");
    fclose(stream);
    FILE *other = fopen(at("other"), "w+");
    SHOW(fileno(other) == f);
    fputs("other file", other);
    fflush(other);
    SHOW(pread(f, buffer, 5, 0));
    SHOW(strcmp(buffer, "other"));
    fclose(other);
    FILE *narrow = fopen(at("first"), "r");
    SHOW(fileno(narrow) == f);
    SHOW(pread(f, buffer, 5, 0));
    SHOW(pwrite(f, "x", 1, 0));
    fclose(narrow);
    SHOW_CONTENT(at("first"));
}

static void spawned(void)
{
    fflush(stdout);
    int f;
    SHOW_OPEN(f, open(at("spawned"), O_WRONLY | O_CREAT, 0644));
    SHOW(write(f, "before ", 7));
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, f, 1);
    char *arguments[] = {"sh", "-c", "echo from sh; (echo sub); echo more", NULL};
    pid_t child;
    SHOW(posix_spawnp(&child, "sh", &actions, NULL, arguments, environ));
    SHOW(waitpid(child, NULL, 0) == child);
    SHOW(write(f, "after\n", 6));
    fflush(stdout);
    if (vfork() == 0) {
        dup2(f, 1);
        execlp("echo", "echo", "vforked", (char *)NULL);
        _exit(1);
    }
    wait(NULL);
    SHOW(write(f, "end\n", 4));
    char command[PATH_MAX + 32];
    snprintf(command, sizeof command, "echo system >> %s", at("spawned"));
    SHOW(system(command));
    SHOW(close(f));
    SHOW_CONTENT(at("spawned"));
}

static void *thread(void *argument)
{
    int f = *(int *)argument;
    for (int i = 0; i < 200; i++)
        if (write(f, "0123456789", 10) != 10)
            abort();
    return NULL;
}

static void threads(void)
{
    int f;
    pthread_t ids[4];
    SHOW_OPEN(f, open(at("threads"), O_WRONLY | O_CREAT, 0644));
    for (int i = 0; i < 4; i++)
        pthread_create(&ids[i], NULL, thread, &f);
    for (int i = 0; i < 4; i++)
        pthread_join(ids[i], NULL);
    SHOW(lseek(f, 0, SEEK_CUR));
    SHOW_FSTAT(f);
    SHOW(close(f));
}

static void *waiter(void *argument)
{
    char byte;
    if (read(*(int *)argument, &byte, 1) < 0)
        abort();
    return NULL;
}

static void cancelled(void)
{
    int ends[2];
    pthread_t id;
    void *result = NULL;
    SHOW(pipe(ends));
    SHOW(pthread_create(&id, NULL, waiter, &ends[0]));
    usleep(50000);
    SHOW(pthread_cancel(id));
    SHOW(pthread_join(id, &result));
    SHOW(result == PTHREAD_CANCELED);
    SHOW(close(ends[0]) + close(ends[1]));
}

static int count_descriptors(void)
{
    int count = 0;
    DIR *directory = opendir("/proc/self/fd");
    while (readdir(directory) != NULL)
        count++;
    closedir(directory);
    return count;
}

/* A line of children, each of which uses the directory: none keeps its parents' descriptors. */
static void generations(int depth)
{
    reach(at("shared"));
    if (depth > 0) {
        in_child(generations, depth - 1);
        return;
    }
    SHOW(count_descriptors() < 12);
}

static int signal_file;
static volatile int signals;

static void handler(int number)
{
    (void)number;
    int saved = errno;
    if (write(signal_file, "HANDLER.", 8) == 8 && reach(at("signals")) == 0)
        signals = signals + 1;
    errno = saved;
}

static void signal_handlers(void)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    struct itimerval often = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
    SHOW_OPEN(signal_file, open(at("signals"), O_RDWR | O_CREAT, 0644));
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    for (int i = 0; i < 2000; i++) {
        errno = 77;
        if (write(signal_file, "ordinary", 8) != 8 || errno != 77)
            abort();
    }
    while (signals == 0)
        usleep(100);
    setitimer(ITIMER_REAL, &never, NULL);
    struct stat s;
    fstat(signal_file, &s);
    SHOW(s.st_size == 8 * (2000 + (long long)signals));
    static char all[1 << 20];
    ssize_t length = pread(signal_file, all, sizeof all, 0);
    int ordinary = 0, from_handler = 0;
    for (ssize_t i = 0; i + 8 <= length; i += 8) {
        ordinary += memcmp(all + i, "ordinary", 8) == 0;
        from_handler += memcmp(all + i, "HANDLER.", 8) == 0;
    }
    SHOW(ordinary);
    SHOW(from_handler == signals && signals > 0);
    SHOW(close(signal_file));
}

static void mappings(void)
{
    int f, g;
    char buffer[16] = {0};
    SHOW_OPEN(f, open(at("mapped"), O_RDWR | O_CREAT, 0644));
    SHOW(ftruncate(f, 4096));
    SHOW(pwrite(f, "before", 6, 0));
    char *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
    SHOW(map != MAP_FAILED && memcmp(map, "before", 6) == 0);
    memcpy(map, "mapped", 6);
    SHOW(pread(f, buffer, 6, 0));
    SHOW(strcmp(buffer, "mapped"));
    SHOW_OPEN(g, open(at("mapped"), O_RDWR));
    SHOW(pread(g, buffer, 6, 0));
    SHOW(pread(g, buffer, 6, 0));
    SHOW(strcmp(buffer, "mapped"));
    SHOW(pwrite(g, "BY", 2, 0));
    SHOW(memcmp(map, "BYpped", 6));
    SHOW(munmap(map, 4096));
    SHOW(close(f) + close(g));
    SHOW_CONTENT(at("mapped"));
}

static void limited(int unused)
{
    (void)unused;
    int f;
    struct rlimit limit = {1000, 1000};
    signal(SIGXFSZ, SIG_IGN);
    SHOW_OPEN(f, open(at("limited"), O_RDWR | O_CREAT, 0644));
    SHOW(pwrite(f, "x", 1, 2000));
    SHOW(setrlimit(RLIMIT_FSIZE, &limit));
    SHOW(pwrite(f, "x", 1, 2000));
    SHOW(pwrite(f, "x", 1, 100));
    SHOW(ftruncate(f, 5000));
}

static void other_user(int f)
{
    char buffer[4];
    SHOW(reach(at("private/file")));
    SHOW(access(at("private/file"), R_OK));
    SHOW(setgid(65534));
    SHOW(setuid(65534));
    SHOW(reach(at("private/file")));
    SHOW(access(at("private"), X_OK));
    SHOW(mkdir(at("refused"), 0755));
    SHOW(pread(f, buffer, 4, 0));
    SHOW(chmod(at("shared"), 0666));
    SHOW(fchmod(f, 0666));
    int g;
    SHOW_OPEN(g, open(at("private/file"), O_RDONLY));
}

static void effective_user(int unused)
{
    (void)unused;
    SHOW(setresuid(0, 65534, 0));
    SHOW(reach(at("private/file")));
    SHOW(access(at("private/file"), R_OK));
    SHOW(faccessat(AT_FDCWD, at("private/file"), R_OK, AT_EACCESS));
    SHOW(setresuid(0, 0, 0));
    SHOW(reach(at("private/file")));
}

static void other_root(int unused)
{
    (void)unused;
    SHOW(chroot(base));
    SHOW(reach("/shared"));
    SHOW(reach(at("shared")));
    SHOW(mkdir("/inside", 0755));
}

static void by_number(int unused)
{
    (void)unused;
    SHOW(syscall(SYS_setuid, 65534));
    SHOW(reach(at("private/file")));
    SHOW(syscall(SYS_mkdir, at("refused"), 0755));
    SHOW(syscall(SYS_getpid) == getpid());
}

static void close_everything(int unused)
{
    (void)unused;
    char buffer[4];
    for (int f = 3; f < 2000; f++)
        close(f);
    SHOW(reach(at("shared")));
    int f;
    SHOW_OPEN(f, open(at("shared"), O_RDWR));
    SHOW(pread(f, buffer, 4, 0));
    closefrom(3);
    SHOW(pread(f, buffer, 4, 0));
    SHOW(reach(at("shared")));
    for (int number = 3; number < 2000; number++)
        syscall(SYS_close, number);
    SHOW(reach(at("shared")));
    SHOW(mkdir(at("after-close"), 0755));
}

static volatile pid_t handlers_process;
static volatile int handlers_forks, handlers_failures;

static void forking_handler(int number)
{
    (void)number;
    pid_t child = fork();
    if (child == 0) {
        handlers_process = 0;
        return;
    }
    int status = -1;
    handlers_failures += waitpid(child, &status, 0) != child || status != 0;
    handlers_forks++;
}

/* A handler that forks, and whose child goes on with the call the handler interrupted. */
static void forks_in_handlers(int unused)
{
    (void)unused;
    char buffer[4096] = {0};
    struct sigaction action = {.sa_handler = forking_handler, .sa_flags = SA_RESTART};
    int f;
    SHOW_OPEN(f, open(at("forked"), O_RDWR | O_CREAT, 0644));
    SHOW(pwrite(f, buffer, sizeof buffer, 0));
    sigaction(SIGALRM, &action, NULL);
    handlers_process = getpid();
    for (int i = 0; i < 100; i++) {
        struct itimerval once = {{0, 0}, {0, 100 + i % 150}};
        int before = handlers_forks, calls = 0;
        setitimer(ITIMER_REAL, &once, NULL);
        while (handlers_forks == before) {
            if (pread(f, buffer, sizeof buffer, 0) != sizeof buffer || reach(at("forked")) != 0 ||
                pwrite(f, buffer, 100, 0) != 100)
                _exit(3);
            if (handlers_process == 0 && ++calls == 50)
                _exit(0);
        }
    }
    SHOW(handlers_forks);
    SHOW(handlers_failures);
    SHOW(close(f));
}

/* Children that change themselves in their parent's memory: the parent stays what it was, and as fast. */
static void borrowed_memory(int unused)
{
    (void)unused;
    volatile int before = 0, right = 0;
    SHOW_OPEN(before, open(at("shared"), O_RDONLY));
    SHOW(reach(at("shared")));
    before = count_descriptors();
    for (int i = 0; i < 60; i++) {
        pid_t child = vfork();
        if (child == 0) {
            int failed = i >= 30 ? chroot(base) != 0 || reach("/shared") != 0 || reach(at("shared")) == 0
                               : setuid(1000) != 0 || reach(at("shared")) != 0;
            _exit(failed);
        }
        int status = -1;
        right += waitpid(child, &status, 0) == child && status == 0;
        right += reach(at("shared")) == 0;
    }
    SHOW(right);
    SHOW(count_descriptors() - before <= 1);
    for (int i = 0; i < 10000; i++)
        right += reach(at("shared")) == 0;
    SHOW(right);
}

static void rights(void)
{
    int f;
    SHOW(chmod(base, 0755));
    SHOW(mkdir(at("private"), 0700));
    SHOW_OPEN(f, open(at("private/file"), O_RDWR | O_CREAT, 0600));
    SHOW(pwrite(f, "secret", 6, 0));
    in_child(other_user, f);
    in_child(effective_user, 0);
    in_child(other_root, 0);
    in_child(by_number, 0);
    in_child(limited, 0);
    in_child(close_everything, 0);
    in_child(borrowed_memory, 0);
    in_child(forks_in_handlers, 0);
    SHOW_STAT(at("shared"));
    SHOW(pwrite(f, "S", 1, 0));
    SHOW(close(f));
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    base = argv[1];
    offsets();
    reuse_behind_our_back();
    signal_handlers();
    spawned();
    threads();
    cancelled();
    in_child(generations, 10);
    mappings();
    rights();
    return 0;
}
