/* Operations of the differential test that use the file size known to the kernel, by this process and by an heir: a child that inherits the
 * descriptions of its parent, and makes system calls that the library does not see. */
#include "raw.h"
#include <sys/ioctl.h>

static int heir_in = -1, heir_out = -1;
static pid_t heir = -1;

/* A system call of an heir: a failure in libc's way. */
static long of_raw(long result)
{
    if (result >= 0)
        return result;
    errno = (int)-result;
    return -1;
}

static void say_left(int descriptor, long result, int left)
{
    /* What is left in a pipe is nobody's file's. */
    result < 0 ? say_result(-1) : is_pipe(descriptor) ? say("-") : say("%d", left);
}

static void do_left(char **w)
{
    int left = 0, result = ioctl(descriptor_of(w[0]), FIONREAD, &left);
    say_left(descriptor_of(w[0]), result, left);
}

/* At most what a pipe has room for. */
static size_t piece_of(const char *word)
{
    size_t length = length_of(word);
    return length > 60000 ? 60000 : length;
}

static void do_splice(char **w)
{
    int ends[2];
    off_t from = number(w[1]);
    if (is_pipe(descriptor_of(w[0])) || pipe2(ends, O_CLOEXEC | O_NONBLOCK)) {
        say("-");
        return;
    }
    ssize_t count = splice(descriptor_of(w[0]), &from, ends[1], NULL, piece_of(w[2]), 0);
    count > 0 ? say_read(read(ends[0], data, (size_t)count)) : say_result(count);
    close(ends[0]);
    close(ends[1]);
}

static void do_append(char **w)
{
    size_t length = length_of(w[1]);
    fill(data, length, (uint64_t)number(w[2]));
    struct iovec part = {data, length};
    is_pipe(descriptor_of(w[0])) ? say("-") : say_result(pwritev2(descriptor_of(w[0]), &part, 1, 0, RWF_APPEND));
}

static void bare_left(char **w)
{
    int left = 0;
    long result = of_raw(raw(SYS_ioctl, descriptor_of(w[0]), FIONREAD, (long)&left, 0, 0));
    say_left(descriptor_of(w[0]), result, left);
}

static void bare_send(char **w, int splices)
{
    int ends[2], descriptor = descriptor_of(w[0]);
    long long from = number(w[1]);
    long length = (long)piece_of(w[2]);
    if (is_pipe(descriptor) || of_raw(raw(SYS_pipe2, (long)ends, O_NONBLOCK, 0, 0, 0))) {
        say("-");
        return;
    }
    long count = of_raw(splices ? raw6(SYS_splice, descriptor, (long)&from, ends[1], 0, length, 0)
                                : raw(SYS_sendfile, ends[1], descriptor, (long)&from, length, 0));
    count > 0 ? say_read(of_raw(raw(SYS_read, ends[0], (long)data, count, 0, 0))) : say_result(count);
    raw(SYS_close, ends[0], 0, 0, 0, 0);
    raw(SYS_close, ends[1], 0, 0, 0, 0);
}

static void bare_sendfile(char **w)
{
    bare_send(w, 0);
}

static void bare_splice(char **w)
{
    bare_send(w, 1);
}

/* The first byte of each page, which is in the file when the page is. */
static void bare_tail(char **w)
{
    enum { PAGES = 8, PAGE = 4096 };
    long at = of_raw(raw6(SYS_mmap, 0, PAGES * PAGE, PROT_READ, MAP_SHARED, descriptor_of(w[0]), number(w[1]) / PAGE * PAGE));
    if (at < 0) {
        say_result(-1);
        return;
    }
    in_map = 1;
    if (sigsetjmp(bus_error, 1)) {
        say("SIGBUS");
    } else {
        for (volatile int page = 0; page < PAGES; page++)
            say("%x ", ((volatile unsigned char *)at)[page * PAGE]);
    }
    in_map = 0;
    raw(SYS_munmap, at, PAGES * PAGE, 0, 0, 0);
}

