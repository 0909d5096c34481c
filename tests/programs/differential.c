/* One process of the differential test: carries out one operation per line of standard input and answers each with one line that tells
 * everything a program can see of it. The same lines are given to a process on poolfs and to one on the disk's own filesystem. The
 * answers must be equal, so nothing in them may depend on where the files are.
 *
 *   differential ROOT USER GROUP SUPPLEMENTARY MAILBOX    begins as root and becomes USER; MAILBOX.N is process N's socket
 *
 * A path's first characters say how it is given: /a absolute, @a relative to a descriptor of the root, =a to the working directory,
 * #2:a to the descriptor in slot 2. */
#include "differential.h"

char out[ANSWER_MAX];
size_t out_length;
char root[PATH_BYTES];
int root_descriptor = -1;
int slots[SLOTS] = {-1, -1, -1, -1};
unsigned char data[DATA_MAX];

void say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (out_length < sizeof out - 1) {
        int count = vsnprintf(out + out_length, sizeof out - out_length, format, arguments);
        out_length += count > 0 ? (size_t)count : 0;
        if (out_length > sizeof out - 1)
            out_length = sizeof out - 1;
    }
    va_end(arguments);
}

/* The outcome of a system call: a failure's name, or the value. */
void say_result(long long result)
{
    if (result < 0)
        say("%s", strerrorname_np(errno));
    else
        say("%lld", result);
}

/* Of descriptors the number says nothing. */
void say_done(long long result)
{
    say_result(result < 0 ? -1 : 0);
}

long long number(const char *word)
{
    /* Rust's way to write octal numbers. */
    return strncmp(word, "0o", 2) ? strtoll(word, NULL, 0) : strtoll(word + 2, NULL, 8);
}

int slot_of(const char *word)
{
    long long slot = number(word);
    return slot >= 0 && slot < SLOTS ? (int)slot : 0;
}

int descriptor_of(const char *word)
{
    return slots[slot_of(word)];
}

uint64_t hash(uint64_t h, const unsigned char *bytes, size_t count)
{
    for (; count >= 8; bytes += 8, count -= 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        h = (h ^ word) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    for (size_t i = 0; i < count; i++)
        h = (h ^ bytes[i]) * 0x100000001b3u;
    return h ^ h >> 31;
}

/* Bytes that tell which operation wrote them. */
void fill(unsigned char *bytes, size_t count, uint64_t seed)
{
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (size_t i = 0; i < count; i++) {
        if (i % 8 == 0) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
        }
        bytes[i] = (unsigned char)(state >> i % 8 * 8);
    }
}

struct place place(const char *word)
{
    struct place place = {AT_FDCWD, ""};
    const char *rest = word + 1;
    if (*word == '/') {
        snprintf(place.path, sizeof place.path, "%s%s", root, word[1] ? word : "");
        return place;
    }
    if (*word == '@') {
        place.directory = root_descriptor;
    } else if (*word == '#') {
        place.directory = descriptor_of(rest);
        const char *colon = strchr(rest, ':');
        rest = colon ? colon + 1 : "";
    }
    /* Nothing leads out of the root by its text. */
    rest += strspn(rest, "/");
    snprintf(place.path, sizeof place.path, "%s", rest);
    return place;
}

/* For calls that know no starting directory. */
const char *path_of(const char *word, struct place *at)
{
    *at = place(word);
    if (at->directory != AT_FDCWD) {
        char copy[PATH_BYTES];
        snprintf(copy, sizeof copy, "%s", at->path);
        snprintf(at->path, sizeof at->path, "%.2000s/%.2000s", root, copy);
    }
    return at->path;
}

static void become(uid_t user, gid_t group, gid_t supplementary)
{
    if (user == 0)
        return;
    if (setgroups(1, &supplementary) || setresgid(group, group, group) || setresuid(user, user, user)) {
        perror("differential: becoming another user");
        exit(2);
    }
}

/* Everything as at the start, in another tree. */
static void begin(const char *new_root)
{
    for (int slot = 0; slot < SLOTS; slot++) {
        unmap(slot);
        if (slots[slot] >= 0)
            close(slots[slot]);
        slots[slot] = -1;
    }
    if (root_descriptor >= 0)
        close(root_descriptor);
    empty_mailbox();
    bury();
    umask(022);
    snprintf(root, sizeof root, "%s", new_root);
    root_descriptor = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    say_done(root_descriptor < 0 ? -1 : chdir(root));
}

static void in_child(int count, char **words)
{
    int ends[2];
    if (pipe(ends)) {
        say_result(-1);
        return;
    }
    pid_t child = fork();
    if (child == 0) {
        run(count, words);
        size_t written = 0;
        while (written < out_length) {
            ssize_t part = write(ends[1], out + written, out_length - written);
            if (part <= 0)
                _exit(1);
            written += (size_t)part;
        }
        _exit(0);
    }
    close(ends[1]);
    ssize_t part;
    while (child > 0 && (part = read(ends[0], out + out_length, sizeof out - 1 - out_length)) > 0)
        out_length += (size_t)part;
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0)
        say(" died %x", status);
}

void run(int count, char **words)
{
    if (!strcmp(words[0], "begin") && count == 2) {
        begin(words[1]);
        return;
    }
    if (!strcmp(words[0], "child") && count > 1) {
        in_child(count - 1, words + 1);
        return;
    }
    for (const struct operation *each = operations; each->name; each++) {
        if (!strcmp(each->name, words[0]) && each->words == count - 1) {
            each->run(words + 1);
            return;
        }
    }
    say("not understood");
}

static void answer(void)
{
    for (size_t i = 0; i < out_length; i++)
        if (out[i] == '\n')
            out[i] = '|';
    out[out_length++] = '\n';
    for (size_t sent = 0; sent < out_length;) {
        ssize_t part = write(1, out + sent, out_length - sent);
        if (part <= 0)
            exit(1);
        sent += (size_t)part;
    }
    out_length = 0;
}

int main(int count, char **words)
{
    static char line[LINE_MAX_BYTES];
    if (count != 6) {
        fprintf(stderr, "usage: differential NUMBER USER GROUP SUPPLEMENTARY MAILBOX\n");
        return 2;
    }
    /* Whatever a program does by mistake: the machine's own files have to be out of its reach. */
    if (access("/", W_OK) == 0 || (geteuid() == 0 && errno != EROFS)) {
        fprintf(stderr, "differential: the machine is not read-only here\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    catch_bus_errors();
    open_mailbox(words[5], atoi(words[1]));
    become((uid_t)atoi(words[2]), (gid_t)atoi(words[3]), (gid_t)atoi(words[4]));
    while (fgets(line, sizeof line, stdin)) {
        char *parts[16];
        int parts_count = 0;
        for (char *word = strtok(line, " \n"); word && parts_count < 16; word = strtok(NULL, " \n"))
            parts[parts_count++] = word;
        if (parts_count > 0)
            run(parts_count, parts);
        answer();
    }
    return 0;
}

#include "differential-names.h"
#include "differential-files.h"
#include "differential-heir.h"
#include "differential-looks.h"
