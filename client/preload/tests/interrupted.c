/* Calls that a signal interrupts between two instructions, by a handler that forks, or that leaves the call by siglongjmp. */
#include "check.h"
#include <setjmp.h>
#include <ucontext.h>

#define SINGLE_STEP 0x100UL

const char *base;
static sigjmp_buf back;
static volatile int is_child, failures;

/* A number of instructions into a call, after so many that are atomic or call the kernel. */
struct moment {
    int marks, steps;
};
static volatile struct moment now, until;
static void (*volatile interrupted)(void);
static int file, directory;
static char path[PATH_MAX];

static void leave(void)
{
    siglongjmp(back, 1);
}

static void fork_here(void)
{
    pid_t child = fork();
    int status = -1;
    if (child == 0)
        is_child = 1;
    else
        failures += waitpid(child, &status, 0) != child || status != 0;
}

/* Runs after each instruction of a call. */
static void stepped(int number, siginfo_t *info, void *context)
{
    (void)number, (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *instruction = (const unsigned char *)registers[REG_RIP];
    int calls_kernel = instruction[0] == 0x0f && instruction[1] == 0x05;
    if (calls_kernel && registers[REG_RAX] == SYS_rt_sigprocmask && registers[REG_RDI] == SIG_SETMASK) {
        /* Signals are to be held back, this one too, which the kernel would take for a fault. */
        registers[REG_EFL] &= ~SINGLE_STEP;
        now = until;
    } else if (now.marks < until.marks) {
        now.marks += calls_kernel || instruction[0] == 0xf0;
    } else if (++now.steps == until.steps) {
        registers[REG_EFL] &= ~SINGLE_STEP;
        interrupted();
    }
}

static void set_stepping(int on)
{
    if (on)
        __asm__ volatile("sub $128, %%rsp; pushfq; orq $0x100, (%%rsp); popfq; add $128, %%rsp" ::: "memory", "cc");
    else
        __asm__ volatile("sub $128, %%rsp; pushfq; andq $~0x100, (%%rsp); popfq; add $128, %%rsp" ::: "memory", "cc");
}

static int by_path(void)
{
    char value[8];
    return lgetxattr(path, "user.none", value, sizeof value) < 0 && errno == ENODATA;
}

static int by_directory(void)
{
    return mkdirat(directory, "stepped", 0700) < 0 && errno == EEXIST;
}

static int reading(void)
{
    char bytes[8];
    return pread(file, bytes, sizeof bytes, 0) == sizeof bytes;
}

static int writing(void)
{
    return pwrite(file, "written", 7, 100) == 7;
}

static int (*const calls[])(void) = {by_path, writing};

/* What a child does after the call its parent's handler forked in. */
static void go_on(int right)
{
    struct stat s;
    right = right && stat("/", &s) == 0;
    usleep(10000);
    for (int i = 0; i < 3; i++)
        right = right && chmod(path, 0600 + i) == 0 && reach(path) == 0 && writing() && reading();
    _exit(!right);
}

/* One call, interrupted at a moment; says whether there was one. */
static int interrupt(int (*call)(void), int marks, int steps)
{
    volatile int right = by_path() && by_directory() && reading() && writing();
    now = (struct moment){0, 0};
    until = (struct moment){marks, steps};
    if (sigsetjmp(back, 1) == 0) {
        set_stepping(1);
        int result = call();
        set_stepping(0);
        if (is_child)
            go_on(result);
        right = right && result;
    }
    failures += !right;
    return now.marks >= marks && now.steps >= steps;
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    base = argv[1];
    char bytes[4096] = {0};
    struct sigaction action = {.sa_sigaction = stepped, .sa_flags = SA_SIGINFO};
    snprintf(path, sizeof path, "%s", at("stepped"));
    SHOW_OPEN(file, open(path, O_RDWR | O_CREAT, 0644));
    SHOW_OPEN(directory, open(base, O_RDONLY | O_DIRECTORY));
    SHOW(pwrite(file, bytes, sizeof bytes, 0));
    fflush(stdout);
    sigaction(SIGTRAP, &action, NULL);
    for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++) {
        interrupted = fork_here;
        for (int marks = 0; interrupt(calls[i], marks, 60); marks++)
            ;
        interrupted = leave;
        for (int marks = 0; interrupt(calls[i], marks, 1); marks++)
            for (int steps = 2; steps < 5; steps++)
                interrupt(calls[i], marks, steps);
        SHOW(failures);
    }
    int right = 0;
    for (int i = 0; i < 3000; i++)
        right += reading() && by_path() && by_directory();
    SHOW(right);
    SHOW(close(file) + close(directory));
    return 0;
}
