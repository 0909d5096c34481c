/* Calls that a signal handler leaves by siglongjmp, at any point: the same results afterwards, and still by the library. */
#include "check.h"
#include <setjmp.h>

const char *base;
static sigjmp_buf back;
static volatile sig_atomic_t inside;
static char stack[64 * 1024];

static void handler(int number)
{
    (void)number;
    if (inside) {
        inside = 0;
        siglongjmp(back, 1);
    }
}

/* Calls of every kind, until the handler ends them. */
static void work(int f, int directory)
{
    char buffer[4096];
    struct stat s;
    for (;;) {
        if (pread(f, buffer, sizeof buffer, 0) != sizeof buffer || pwrite(f, "same", 4, 100) != 4)
            abort();
        if (stat(at("jumps"), &s) != 0 || fstatat(directory, "jumps", &s, 0) != 0 || access(at("none"), F_OK) == 0)
            abort();
    }
}

static void jump(int f, int directory, int flags, int rounds)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    sigaction(SIGALRM, &action, NULL);
    for (volatile int i = 0; i < rounds; i++) {
        struct itimerval once = {{0, 0}, {0, 50 + i * 7 % 400}};
        if (sigsetjmp(back, 1) == 0) {
            inside = 1;
            setitimer(ITIMER_REAL, &once, NULL);
            work(f, directory);
        }
    }
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    base = argv[1];
    static char content[4096], buffer[4096];
    memset(content, 'c', sizeof content);
    memcpy(content + 100, "same", 4);
    stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    int f, directory;
    SHOW_OPEN(f, open(at("jumps"), O_RDWR | O_CREAT, 0644));
    SHOW_OPEN(directory, open(base, O_RDONLY | O_DIRECTORY));
    SHOW(pwrite(f, content, sizeof content, 0));
    jump(f, directory, 0, 1000);
    SHOW(sigaltstack(&other, NULL));
    jump(f, directory, SA_ONSTACK, 1000);
    int right = 0;
    for (int i = 0; i < 3000; i++)
        right += pread(f, buffer, sizeof buffer, 0) == sizeof buffer && memcmp(buffer, content, sizeof buffer) == 0;
    SHOW(right);
    SHOW_STAT(at("jumps"));
    SHOW(setuid(getuid()));
    SHOW(pread(f, buffer, sizeof buffer, 0));
    SHOW(close(f) + close(directory));
    return 0;
}
