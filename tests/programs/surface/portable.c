/* File operations of a program that is built with any C library, statically too: prints each result with its errno's number. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#define SHOW(expression)                                                                                               \
    do {                                                                                                               \
        errno = 0;                                                                                                     \
        long long value_ = (long long)(expression);                                                                    \
        printf("%d %s = %lld errno %d\n", __LINE__, #expression, value_, value_ == -1 ? errno : 0);                    \
    } while (0)

static const char *base;

static const char *at(const char *name)
{
    static char paths[4][4096];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", base, name);
    return path;
}

int main(int argc, char **argv)
{
    static char block[50000], back[50000];
    struct stat s;
    char text[64] = {0};
    if (argc != 2)
        return 2;
    base = argv[1];
    umask(022);
    memset(block, 'b', sizeof block);
    int f = open(at("file"), O_RDWR | O_CREAT, 0644), status, count = 0;
    struct iovec two[2] = {{back, 10}, {back + 20, 10}};
    SHOW(f >= 0);
    SHOW(write(f, block, 100));
    SHOW(lseek(f, 10, SEEK_SET));
    SHOW(read(f, back, 50));
    SHOW(pwrite(f, block, sizeof block, 1000));
    SHOW(pread(f, back, sizeof back, 2000));
    SHOW(memcmp(block, back, 40000));
    for (int i = 0; i < 50; i++)
        count += pwrite(f, "again", 5, i * 7) == 5 && pread(f, text, 5, i * 7) == 5 && memcmp(text, "again", 5) == 0;
    SHOW(count);
    SHOW(preadv(f, two, 2, 300));
    SHOW(ftruncate(f, 40000));
    SHOW(fstat(f, &s) + s.st_size);
    SHOW(fsync(f));
    SHOW(mkdir(at("folder"), 0755));
    SHOW(mkdir(at("folder"), 0755));
    SHOW(rename(at("file"), at("folder/moved")));
    SHOW(symlink("moved", at("folder/soft")));
    SHOW(stat(at("folder/soft"), &s) + s.st_size);
    SHOW(lstat(at("folder/soft"), &s) + s.st_size);
    SHOW(readlink(at("folder/soft"), text, sizeof text));
    SHOW(access(at("folder/none"), F_OK));
    SHOW(link(at("folder/moved"), at("hard")));
    SHOW(chmod(at("hard"), 0600));
    SHOW(stat(at("folder/moved"), &s) + s.st_mode);
    SHOW(truncate(at("hard"), 123));
    SHOW(setxattr(at("hard"), "user.a", "value", 5, 0));
    SHOW(getxattr(at("hard"), "user.a", text, sizeof text));
    SHOW(getxattr(at("hard"), "user.b", text, sizeof text));
    DIR *stream = opendir(at("folder"));
    for (count = 0; stream && readdir(stream);)
        count++;
    SHOW(count);
    SHOW(closedir(stream));
    char *mapped = mmap(NULL, 123, PROT_READ, MAP_SHARED, f, 0);
    SHOW(mapped != MAP_FAILED && memcmp(mapped, "again", 5) == 0);
    SHOW(munmap(mapped, 123));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0)
        _exit(pwrite(f, "child", 5, 0) == 5 && pread(f, text, 5, 0) == 5 ? 3 : 4);
    SHOW(waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1);
    SHOW(pread(f, text, 5, 0) + memcmp(text, "child", 5));
    FILE *file = fopen(at("lines"), "w+");
    SHOW(fprintf(file, "one\ntwo\n") + fclose(file));
    SHOW(stat(at("lines"), &s) + s.st_size);
    SHOW(unlink(at("lines")) + unlink(at("hard")));
    SHOW(unlink(at("lines")));
    SHOW(close(f));
    SHOW(pread(f, text, 5, 0));
    return 0;
}
