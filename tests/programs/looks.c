/* Looks at an open file's attributes again and again while another process changes them. Both share memory that says how far
 * the changes have come.
 *
 *   looks look FILE SHARED CHANGES        prints "right LOOKS", or what is wrong
 *   looks path|file|raw FILE SHARED CHANGES    changes by path, by a descriptor, by system calls that the library does not see
 *
 * Change n is one of size, mode, time of access, links, in turn. So the value of each after n changes is known. */
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { BASE = 2 << 20 };

struct shared {
    _Atomic long begun, done, watched;
};

struct facts {
    long size, mode, accessed, links;
};

/* The last change up to n of this kind. */
static long last(long n, long kind)
{
    return n - ((n - kind) % 4 + 4) % 4;
}

static struct facts after(long n)
{
    long mode = last(n, 1), links = last(n, 3);
    return (struct facts){
        .size = BASE + (last(n, 0) < 0 ? 0 : last(n, 0)),
        .mode = 0600 | (mode < 0 ? 0 : mode / 4 % 64),
        .accessed = last(n, 2) < 0 ? 0 : last(n, 2),
        .links = 1 + (links < 0 ? 0 : (links / 4 + 1) % 2),
    };
}

static void must(int done, const char *what)
{
    if (!done) {
        perror(what);
        exit(1);
    }
}

static int look(int fd, struct shared *shared, long changes)
{
    /* So often that the kernel is asked no more. */
    enum { WARM = 1000 };
    long looks = 0;
    struct stat st;
    for (int n = 0; n < WARM; n++)
        must(fstat(fd, &st) == 0, "fstat");
    atomic_store(&shared->watched, 1);
    for (long done = 0; done < changes; looks++) {
        done = atomic_load(&shared->done);
        must(fstat(fd, &st) == 0, "fstat");
        long begun = atomic_load(&shared->begun);
        int right[4] = {0};
        for (long n = done; n <= begun; n++) {
            struct facts facts = after(n);
            right[0] |= st.st_size == facts.size;
            right[1] |= (st.st_mode & 07777) == (mode_t)facts.mode;
            right[2] |= st.st_atim.tv_sec == facts.accessed;
            right[3] |= st.st_nlink == (nlink_t)facts.links;
        }
        for (int kind = 0; kind < 4; kind++) {
            if (!right[kind]) {
                printf("after %ld to %ld changes: size %ld mode %o accessed %ld links %ld\n", done, begun, (long)st.st_size,
                       st.st_mode, (long)st.st_atim.tv_sec, (long)st.st_nlink);
                return 1;
            }
        }
    }
    printf("right %ld\n", looks);
    return 0;
}

static void change(const char *path, const char *other, int fd, int raw, long n)
{
    struct facts facts = after(n);
    struct timespec times[2] = {{.tv_sec = facts.accessed}, {.tv_nsec = UTIME_OMIT}};
    switch (n % 4) {
    case 0:
        if (fd >= 0)
            must(pwrite(fd, "x", 1, facts.size - 1) == 1, "pwrite");
        else
            must((raw ? syscall(SYS_truncate, path, facts.size) : truncate(path, facts.size)) == 0, "truncate");
        break;
    case 1:
        if (raw)
            must(syscall(SYS_chmod, path, facts.mode) == 0, "chmod");
        else
            must((fd >= 0 ? fchmod(fd, (mode_t)facts.mode) : chmod(path, (mode_t)facts.mode)) == 0, "chmod");
        break;
    case 2:
        if (raw)
            must(syscall(SYS_utimensat, AT_FDCWD, path, times, 0) == 0, "utimensat");
        else
            must((fd >= 0 ? futimens(fd, times) : utimensat(AT_FDCWD, path, times, 0)) == 0, "utimensat");
        break;
    default:
        if (raw)
            must((facts.links == 2 ? syscall(SYS_link, path, other) : syscall(SYS_unlink, other)) == 0, "link");
        else
            must((facts.links == 2 ? link(path, other) : unlink(other)) == 0, "link");
    }
}

int main(int count, char **arguments)
{
    must(count == 5, "arguments");
    const char *way = arguments[1], *path = arguments[2];
    long changes = atol(arguments[4]);
    int fd = open(arguments[3], O_RDWR);
    must(fd >= 0, "open");
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    must(shared != MAP_FAILED, "mmap");
    if (!strcmp(way, "look")) {
        fd = open(path, O_RDONLY);
        must(fd >= 0, "open");
        return look(fd, shared, changes);
    }
    char other[4096];
    snprintf(other, sizeof other, "%s-2", path);
    while (!atomic_load(&shared->watched))
        sched_yield();
    fd = strcmp(way, "file") ? -1 : open(path, O_RDWR);
    for (long n = 1; n <= changes; n++) {
        atomic_store(&shared->begun, n);
        change(path, other, fd, !strcmp(way, "raw"), n);
        atomic_store(&shared->done, n);
    }
    return 0;
}
