/* Observations of the differential test: of one object, of a directory, of the whole tree, of this process's open files. */

/* Times are written so that the test can tell in which step they were made. */
static void say_time(const char *name, struct timespec time)
{
    say(" %sT%lld", name, (long long)time.tv_sec * 1000000000 + time.tv_nsec);
}

static void say_attributes(const struct stat *found)
{
    say("%o %u:%u links %lu", found->st_mode, found->st_uid, found->st_gid, (unsigned long)found->st_nlink);
    if (!S_ISDIR(found->st_mode))
        say(" size %lld rdev %x", (long long)found->st_size, (unsigned)found->st_rdev);
    say_time("a", found->st_atim);
    say_time("m", found->st_mtim);
    say_time("c", found->st_ctim);
}

static void do_stat(char **w)
{
    struct place at = place(w[0]);
    struct stat found;
    int result = fstatat(at.directory, at.path, &found, (int)number(w[1]));
    result ? say_done(result) : say_attributes(&found);
}

static void do_statx(char **w)
{
    struct place at = place(w[0]);
    struct statx found;
    int result = statx(at.directory, at.path, (int)number(w[1]), STATX_BASIC_STATS, &found);
    if (result) {
        say_done(result);
        return;
    }
    say("%o %u:%u links %u", found.stx_mode, found.stx_uid, found.stx_gid, found.stx_nlink);
    if (!S_ISDIR(found.stx_mode))
        say(" size %llu", (unsigned long long)found.stx_size);
    say_time("m", (struct timespec){found.stx_mtime.tv_sec, found.stx_mtime.tv_nsec});
    say_time("c", (struct timespec){found.stx_ctime.tv_sec, found.stx_ctime.tv_nsec});
}

static void do_fstat(char **w)
{
    struct stat found;
    int result = fstat(descriptor_of(w[0]), &found);
    result ? say_done(result) : say_attributes(&found);
}

/* Whether `path` is `above` itself or lies below it. */
static int lies_below(const char *above, size_t bytes, const char *path, size_t length)
{
    return length >= bytes && !strncmp(path, above, bytes) && (length == bytes || path[bytes] == '/');
}

/* Paths below the root, and below the folder it is in, to which links may lead, look the same wherever the root is. */
static void say_path(const char *path, ssize_t length)
{
    size_t below = strlen(root), above = (size_t)(strrchr(root, '/') - root);
    if (lies_below(root, below, path, (size_t)length))
        say(" ROOT%.*s", (int)length - (int)below, path + below);
    else if (lies_below(root, above, path, (size_t)length))
        say(" ABOVE%.*s", (int)length - (int)above, path + above);
    else
        say(" %.*s", (int)length, path);
}

static void do_readlink(char **w)
{
    struct place at = place(w[0]);
    char target[PATH_BYTES];
    ssize_t length = readlinkat(at.directory, at.path, target, sizeof target);
    say_result(length);
    if (length >= 0)
        say_path(target, length);
}

static void do_getcwd(char **w)
{
    (void)w;
    char path[PATH_BYTES];
    if (getcwd(path, sizeof path))
        say_path(path, (ssize_t)strlen(path));
    else
        say_result(-1);
}

static void do_realpath(char **w)
{
    struct place at;
    char path[PATH_BYTES];
    if (realpath(path_of(w[0], &at), path))
        say_path(path, (ssize_t)strlen(path));
    else
        say_result(-1);
}

static int by_name(const void *one, const void *other)
{
    return strcmp(*(char *const *)one, *(char *const *)other);
}