static void bare_append(char **w)
{
    size_t length = length_of(w[1]);
    fill(data, length, (uint64_t)number(w[2]));
    struct iovec part = {data, length};
    int descriptor = descriptor_of(w[0]);
    is_pipe(descriptor) ? say("-") : say_result(of_raw(raw6(SYS_pwritev2, descriptor, (long)&part, 1, 0, 0, RWF_APPEND)));
}

static void bare_write_at_end(char **w)
{
    size_t length = length_of(w[1]);
    int descriptor = descriptor_of(w[0]);
    fill(data, length, (uint64_t)number(w[2]));
    long before = of_raw(raw(SYS_fcntl, descriptor, F_GETFL, 0, 0, 0));
    if (before < 0 || is_pipe(descriptor)) {
        say("-");
        return;
    }
    say_done(of_raw(raw(SYS_fcntl, descriptor, F_SETFL, before | O_APPEND, 0, 0)));
    say(" ");
    say_result(of_raw(raw(SYS_write, descriptor, (long)data, (long)length, 0, 0)));
    raw(SYS_fcntl, descriptor, F_SETFL, before, 0, 0);
}

static void bare_pread(char **w)
{
    say_read(of_raw(raw(SYS_pread64, descriptor_of(w[0]), (long)data, (long)length_of(w[2]), number(w[1]), 0)));
}

static const struct operation bare[] = {
    {"left", 1, bare_left}, {"sendfile", 3, bare_sendfile}, {"splice", 3, bare_splice}, {"tail", 2, bare_tail},
    {"append", 3, bare_append}, {"write-at-end", 3, bare_write_at_end}, {"pread", 3, bare_pread}, {NULL, 0, NULL},
};

/* Carries out lines until there are no more, and answers each with one. */
static void inherit(int in, int out_to)
{
    static char line[LINE_MAX_BYTES];
    for (long length; (length = raw(SYS_read, in, (long)line, sizeof line - 1, 0, 0)) > 0;) {
        char *words[8];
        int count = 0;
        line[length] = 0;
        out_length = 0;
        for (char *word = strtok(line, " \n"); word && count < 8; word = strtok(NULL, " \n"))
            words[count++] = word;
        for (const struct operation *each = bare; each->name; each++)
            if (count > 0 && !strcmp(each->name, words[0]) && each->words == count - 1)
                each->run(words + 1);
        out[out_length] = '\n';
        raw(SYS_write, out_to, (long)out, (long)out_length + 1, 0, 0);
    }
}

void bury(void)
{
    if (heir < 0)
        return;
    close(heir_in);
    close(heir_out);
    waitpid(heir, NULL, 0);
    heir = -1;
}

static void do_heir(char **w)
{
    (void)w;
    bury();
    int to[2], from[2];
    if (pipe2(to, O_CLOEXEC) || pipe2(from, O_CLOEXEC)) {
        say_result(-1);
        return;
    }
    heir = fork();
    if (heir == 0) {
        raw(SYS_close, to[1], 0, 0, 0, 0);
        raw(SYS_close, from[0], 0, 0, 0, 0);
        inherit(to[0], from[1]);
        raw(SYS_exit_group, 0, 0, 0, 0, 0);
    }
    close(to[0]);
    close(from[1]);
    heir_in = to[1];
    heir_out = from[0];
    say_done(heir < 0 ? -1 : 0);
}

/* An operation of the heir, by its name and up to three words: those that it does not have are "-". */
static void do_bare(char **w)
{
    char line[256];
    int length = snprintf(line, sizeof line, "%.60s", w[0]);
    for (int word = 1; word < 4 && strcmp(w[word], "-"); word++)
        length += snprintf(line + length, sizeof line - (size_t)length, " %.30s", w[word]);
    if (heir < 0 || write(heir_in, line, (size_t)length) != length) {
        say("-");
        return;
    }
    for (ssize_t part; (part = read(heir_out, out + out_length, sizeof out - 1 - out_length)) > 0;) {
        out_length += (size_t)part;
        if (out[out_length - 1] == '\n') {
            out_length--;
            return;
        }
    }
    say("the heir died");
}
