/* uncommon DIRECTORY: the answers of a filesystem to calls that few programs make, a line for each: its name, its result, its error. */
#include <errno.h>
#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/xattr.h>
#include <unistd.h>

#define MIB (1 << 20)

static char bytes[MIB];

static void say(const char *what, long result)
{
    printf("%s %ld %s\n", what, result, result < 0 ? strerrorname_np(errno) : "-");
    errno = 0;
}

static int made(const char *name, int mebibytes)
{
    int file = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    for (int i = 0; i < mebibytes; i++)
        if (write(file, bytes, MIB) != MIB)
            exit(1);
    if (file < 0 || fsync(file))
        exit(1);
    return file;
}

static void handles(const char *name)
{
    union {
        struct file_handle head;
        char room[256];
    } handle = {.head = {.handle_bytes = 128}};
    int mount, place = open(".", O_RDONLY | O_DIRECTORY), file = open(name, O_RDONLY);
    say("name_to_handle_at", name_to_handle_at(AT_FDCWD, name, &handle.head, &mount, 0));
    int again = open_by_handle_at(place, &handle.head, O_RDONLY);
    say("open_by_handle_at-open", again < 0 ? -1 : 0);
    close(again);
    close(file);
    int caches = open("/proc/sys/vm/drop_caches", O_WRONLY);
    /* The kernel drops it once the service has answered that it is closed, for which close() does not wait. */
    for (int left = 6000; left > 0; left--) {
        if (write(caches, "2", 1) != 1)
            exit(1);
        again = open_by_handle_at(place, &handle.head, O_RDONLY);
        if (again < 0)
            break;
        close(again);
        usleep(10000);
    }
    say("open_by_handle_at-dropped", again < 0 ? -1 : 0);
}

int main(int count, char **arguments)
{
    if (count != 2 || chdir(arguments[1]))
        return 2;
    int from = made("from", 40), to = made("to", 3);
    long flags = 0;
    struct fiemap map = {.fm_length = ~0ull};
    say("getflags", ioctl(from, FS_IOC_GETFLAGS, &flags));
    say("setflags", ioctl(from, FS_IOC_SETFLAGS, &flags));
    say("fiemap", ioctl(from, FS_IOC_FIEMAP, &map));
    off_t at = 0, end = 0;
    say("sendfile", sendfile(to, from, &at, 40 * MIB));
    at = 0;
    say("copy_file_range", copy_file_range(from, &at, to, &end, 40 * MIB, 0));
    say("trusted.overlay", setxattr("from", "trusted.overlay.opaque", "y", 1, 0));
    made("swap", 4);
    if (system("/sbin/mkswap swap > /dev/null 2>&1"))
        return 1;
    say("swapon", swapon("swap", 0));
    close(made("small", 1));
    handles("small");
    return 0;
}