/* The names of a directory in order, each behind its type; their number, or -1. */
static int list(int directory, const char *path, char **names)
{
    int descriptor = openat(directory, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = descriptor < 0 ? NULL : fdopendir(descriptor);
    if (!stream)
        return -1;
    int count = 0;
    errno = 0;
    for (struct dirent *entry; count < NAMES_MAX && (entry = readdir(stream));)
        if (asprintf(&names[count], "%d%s", entry->d_type, entry->d_name) > 0)
            count++;
    int failed = errno;
    closedir(stream);
    qsort(names, (size_t)count, sizeof *names, by_name);
    if (!failed)
        return count;
    while (count > 0)
        free(names[--count]);
    errno = failed;
    return -1;
}

static void do_list(char **w)
{
    struct place at = place(w[0]);
    char *names[NAMES_MAX];
    int count = list(at.directory, at.path, names);
    say_done(count);
    for (int i = 0; i < count; i++) {
        say(" %s", names[i]);
        free(names[i]);
    }
}

/* The attributes of a list of names, in order. */
static void say_xattrs(char *names, ssize_t length, ssize_t get(const char *, const char *, void *, size_t), const char *of)
{
    char *sorted[NAMES_MAX];
    int count = 0;
    if (length < 0) {
        say(" xattrs ");
        say_result(length);
    }
    for (char *name = names; name < names + length && count < NAMES_MAX; name += strlen(name) + 1)
        sorted[count++] = name;
    qsort(sorted, (size_t)count, sizeof *sorted, by_name);
    for (int i = 0; i < count; i++) {
        say(" %s=", sorted[i]);
        if (get) {
            ssize_t size = get(of, sorted[i], data, DATA_MAX);
            size < 0 ? say_result(size) : say("%zd:%016llx", size, (unsigned long long)hash(1, data, (size_t)size));
        }
    }
}

static void do_listxattr(char **w)
{
    struct place at;
    char names[4096];
    size_t room = (size_t)number(w[1]) < sizeof names ? (size_t)number(w[1]) : sizeof names;
    ssize_t length = listxattr(path_of(w[0], &at), names, room);
    if (room)
        say_xattrs(names, length, NULL, NULL);
    else
        say_result(length);
}

static void do_flistxattr(char **w)
{
    char names[4096];
    say_xattrs(names, flistxattr(descriptor_of(w[0]), names, sizeof names), NULL, NULL);
}

/* Hash of an open file's content. */
static void say_content(int descriptor, off_t size)
{
    uint64_t found = 1;
    off_t from = 0;
    while (from < size) {
        ssize_t count = pread(descriptor, data, DATA_MAX, from);
        if (count <= 0)
            break;
        found = hash(found, data, (size_t)count);
        from += count;
    }
    say(" content %lld %016llx", (long long)from, (unsigned long long)found);
}

static struct seen { dev_t device; ino_t inode; char name[256]; } seen[NAMES_MAX];
static int seen_count;

/* Which name stood for this object first in this look. */
static void say_first_name(const char *name, const struct stat *found)
{
    for (int i = 0; i < seen_count; i++) {
        if (seen[i].inode == found->st_ino && seen[i].device == found->st_dev) {
            say(" is %s", seen[i].name);
            return;
        }
    }
    if (seen_count < NAMES_MAX) {
        seen[seen_count] = (struct seen){found->st_dev, found->st_ino, ""};
        snprintf(seen[seen_count++].name, sizeof seen->name, "%.250s", name);
    }
}

static void look_at(const char *name, int depth)
{
    char path[PATH_BYTES], text[PATH_BYTES], xattrs[4096];
    struct stat found;
    snprintf(path, sizeof path, "%.2000s%s%.2000s", root, *name ? "/" : "", name);
    say(" ; /%s ", name);
    if (lstat(path, &found)) {
        say_result(-1);
        return;
    }
    say_attributes(&found);
    say_first_name(name, &found);
    say_xattrs(xattrs, llistxattr(path, xattrs, sizeof xattrs), lgetxattr, path);
    if (S_ISLNK(found.st_mode)) {
        ssize_t length = readlink(path, text, sizeof text);
        length < 0 ? say_result(length) : say_path(text, length);
    }
    if (S_ISREG(found.st_mode)) {
        int descriptor = open(path, O_RDONLY | O_CLOEXEC);
        descriptor < 0 ? say_result(-1) : say_content(descriptor, found.st_size);
        if (descriptor >= 0)
            close(descriptor);
    }
    if (!S_ISDIR(found.st_mode))
        return;
    char *names[NAMES_MAX];
    int count = list(AT_FDCWD, path, names);
    say_done(count);
    for (int i = 0; i < count; i++)
        say(" %s", names[i]);
    for (int i = 0; i < count; i++) {
        const char *entry = names[i] + strspn(names[i], "0123456789");
        if (strcmp(entry, ".") && strcmp(entry, "..") && depth < 8) {
            snprintf(text, sizeof text, "%.2000s%s%.255s", name, *name ? "/" : "", entry);
            look_at(text, depth + 1);
        }
        free(names[i]);
    }
}

/* The whole tree. */
static void do_look(char **w)
{
    (void)w;
    seen_count = 0;
    look_at("", 0);
}

/* This process's open files. */
static void do_files(char **w)
{
    (void)w;
    seen_count = 0;
    for (int slot = 0; slot < SLOTS; slot++) {
        struct stat found;
        char name[8];
        if (slots[slot] < 0)
            continue;
        int flags = fcntl(slots[slot], F_GETFL);
        say(" ; slot %d flags %o ", slot, flags);
        if (fstat(slots[slot], &found)) {
            say_result(-1);
            continue;
        }
        say_attributes(&found);
        snprintf(name, sizeof name, "%d", slot);
        say_first_name(name, &found);
        if (!S_ISREG(found.st_mode) || flags & O_PATH)
            continue;
        say(" offset ");
        say_result(lseek(slots[slot], 0, SEEK_CUR));
        if ((flags & O_ACCMODE) != O_WRONLY)
            say_content(slots[slot], found.st_size);
    }
}

const struct operation operations[] = {
    {"link", 3, do_link}, {"symlink", 2, do_symlink}, {"unlink", 1, do_unlink}, {"rmdir", 1, do_rmdir},
    {"mkdir", 2, do_mkdir}, {"mknod", 3, do_mknod}, {"rename", 3, do_rename}, {"chmod", 3, do_chmod},
    {"fchmod", 2, do_fchmod}, {"chown", 4, do_chown}, {"fchown", 3, do_fchown}, {"utimens", 4, do_utimens},
    {"utimes-now", 1, do_utimes_now}, {"futimens", 3, do_futimens}, {"truncate", 2, do_truncate},
    {"access", 3, do_access}, {"umask", 1, do_umask}, {"chdir", 1, do_chdir}, {"fchdir", 1, do_fchdir},
    {"setxattr", 4, do_setxattr}, {"lsetxattr", 4, do_lsetxattr}, {"fsetxattr", 4, do_fsetxattr},
    {"getxattr", 3, do_getxattr}, {"fgetxattr", 2, do_fgetxattr}, {"removexattr", 2, do_removexattr},
    {"lremovexattr", 2, do_lremovexattr}, {"fremovexattr", 2, do_fremovexattr}, {"open", 4, do_open},
    {"close", 1, do_close}, {"dup", 2, do_dup}, {"read", 2, do_read}, {"readv", 2, do_readv},
    {"pread", 3, do_pread}, {"preadv", 3, do_preadv}, {"write", 3, do_write}, {"writev", 3, do_writev},
    {"pwrite", 4, do_pwrite}, {"pwritev", 4, do_pwritev}, {"burst", 6, do_burst}, {"seek", 3, do_seek}, {"holes", 2, do_holes},
    {"ftruncate", 2, do_ftruncate}, {"fallocate", 4, do_fallocate}, {"copy", 5, do_copy},
    {"sendfile", 4, do_sendfile}, {"fsync", 1, do_fsync}, {"fdatasync", 1, do_fdatasync}, {"setfl", 2, do_setfl},
    {"lock", 5, do_lock}, {"getlock", 5, do_getlock}, {"flock", 2, do_flock}, {"map", 4, do_map},
    {"map-read", 3, do_map_read}, {"map-write", 5, do_map_write}, {"unmap", 1, do_unmap}, {"give", 2, do_give},
    {"left", 1, do_left}, {"splice", 3, do_splice}, {"append", 3, do_append}, {"heir", 0, do_heir}, {"bare", 4, do_bare},
    {"take", 1, do_take}, {"stat", 2, do_stat}, {"statx", 2, do_statx}, {"fstat", 1, do_fstat},
    {"readlink", 1, do_readlink}, {"getcwd", 0, do_getcwd}, {"realpath", 1, do_realpath}, {"list", 1, do_list},
    {"listxattr", 2, do_listxattr}, {"flistxattr", 1, do_flistxattr}, {"look", 0, do_look}, {"files", 0, do_files},
    {NULL, 0, NULL},
};
