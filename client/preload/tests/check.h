/* What the programs of this folder share: they print what they see, so that runs by library, by FUSE and on another
 * filesystem can be compared line by line. */
#ifndef CHECK_H
#define CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

/* Prints an expression with its value, or with its errno when it is -1. */
#define SHOW(expression)                                                                                               \
    do {                                                                                                               \
        errno = 0;                                                                                                     \
        long long value_ = (long long)(expression);                                                                    \
        if (value_ == -1)                                                                                              \
            printf("%d %s = %s\n", __LINE__, #expression, strerrorname_np(errno));                                     \
        else                                                                                                           \
            printf("%d %s = %lld\n", __LINE__, #expression, value_);                                                   \
    } while (0)

/* A descriptor number says nothing: prints only whether there is one. */
#define SHOW_OPEN(variable, expression)                                                                                \
    do {                                                                                                               \
        errno = 0;                                                                                                     \
        variable = (expression);                                                                                       \
        printf("%d %s = %s\n", __LINE__, #expression, variable < 0 ? strerrorname_np(errno) : "open");                 \
    } while (0)

/* Whether a file can be reached by its path: 0 or -1. By the library a request, unlike stat(). */
static inline int reach(const char *path)
{
    char value[8];
    return getxattr(path, "user.none", value, sizeof value) < 0 && errno == ENODATA ? 0 : -1;
}

/* Prints the parts of a file's attributes that any filesystem agrees on. */
static inline void show_stat(int line, int result, const struct stat *s)
{
    if (result != 0)
        printf("%d stat = %s\n", line, strerrorname_np(errno));
    else
        printf("%d stat mode %o links %d uid %d gid %d size %lld\n", line, s->st_mode,
               S_ISDIR(s->st_mode) ? 0 : (int)s->st_nlink, s->st_uid, s->st_gid,
               S_ISDIR(s->st_mode) ? 0LL : (long long)s->st_size);
}

#define SHOW_STAT(path)                                                                                                \
    do {                                                                                                               \
        struct stat s_;                                                                                                \
        int r_ = stat(path, &s_);                                                                                      \
        show_stat(__LINE__, r_, &s_);                                                                                  \
    } while (0)

#define SHOW_FSTAT(descriptor)                                                                                         \
    do {                                                                                                               \
        struct stat s_;                                                                                                \
        int r_ = fstat(descriptor, &s_);                                                                               \
        show_stat(__LINE__, r_, &s_);                                                                                  \
    } while (0)

/* Prints a file's content with its zeros as dots, shortened in the middle. */
static inline void show_content(int line, const char *path)
{
    static char bytes[1 << 20];
    int descriptor = open(path, O_RDONLY);
    ssize_t length = descriptor < 0 ? -1 : pread(descriptor, bytes, sizeof bytes, 0);
    unsigned sum = 0;
    printf("%d content of %zd bytes: ", line, length);
    for (ssize_t i = 0; i < length; i++) {
        sum = sum * 31 + (unsigned char)bytes[i];
        if (i < 40)
            putchar(bytes[i] ? bytes[i] : '.');
    }
    printf(" sum %u\n", sum);
    if (descriptor >= 0)
        close(descriptor);
}

#define SHOW_CONTENT(path) show_content(__LINE__, path)

/* The absolute path of a name in the directory under test. */
extern const char *base;
static inline const char *at(const char *name)
{
    static char paths[8][PATH_MAX];
    static unsigned next;
    char *path = paths[next++ % 8];
    snprintf(path, PATH_MAX, "%s/%s", base, name);
    return path;
}

#endif
