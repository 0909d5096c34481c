/* inherited PATH HOW: writes a file by the library, while another process without the library, which has the same description, looks at
 * it and appends to it by calls that use the size known to the kernel. HOW that process gets the description: "fork", "vfork", "spawn",
 * "send", or "exec": it takes this process's place, and a third one asks it. Prints what differs from one file for all, then "right".
 *
 * The other process is this program with the words "heir DESCRIPTOR TALK"; it makes system calls that the library does not see. */
#include "raw.h"
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 16 };

static char page[PAGE], seen[PAGE];
static int wrong;

static void check(const char *what, long found, long expected)
{
    if (found != expected) {
        printf("%s: %ld instead of %ld\n", what, found, expected);
        wrong = 1;
    }
}

static char *filled(int with)
{
    memset(page, with, PAGE);
    return page;
}

/* What the kernel says is there: what is left from the offset on, and that. */
static long size_known(int f)
{
    int left = -1;
    raw(SYS_ioctl, f, FIONREAD, (long)&left, 0, 0);
    return left + raw(SYS_lseek, f, 0, SEEK_CUR, 0, 0);
}

/* The first byte of what a pipe brings of a page, or -1 when that is not all of it. */
static int from_pipe(int end, long count)
{
    if (count != PAGE || raw(SYS_read, end, (long)seen, PAGE, 0, 0) != PAGE)
        return -1;
    return seen[0];
}

static int sent(int f, int number)
{
    int ends[2];
    long long at = (long long)number * PAGE;
    raw(SYS_pipe2, (long)ends, 0, 0, 0, 0);
    int found = from_pipe(ends[0], raw(SYS_sendfile, ends[1], f, (long)&at, PAGE, 0));
    raw(SYS_close, ends[0], 0, 0, 0, 0);
    raw(SYS_close, ends[1], 0, 0, 0, 0);
    return found;
}

static int spliced(int f, int number)
{
    int ends[2];
    long long at = (long long)number * PAGE;
    raw(SYS_pipe2, (long)ends, 0, 0, 0, 0);
    int found = from_pipe(ends[0], raw6(SYS_splice, f, (long)&at, ends[1], 0, PAGE, 0));
    raw(SYS_close, ends[0], 0, 0, 0, 0);
    raw(SYS_close, ends[1], 0, 0, 0, 0);
    return found;
}

static long append(int f, int with)
{
    struct iovec part = {filled(with), PAGE};
    return raw6(SYS_pwritev2, f, (long)&part, 1, 0, 0, RWF_APPEND);
}

static int told(int talk)
{
    char byte = 0;
    return raw(SYS_read, talk, (long)&byte, 1, 0, 0) == 1 ? byte : -1;
}

static void tell(int talk, char what)
{
    raw(SYS_write, talk, (long)&what, 1, 0, 0);
}

/* The process without the library: does as it is told, and answers 'y' when it is as it should be. Each page is filled with its number and 1. */
static int heir(int f, int talk)
{
    volatile char *mapped = NULL;
    for (int what; (what = told(talk)) > 0;) {
        int count = told(talk);
        int last = count - 1, right = 0;
        switch (what) {
        case 'm':
            mapped = (volatile char *)raw6(SYS_mmap, 0, PAGES * PAGE, PROT_READ, MAP_SHARED, f, 0);
            right = (long)mapped > 0;
            break;
        case 'l':
            right = size_known(f) == (long)count * PAGE && sent(f, last) == count && spliced(f, last) == count &&
                    mapped[last * PAGE] == count && mapped[count * PAGE - 1] == count;
            break;
        case 'a':
            right = append(f, count + 1) == PAGE;
            break;
        case 'f':
            right = raw(SYS_fcntl, f, F_SETFL, O_RDWR | O_APPEND, 0, 0) == 0 &&
                    raw(SYS_write, f, (long)filled(count + 1), PAGE, 0, 0) == PAGE &&
                    raw(SYS_fcntl, f, F_SETFL, O_RDWR, 0, 0) == 0;
            break;
        case 'c':
            right = 1;
            for (int number = 0; number < count; number++)
                right = right && raw(SYS_pread64, f, (long)seen, PAGE, (long)number * PAGE, 0) == PAGE &&
                        seen[0] == number + 1 && seen[PAGE - 1] == number + 1 && mapped[number * PAGE] == number + 1;
            break;
        }
        tell(talk, right ? 'y' : 'n');
    }
    return 0;
}

static void asked(const char *step, int talk, char what, int count)
{
    tell(talk, what);
    tell(talk, (char)count);
    check(step, told(talk), 'y');
}

