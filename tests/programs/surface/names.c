/* Names: making and removing them, temporary files, walks, directory streams, extended attributes, access lists. */
#include "surface.h"

extern char *__realpath_chk(const char *, char *, size_t), *__getcwd_chk(char *, size_t, size_t);

/* A path without what comes before the directory under test. */
static const char *below(const char *path)
{
    size_t length = strlen(base);
    return path && strncmp(path, base, length) == 0 ? path + length : path;
}

#define SHOW_PATH(expression)                                                                                          \
    do {                                                                                                               \
        errno = 0;                                                                                                     \
        const char *path_ = (expression);                                                                              \
        printf("%d %s = %s\n", __LINE__, #expression, path_ ? below(path_) : strerrorname_np(errno));                  \
    } while (0)

static void making(void)
{
    int d;
    char target[64] = {0};
    struct stat s;
    SHOW_OPEN(d, open(base, O_RDONLY | O_DIRECTORY));
    SHOW(umask(027));
    SHOW(mkdir(at("tree"), 0777) + mkdirat(d, "tree/a", 0777) + mkdirat(d, "tree/b", 0777));
    SHOW(umask(022));
    SHOW(mknod(at("tree/file"), S_IFREG | 0666, 0) + mknodat(d, "tree/a/one", S_IFREG | 0666, 0));
    SHOW(mkfifo(at("tree/fifo"), 0666) + mkfifoat(d, "tree/b/fifo", 0666));
    SHOW(mknod(at("tree/null"), S_IFCHR | 0600, makedev(1, 3)));
    SHOW_STAT(at("tree/a"));
    SHOW_STAT(at("tree/a/one"));
    SHOW(symlink("file", at("tree/soft")) + symlinkat("nowhere", d, "tree/broken"));
    SHOW(readlink(at("tree/soft"), target, sizeof target) + readlinkat(d, "tree/broken", target, sizeof target));
    SHOW(link(at("tree/file"), at("tree/hard")) + linkat(d, "tree/soft", d, "tree/second", AT_SYMLINK_FOLLOW));
    SHOW(stat(at("tree/second"), &s) + (int)s.st_nlink);
    SHOW(link(at("tree/file"), at("tree/a")));
    SHOW(rename(at("tree/hard"), at("tree/moved")) + renameat(d, "tree/moved", d, "tree/again"));
    SHOW(renameat2(d, "tree/again", d, "tree/file", RENAME_NOREPLACE));
    SHOW(renameat2(d, "tree/again", d, "tree/a/one", RENAME_EXCHANGE));
    SHOW(renameat2(d, "tree/again", d, "tree/x", 1 << 9));
    SHOW(renameat2(d, "tree/a", d, "tree/b", RENAME_EXCHANGE));
    SHOW(rename(at("tree/a"), at("tree/b/inside")));
    SHOW(rename(at("tree/b"), at("tree/b/inside")));
    SHOW(unlink(at("tree/again")) + unlinkat(d, "tree/second", 0));
    SHOW(unlink(at("tree/b")));
    SHOW(rmdir(at("tree/b")));
    SHOW(remove(at("tree/null")) + remove(at("tree/broken")));
    SHOW(unlinkat(d, "tree/none", AT_REMOVEDIR));
    SHOW(close(d));
}

static void temporary(void)
{
    struct stat s;
    char name[PATH_MAX];
    int f;
    FILE *file;
#define TEMPLATE(suffix) (snprintf(name, sizeof name, "%s/t-XXXXXX" suffix, base), name)
    SHOW_OPEN(f, mkstemp(TEMPLATE("")));
    SHOW(write(f, "temporary", 9) + fstat(f, &s) + (int)s.st_mode + pwrite(f, "T", 1, 0) + pwrite(f, "T", 1, 0));
    SHOW(close(f) + unlink(name));
    SHOW_OPEN(f, mkstemp64(TEMPLATE("")));
    SHOW(close(f) + unlink(name));
    SHOW_OPEN(f, mkostemp(TEMPLATE(""), O_APPEND));
    SHOW((fcntl(f, F_GETFL) & O_APPEND) != 0);
    SHOW(close(f) + unlink(name));
    SHOW_OPEN(f, mkostemp64(TEMPLATE(""), O_CLOEXEC));
    SHOW(fcntl(f, F_GETFD) + close(f) + unlink(name));
    SHOW_OPEN(f, mkstemps(TEMPLATE(".c"), 2));
    SHOW(strcmp(name + strlen(name) - 2, ".c") + close(f) + unlink(name));
    SHOW_OPEN(f, mkstemps64(TEMPLATE(".c"), 2));
    SHOW(close(f) + unlink(name));
    SHOW_OPEN(f, mkostemps(TEMPLATE(".c"), 2, 0));
    SHOW(close(f) + unlink(name));
    SHOW_OPEN(f, mkostemps64(TEMPLATE(".c"), 2, 0));
    SHOW(close(f) + unlink(name));
    SHOW_OPEN(f, mkstemp(strcpy(name, "/no-such-place/XXXXXX")));
    SHOW(mkdtemp(TEMPLATE("")) != NULL);
    SHOW(stat(name, &s) + (int)s.st_mode);
    SHOW(rmdir(name));
    SHOW((file = tmpfile()) != NULL);
    SHOW(fputs("x", file) + fclose(file));
}

/* A file that begins without a name, and gets one through /proc or by its descriptor. */
static void nameless(void)
{
    struct stat s;
    char path[64];
    int f;
    SHOW_OPEN(f, open(base, O_TMPFILE | O_RDWR, 0640));
    SHOW(write(f, "nameless", 8) + pwrite(f, "NAME", 4, 0) + pwrite(f, "NAME", 4, 0));
    SHOW(fstat(f, &s) + (int)s.st_nlink);
    SHOW(s.st_mode);
    snprintf(path, sizeof path, "/proc/self/fd/%d", f);
    SHOW(linkat(AT_FDCWD, path, AT_FDCWD, at("named"), AT_SYMLINK_FOLLOW));
    SHOW(fstat(f, &s) + (int)s.st_nlink);
    SHOW(pwrite(f, "!", 1, 8) + close(f));
    SHOW_CONTENT(at("named"));
    SHOW_OPEN(f, openat(AT_FDCWD, base, O_TMPFILE | O_WRONLY, 0600));
    SHOW(write(f, "second", 6));
    SHOW(linkat(f, "", AT_FDCWD, at("named"), AT_EMPTY_PATH));
    SHOW(linkat(f, "", AT_FDCWD, at("named-too"), AT_EMPTY_PATH));
    SHOW(linkat(f, "", AT_FDCWD, at("a-third"), AT_EMPTY_PATH) + fstat(f, &s) + (int)s.st_nlink);
    SHOW(unlink(at("a-third")) + close(f));
    SHOW_CONTENT(at("named-too"));
    SHOW_OPEN(f, open(base, O_TMPFILE | O_RDWR | O_EXCL, 0600));
    snprintf(path, sizeof path, "/proc/self/fd/%d", f);
    SHOW(linkat(AT_FDCWD, path, AT_FDCWD, at("never"), AT_SYMLINK_FOLLOW));
    SHOW(close(f));
    SHOW_OPEN(f, open(base, O_TMPFILE | O_RDONLY, 0600));
    SHOW_OPEN(f, open(at("named"), O_TMPFILE | O_RDWR, 0600));
}

static void paths(void)
{
    char buffer[PATH_MAX], *found;
    int d;
    SHOW_PATH(realpath(at("tree/./b/../soft"), buffer));
    SHOW_PATH(__realpath_chk(at("tree/soft"), buffer, sizeof buffer));
    SHOW_PATH(realpath(at("tree/none"), buffer));
    SHOW_PATH(found = canonicalize_file_name(at("tree/file")));
    free(found);
    SHOW(chdir(at("tree")));
    SHOW_PATH(getcwd(buffer, sizeof buffer));
    SHOW_PATH(__getcwd_chk(buffer, sizeof buffer, sizeof buffer));
    SHOW_PATH(found = get_current_dir_name());
    free(found);
    SHOW_PATH(realpath("b", buffer));
    SHOW_OPEN(d, open("b", O_RDONLY | O_DIRECTORY));
    SHOW(fchdir(d) + close(d));
    struct stat s;
    SHOW(stat("../file", &s) + lstat("fifo", &s) + access("none", F_OK));
    SHOW_PATH(getcwd(buffer, sizeof buffer));
    SHOW(chdir("/"));
    SHOW(chdir(at("tree/file")));
}

static int seen;
static unsigned sum;

static void note(const char *path, int kind)
{
    seen++;
    for (const char *c = below(path); *c; c++)
        sum += (unsigned char)*c * (unsigned)(kind + 1);
}

static int visit(const char *path, const struct stat *s, int kind)
{
    (void)s;
    note(path, kind);
    return 0;
}

static int visit64(const char *path, const struct stat64 *s, int kind)
{
    (void)s;
    note(path, kind);
    return 0;
}

static int visit_deep(const char *path, const struct stat *s, int kind, struct FTW *at_)
{
    (void)s;
    note(path, kind + at_->level);
    return 0;
}

static int visit_deep64(const char *path, const struct stat64 *s, int kind, struct FTW *at_)
{
    (void)s;
    note(path, kind + at_->level);
    return 0;
}

static int by_name(const FTSENT **a, const FTSENT **b)
{
    return strcmp((*a)->fts_name, (*b)->fts_name);
}

static void walks(void)
{
    char *roots[2] = {(char *)(uintptr_t)base, NULL}, pattern[PATH_MAX];
    glob_t found;
    glob64_t found64;
    FTSENT *entry;
#define WALK(call) (seen = 0, sum = 0, (call)), seen * 100000 + (int)(sum % 100000)
    SHOW((WALK(ftw(base, visit, 4))));
    SHOW((WALK(ftw64(base, visit64, 4))));
    SHOW((WALK(nftw(base, visit_deep, 4, FTW_PHYS | FTW_DEPTH))));
    SHOW((WALK(nftw64(base, visit_deep64, 4, FTW_CHDIR))));
    SHOW(nftw(at("none"), visit_deep, 4, 0));
    SHOW(chdir("/"));
    FTS *walk = fts_open(roots, FTS_PHYSICAL, by_name);
    SHOW(walk != NULL);
    while ((entry = fts_read(walk)) != NULL)
        printf("    fts %d %d %s\n", entry->fts_info, entry->fts_level, entry->fts_level ? entry->fts_name : ".");
    SHOW(fts_close(walk));
    snprintf(pattern, sizeof pattern, "%s/tree/*/f*", base);
    SHOW(glob(pattern, 0, NULL, &found) + (int)found.gl_pathc);
    for (size_t i = 0; i < found.gl_pathc; i++)
        printf("    glob %s\n", below(found.gl_pathv[i]));
    globfree(&found);
    SHOW(glob64(pattern, GLOB_MARK, NULL, &found64) + (int)found64.gl_pathc);
    globfree64(&found64);
}

static int only_letters(const struct dirent *entry)
{
    return entry->d_name[0] >= 'a';
}

static int only_letters64(const struct dirent64 *entry)
{
    return entry->d_name[0] >= 'a';
}

static void streams(void)
{
    char name[64], order[64][256];
    long places[64];
    struct dirent **list, *entry;
    struct dirent64 **list64;
    int d, count = 0, same = 0;
    SHOW(mkdir(at("many"), 0755));
    for (int i = 0; i < 40; i++) {
        snprintf(name, sizeof name, "many/name-%d", i);
        close(open(at(name), O_WRONLY | O_CREAT, 0600));
    }
    SHOW(count = scandir(at("many"), &list, only_letters, alphasort));
    printf("    %s ... %s type %d\n", list[0]->d_name, list[count - 1]->d_name, list[0]->d_type);
    SHOW(scandir64(at("many"), &list64, only_letters64, alphasort64));
    SHOW_OPEN(d, open(base, O_RDONLY | O_DIRECTORY));
    SHOW(scandirat(d, "many", &list, only_letters, versionsort));
    SHOW(scandirat64(d, "many", &list64, only_letters64, versionsort64));
    SHOW(scandir(at("none"), &list, NULL, NULL));
    SHOW(close(d));
    DIR *stream = opendir(at("many"));
    SHOW(stream != NULL && dirfd(stream) >= 0);
    count = 0;
    while ((places[count] = telldir(stream), entry = readdir(stream)) != NULL)
        snprintf(order[count++], sizeof order[0], "%s", entry->d_name);
    SHOW(count);
    for (int i = count - 1; i >= 0; i -= 3) {
        seekdir(stream, places[i]);
        entry = readdir(stream);
        same += entry != NULL && strcmp(entry->d_name, order[i]) == 0;
    }
    SHOW(same);
    rewinddir(stream);
    entry = readdir(stream);
    SHOW(strcmp(entry->d_name, order[0]));
    SHOW(unlink(at("many/name-7")));
    rewinddir(stream);
    for (count = 0; readdir64(stream) != NULL;)
        count++;
    SHOW(count);
    SHOW(closedir(stream));
    SHOW_OPEN(d, open(at("many"), O_RDONLY | O_DIRECTORY));
    stream = fdopendir(d);
    struct dirent space, *next;
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    SHOW(readdir_r(stream, &space, &next) + (next == &space));
    SHOW(closedir(stream));
    SHOW(close(d));
    char bytes[4096];
    SHOW_OPEN(d, open(at("many"), O_RDONLY | O_DIRECTORY));
    ssize_t part, whole = 0;
    while ((part = getdents64(d, bytes, sizeof bytes)) > 0)
        whole += part;
    SHOW(whole);
    off64_t start = lseek(d, 0, SEEK_SET);
    SHOW(getdirentries64(d, bytes, sizeof bytes, &start) > 0);
    SHOW(read(d, bytes, sizeof bytes) < 0);
    SHOW(close(d));
    SHOW(opendir(at("tree/file")) != NULL);
}

/* A list of entries of the version that the kernel takes: tag, permissions, id. */
#define ENTRY(tag, permissions, id) tag, 0, permissions, 0, (id) & 255, (id) >> 8, 0, 0
#define NOBODY 255, 255
static const unsigned char acl[] = {2, 0, 0, 0, 1, 0, 6, 0, NOBODY, NOBODY, ENTRY(2, 4, 1000), 4, 0, 4, 0, NOBODY, NOBODY,
                                    0x10, 0, 4, 0, NOBODY, NOBODY, 0x20, 0, 0, 0, NOBODY, NOBODY};

static void extended(void)
{
    char value[256], list[256];
    int f;
    struct stat s;
    SHOW_OPEN(f, open(at("tree/file"), O_RDWR));
    SHOW(setxattr(at("tree/soft"), "user.a", "one", 3, 0) + lsetxattr(at("tree/file"), "user.b", "four", 4, XATTR_CREATE));
    SHOW(fsetxattr(f, "user.c", "seven", 5, 0) + fsetxattr(f, "user.c", "seven", 5, XATTR_REPLACE));
    SHOW(lsetxattr(at("tree/soft"), "user.link", "x", 1, 0));
    SHOW(getxattr(at("tree/file"), "user.b", value, sizeof value) + lgetxattr(at("tree/file"), "user.c", value, sizeof value));
    SHOW(fgetxattr(f, "user.a", value, sizeof value));
    SHOW(fgetxattr(f, "user.b", value, 1));
    SHOW(listxattr(at("tree/file"), list, sizeof list) + llistxattr(at("tree/soft"), list, sizeof list));
    SHOW(flistxattr(f, NULL, 0));
    SHOW(removexattr(at("tree/file"), "user.b") + fremovexattr(f, "user.c"));
    SHOW(lremovexattr(at("tree/file"), "user.b"));
    SHOW(setxattr(at("tree/file"), "unknown.a", "x", 1, 0));
    SHOW(setxattr(at("tree/file"), "trusted.a", "x", 1, 0) + getxattr(at("tree/file"), "trusted.a", value, 10));
    /* Access lists are extended attributes; the mode follows them, and they follow the mode. */
    SHOW(setxattr(at("tree/file"), "system.posix_acl_access", acl, sizeof acl, 0));
    SHOW(fgetxattr(f, "system.posix_acl_access", value, sizeof value));
    SHOW(memcmp(value, acl, sizeof acl));
    SHOW_FSTAT(f);
    SHOW(fchmod(f, 0670));
    SHOW(getxattr(at("tree/file"), "system.posix_acl_access", value, sizeof value) + value[30]);
    SHOW(setxattr(at("tree/b"), "system.posix_acl_default", acl, sizeof acl, 0));
    SHOW(mknod(at("tree/b/inherits"), S_IFREG | 0666, 0) + mkdir(at("tree/b/folder"), 0777));
    SHOW_STAT(at("tree/b/inherits"));
    SHOW(getxattr(at("tree/b/inherits"), "system.posix_acl_access", value, sizeof value));
    SHOW(getxattr(at("tree/b/folder"), "system.posix_acl_default", value, sizeof value));
    SHOW(removexattr(at("tree/file"), "system.posix_acl_access"));
    SHOW(getxattr(at("tree/file"), "system.posix_acl_access", value, sizeof value));
    SHOW(setxattr(at("tree/file"), "system.posix_acl_default", acl, sizeof acl, 0));
    SHOW(stat(at("tree/file"), &s) + (int)s.st_mode + close(f));
}

static void handles(void)
{
    struct {
        struct file_handle head;
        unsigned char bytes[MAX_HANDLE_SZ];
    } handle = {.head = {.handle_bytes = 0}};
    int mount, f;
    SHOW(name_to_handle_at(AT_FDCWD, at("none"), &handle.head, &mount, 0));
    handle.head.handle_bytes = MAX_HANDLE_SZ;
    SHOW_OPEN(f, open_by_handle_at(-1, &handle.head, O_RDONLY));
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    base = argv[1];
    umask(022);
    making();
    temporary();
    nameless();
    paths();
    walks();
    streams();
    extended();
    handles();
    return 0;
}
