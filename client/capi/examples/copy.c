/* Copies a file by the user-level path where it can: copy SOURCE TARGET. Prints how many requests it took. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poolfs.h>
#include <stdio.h>
#include <string.h>

static int fail(const char *what)
{
    fprintf(stderr, "copy: %s: %s\n", what, strerror(errno));
    return 1;
}

int main(int argc, char **argv)
{
    static char buffer[64 * 1024];
    struct stat status;

    if (argc != 3) {
        fprintf(stderr, "usage: copy SOURCE TARGET\n");
        return 2;
    }
    int source = poolfs_open(argv[1], O_RDONLY | O_CLOEXEC, 0);
    if (source < 0 || poolfs_fstat(source, &status) != 0)
        return fail(argv[1]);
    int target = poolfs_open(argv[2], O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, status.st_mode & 0777);
    if (target < 0)
        return fail(argv[2]);

    int64_t offset = 0;
    for (;;) {
        ssize_t got = poolfs_pread(source, buffer, sizeof buffer, offset);
        if (got < 0)
            return fail(argv[1]);
        if (got == 0)
            break;
        for (ssize_t done = 0; done < got;) {
            ssize_t written = poolfs_pwrite(target, buffer + done, (size_t)(got - done), offset + done);
            if (written < 0)
                return fail(argv[2]);
            done += written;
        }
        offset += got;
    }
    if (poolfs_fsync(target) != 0 || poolfs_close(target) != 0)
        return fail(argv[2]);
    if (poolfs_stat(argv[2], &status) != 0 || status.st_size != offset)
        return fail(argv[2]);
    printf("%" PRId64 " bytes, %" PRIu64 " requests\n", offset, poolfs_requests());
    return 0;
}
