# about: 32-bit programs with 64-bit offsets, dynamic (the loader leaves the library out) and static, beside 64-bit programs on the same files
# packages: gcc gcc-multilib
# version: gcc -m32 -dumpfullversion
# limit: 120
cat >program.c <<'X'
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/time.h>
#include <unistd.h>

#define SHOW(expression) do { errno = 0; long long value_ = (expression); \
    printf("%s = %lld %s\n", #expression, value_, value_ == -1 ? strerrorname_np(errno) : ""); } while (0)

static void *append(void *log)
{
    for (int n = 0; n < 200; n++)
        if (write(*(int *)log, "0123456\n", 8) != 8)
            abort();
    return NULL;
}

int main(int count, char **arguments)
{
    if (count != 2 || chdir(arguments[1]))
        return 2;
    static char block[70000], back[70000];
    printf("offsets of %zu bytes\n", sizeof(off_t));
    SHOW(mkdir("d", 0755));
    for (int n = 0; n < 3000; n++) {
        char name[32];
        sprintf(name, "d/entry-%04d", n);
        int f = open(name, O_CREAT | O_WRONLY, 0644);
        if (f < 0 || write(f, name, strlen(name)) < 0 || close(f))
            return 3;
    }
    DIR *d = opendir("d");
    int seen = 0, again = 0;
    for (errno = 0; readdir(d); errno = 0)
        seen++;
    SHOW(errno ? -1 : seen);
    for (rewinddir(d); readdir(d);)
        again++;
    SHOW(again);
    closedir(d);
    struct stat s;
    SHOW(stat("d/entry-0007", &s));
    SHOW(s.st_size);
    int f;
    SHOW((f = open("data", O_CREAT | O_RDWR, 0644)) < 0);
    for (int n = 0; n < 40; n++) {
        memset(block, n, sizeof block);
        if (pwrite(f, block, sizeof block, (off_t)n * sizeof block) != sizeof block)
            return 4;
    }
    SHOW(lseek(f, 0, SEEK_END));
    SHOW(pread(f, back, sizeof back, 39 * sizeof back));
    SHOW(memcmp(block, back, sizeof back));
    char *map = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
    SHOW(map == MAP_FAILED);
    strcpy(map + 5000, "by mapping");
    SHOW(msync(map, 1 << 20, MS_SYNC));
    SHOW(pread(f, back, 11, 5000));
    SHOW(strcmp(back, "by mapping"));
    SHOW(fsync(f));
    SHOW(ftruncate(f, 12345));
    SHOW(fstat(f, &s));
    SHOW(s.st_size);
    int log = open("log", O_CREAT | O_WRONLY | O_APPEND, 0644);
    pthread_t threads[8];
    for (int n = 0; n < 8; n++)
        pthread_create(&threads[n], NULL, append, &log);
    for (int n = 0; n < 8; n++)
        pthread_join(threads[n], NULL);
    SHOW(lseek(log, 0, SEEK_END));
    struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 10 };
    SHOW(fcntl(f, F_SETLK, &lock));
    SHOW(symlink("data", "link"));
    SHOW(rename("data", "renamed"));
    SHOW(access("link", F_OK));
    SHOW(link("renamed", "data"));
    SHOW(stat("link", &s));
    SHOW(s.st_nlink);
    struct timeval times[2] = {{1000000000, 0}, {1000000001, 500000}};
    SHOW(utimes("data", times));
    SHOW(stat("data", &s));
    SHOW(s.st_mtime);
    struct statfs fs;
    SHOW(statfs(".", &fs));
    int large = open("large", O_CREAT | O_RDWR | O_LARGEFILE, 0644);
    SHOW(syscall(194 /* ftruncate64 */, large, 0, 1));
    SHOW(stat("large", &s));
    SHOW(open("large", O_RDONLY | O_CLOEXEC) < 0);
    SHOW(mkdir("d", 0700));
    SHOW(rmdir("d"));
    SHOW(open("absent", O_RDONLY));
    FILE *stream = fopen("lines", "w+");
    for (int n = 0; n < 5000; n++)
        fprintf(stream, "line %d\n", n);
    SHOW(fseek(stream, -10, SEEK_END));
    SHOW(fgets(back, 100, stream) != NULL);
    SHOW(fgets(back, 100, stream) != NULL);
    printf("%s", back);
    SHOW(fclose(stream));
    return 0;
}
X
export CFLAGS='-m32 -O1 -pthread -D_FILE_OFFSET_BITS=64'
gcc $CFLAGS -o dynamic program.c
gcc $CFLAGS -static -o static program.c
for program in dynamic static; do
    mkdir "in-$program"
    ./$program "$W/in-$program"
    # A 64-bit program sees the same, and changes it.
    chmod 640 "$W/in-$program/lines"
    (cd "in-$program" && find . -type f ! -name large -exec md5sum {} + | sort -k 2 | md5sum; stat -c '%n %s %h %a' data link log lines)
done
echo "two programs"
