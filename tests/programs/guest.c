/* guest TEST NAME DIRECTORY: the first process of a virtual machine. Mounts what a system has, with control groups of version 2 only, loads
 * the modules of /modules, runs the test in DIRECTORY, says how it ended, and switches the machine off. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void mounted(const char *kind, const char *at)
{
    mkdir(at, 0755);
    if (mount(kind, at, kind, 0, NULL))
        printf("guest: cannot mount %s: %s\n", at, strerror(errno));
}

static void load(const char *module)
{
    char path[64];
    snprintf(path, sizeof path, "/modules/%s.ko", module);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || syscall(SYS_finit_module, file, "", 0))
        printf("guest: cannot load %s: %s\n", path, strerror(errno));
}

static void become(char **arguments)
{
    setsid();
    setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin", 1);
    setenv("HOME", "/root", 1);
    setenv("POOLFS_GUEST", arguments[3], 1);
    execl(arguments[1], arguments[1], "--include-ignored", "--exact", arguments[2], "--nocapture", "--test-threads", "1", (char *)NULL);
    printf("guest: cannot start %s: %s\n", arguments[1], strerror(errno));
    fflush(stdout);
    _exit(127);
}

int main(int count, char **arguments)
{
    static const char *const mounts[][2] = {
        {"proc", "/proc"},       {"sysfs", "/sys"},     {"devtmpfs", "/dev"},           {"devpts", "/dev/pts"},
        {"tmpfs", "/dev/shm"},   {"mqueue", "/dev/mqueue"}, {"cgroup2", "/sys/fs/cgroup"}, {"tmpfs", "/run"},
    };
    static const char *const modules[] = {"fuse", "loop", "overlay"};
    for (size_t i = 0; i < sizeof mounts / sizeof *mounts; i++)
        mounted(mounts[i][0], mounts[i][1]);
    for (size_t i = 0; i < sizeof modules / sizeof *modules; i++)
        load(modules[i]);
    fflush(stdout);
    pid_t test = count == 4 ? fork() : -1, ended;
    if (test == 0)
        become(arguments);
    int status = 255 << 8;
    while ((ended = wait(&status)) != test && (ended > 0 || errno == EINTR))
        ;
    printf("guest: the test ended with %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    fflush(stdout);
    sync();
    reboot(RB_POWER_OFF);
    return 0;
}