static void grow(int f, int *count)
{
    check("written", pwrite(f, filled(*count + 1), PAGE, (off_t)*count * PAGE), PAGE);
    ++*count;
}

/* Of a writer that has written so many pages, and then become the other program. */
static int asker(int talk, int count)
{
    asked("mapped", talk, 'm', count);
    asked("what was written before", talk, 'l', count);
    asked("appended once", talk, 'a', count);
    asked("content", talk, 'c', count + 1);
    if (!wrong)
        printf("right\n");
    return wrong;
}

/* The process with the library. */
static int writer(int f, int talk, int count)
{
    asked("mapped", talk, 'm', count);
    asked("what was written before", talk, 'l', count);
    grow(f, &count);
    asked("one page more", talk, 'l', count);
    grow(f, &count), grow(f, &count);
    asked("appended once", talk, 'a', count);
    count++;
    grow(f, &count);
    asked("appended by the flag of the description", talk, 'f', count);
    count++;
    asked("content", talk, 'c', count);
    grow(f, &count);
    asked("at last", talk, 'c', count);
    asked("at last", talk, 'l', count);
    for (int number = 0; number < count; number++) {
        check("read", pread(f, seen, PAGE, (off_t)number * PAGE), PAGE);
        check("content of a page", seen[0], number + 1);
    }
    check("size", lseek(f, 0, SEEK_END), (long)count * PAGE);
    check("synced", fsync(f), 0);
    if (!wrong)
        printf("right\n");
    return wrong;
}

static void send_descriptor(int talk, int given)
{
    union { struct cmsghdr header; char room[CMSG_SPACE(sizeof(int))]; } control = {0};
    struct iovec part = {"x", 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    control.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.header), &given, sizeof given);
    check("sent", sendmsg(talk, &message, 0), 1);
}

static int received(int talk)
{
    union { struct cmsghdr header; char room[CMSG_SPACE(sizeof(int))]; } control = {0};
    char byte;
    int found = -1;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (raw(SYS_recvmsg, talk, (long)&message, 0, 0, 0) == 1)
        memcpy(&found, CMSG_DATA(&control.header), sizeof found);
    return found;
}

int main(int words_count, char **words)
{
    if (words_count == 4 && !strcmp(words[1], "heir")) {
        int f = atoi(words[2]), talk = atoi(words[3]);
        return heir(f < 0 ? received(talk) : f, talk);
    }
    if (words_count != 3)
        return 2;
    const char *how = words[2];
    int talk[2], sends = !strcmp(how, "send"), replaces = !strcmp(how, "exec");
    socketpair(AF_UNIX, SOCK_STREAM, 0, talk);
    fcntl(talk[0], F_SETFD, FD_CLOEXEC);
    char descriptor[16], socket[16], *arguments[] = {words[0], "heir", descriptor, socket, NULL}, *none[] = {NULL};
    snprintf(socket, sizeof socket, "%d", talk[1]);
    pid_t child = -1;
    if (sends) {
        snprintf(descriptor, sizeof descriptor, "-1");
        posix_spawn(&child, words[0], NULL, NULL, arguments, none);
    } else if (replaces && (child = fork()) > 0) {
        close(talk[1]);
        int status = asker(talk[0], 3);
        close(talk[0]);
        waitpid(child, NULL, 0);
        return status;
    }
    int f = open(words[1], O_RDWR | O_CREAT | O_TRUNC, 0644), count = 0;
    for (int number = 0; number < 3; number++)
        grow(f, &count);
    snprintf(descriptor, sizeof descriptor, "%d", f);
    fflush(stdout);
    if (sends) {
        send_descriptor(talk[0], f);
    } else if (!strcmp(how, "fork")) {
        if ((child = fork()) == 0) {
            raw(SYS_close, talk[0], 0, 0, 0, 0);
            raw(SYS_exit_group, heir(f, talk[1]), 0, 0, 0, 0);
        }
    } else if (!strcmp(how, "vfork")) {
        if ((child = vfork()) == 0) {
            execve(words[0], arguments, none);
            _exit(99);
        }
    } else if (!strcmp(how, "spawn")) {
        posix_spawn(&child, words[0], NULL, NULL, arguments, none);
    } else if (replaces) {
        close(talk[0]);
        execve(words[0], arguments, none);
        return 99;
    }
    close(talk[1]);
    int status = writer(f, talk[0], count);
    close(talk[0]);
    waitpid(child, NULL, 0);
    return status;
}
