/* heir PATH SERVICE: a fork during the creation of a session. Another thread makes the session with the instance of PATH, and waits because
 * this program has stopped the process SERVICE. The child becomes user 1000 and prints what it has of the session; afterwards the parent
 * says whether it has one. */
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

static const char *path;

static void *ask(void *none)
{
    char value[8];
    getxattr(path, "user.none", value, sizeof value);
    return none;
}

/* Sockets and memory files among this process's descriptors, but for the standard ones. */
static int found(int print)
{
    int count = 0;
    for (int descriptor = 3; descriptor < 1024; descriptor++) {
        char link[64], target[256];
        snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
        ssize_t length = readlink(link, target, sizeof target - 1);
        if (length < 0)
            continue;
        target[length] = 0;
        if (strncmp(target, "socket:", 7) && strncmp(target, "/memfd:", 7))
            continue;
        count++;
        if (print)
            printf("inherited: %d %s\n", descriptor, target);
    }
    return count;
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    path = arguments[1];
    pid_t service = atoi(arguments[2]);
    setvbuf(stdout, NULL, _IOLBF, 0);
    /* The library reads the mounts now; what it needs later it must not find in use by this thread. */
    char value[8];
    getxattr("/", "user.none", value, sizeof value);
    kill(service, SIGSTOP);
    pthread_t thread;
    pthread_create(&thread, NULL, ask, NULL);
    usleep(100000);
    for (int round = 0; round < 2000 && found(0) == 0; round++)
        usleep(100);
    printf("while it is made: %s\n", found(0) ? "a socket" : "nothing");
    pid_t child = fork();
    if (child == 0) {
        if (setgid(1000) || setuid(1000))
            _exit(1);
        _exit(found(1) > 0 ? 3 : 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    kill(service, SIGCONT);
    pthread_join(thread, NULL);
    printf("child %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
    return 0;
}
