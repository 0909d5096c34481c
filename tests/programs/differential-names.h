/* Operations of the differential test on names and attributes. */

/* Somebody else's file with set-id bits cannot be linked (fs.protected_hardlinks), but by FUSE other errors may come first. */
static void do_link(char **w)
{
    struct place from = place(w[0]), to = place(w[1]);
    struct stat found;
    int flags = number(w[2]) & AT_SYMLINK_FOLLOW ? 0 : AT_SYMLINK_NOFOLLOW;
    int theirs = fstatat(from.directory, from.path, &found, flags) == 0 && geteuid() && geteuid() != found.st_uid;
    if (theirs && S_ISREG(found.st_mode) && found.st_mode & 06000)
        say("-");
    else
        say_done(linkat(from.directory, from.path, to.directory, to.path, (int)number(w[2])));
}

static void do_symlink(char **w)
{
    struct place to = place(w[1]), target;
    const char *text = w[0][0] == '/' ? path_of(w[0], &target) : w[0] + 1;
    say_done(symlinkat(text, to.directory, to.path));
}

static void do_unlink(char **w)
{
    struct place at = place(w[0]);
    say_done(unlinkat(at.directory, at.path, 0));
}

static void do_rmdir(char **w)
{
    struct place at = place(w[0]);
    say_done(at.directory == AT_FDCWD ? rmdir(at.path) : unlinkat(at.directory, at.path, AT_REMOVEDIR));
}

static void do_mkdir(char **w)
{
    struct place at = place(w[0]);
    say_done(mkdirat(at.directory, at.path, (mode_t)number(w[1])));
}

static void do_mknod(char **w)
{
    struct place at = place(w[0]);
    say_done(mknodat(at.directory, at.path, (mode_t)number(w[1]), (dev_t)number(w[2])));
}

static void do_rename(char **w)
{
    struct place from = place(w[0]), to = place(w[1]);
    unsigned flags = (unsigned)number(w[2]);
    say_done(flags ? renameat2(from.directory, from.path, to.directory, to.path, flags)
                   : renameat(from.directory, from.path, to.directory, to.path));
}

static void do_chmod(char **w)
{
    struct place at = place(w[0]);
    say_done(fchmodat(at.directory, at.path, (mode_t)number(w[1]), (int)number(w[2])));
}

static void do_fchmod(char **w)
{
    say_done(fchmod(descriptor_of(w[0]), (mode_t)number(w[1])));
}

/* A change to no other owner of somebody else's file with set-id bits: on poolfs it does nothing, instead of failing
 * (docs/semantics.md). */
static int is_excepted(const struct stat *found, char **w)
{
    return number(w[1]) == -1 && number(w[2]) == -1 && found->st_mode & 06000 && !S_ISDIR(found->st_mode)
           && geteuid() != 0 && geteuid() != found->st_uid;
}

static void do_chown(char **w)
{
    struct place at = place(w[0]);
    struct stat found;
    if (fstatat(at.directory, at.path, &found, (int)number(w[3])) == 0 && is_excepted(&found, w))
        say("-");
    else
        say_done(fchownat(at.directory, at.path, (uid_t)number(w[1]), (gid_t)number(w[2]), (int)number(w[3])));
}

static void do_fchown(char **w)
{
    struct stat found;
    if (fstat(descriptor_of(w[0]), &found) == 0 && is_excepted(&found, w))
        say("-");
    else
        say_done(fchown(descriptor_of(w[0]), (uid_t)number(w[1]), (gid_t)number(w[2])));
}

/* A number of seconds, "now" or "omit". */
static struct timespec time_of(const char *word)
{
    struct timespec time = {0, 0};
    if (!strcmp(word, "now"))
        time.tv_nsec = UTIME_NOW;
    else if (!strcmp(word, "omit"))
        time.tv_nsec = UTIME_OMIT;
    else
        time = (struct timespec){number(word), number(word) % 1000};
    return time;
}

static void do_utimens(char **w)
{
    struct place at = place(w[0]);
    struct timespec times[2] = {time_of(w[1]), time_of(w[2])};
    say_done(utimensat(at.directory, at.path, times, (int)number(w[3])));
}

static void do_utimes_now(char **w)
{
    struct place at = place(w[0]);
    say_done(utimensat(at.directory, at.path, NULL, 0));
}

static void do_futimens(char **w)
{
    struct timespec times[2] = {time_of(w[1]), time_of(w[2])};
    say_done(futimens(descriptor_of(w[0]), times));
}

static void do_truncate(char **w)
{
    struct place at;
    say_done(truncate(path_of(w[0], &at), number(w[1])));
}

static void do_access(char **w)
{
    struct place at = place(w[0]);
    say_done(faccessat(at.directory, at.path, (int)number(w[1]), (int)number(w[2])));
}

static void do_umask(char **w)
{
    say("%o", umask((mode_t)number(w[0])));
}

static void do_chdir(char **w)
{
    struct place at;
    say_done(chdir(path_of(w[0], &at)));
}

static void do_fchdir(char **w)
{
    say_done(fchdir(descriptor_of(w[0])));
}

/* The value of an attribute: "LENGTH:SEED", or an access list as "aclMODE:USER:PERMISSIONS" or "aclMODE". */
static size_t value_of(const char *word)
{
    unsigned mode = 0, user = 0, granted = 0;
    if (sscanf(word, "acl%o:%u:%u", &mode, &user, &granted) < 1) {
        size_t length = (size_t)number(word);
        const char *colon = strchr(word, ':');
        length = length > DATA_MAX ? DATA_MAX : length;
        fill(data, length, colon ? (uint64_t)number(colon + 1) : 0);
        return length;
    }
    struct { uint16_t tag, permissions; uint32_t id; } entries[5] = {{1, mode >> 6 & 7, -1u}};
    int count = 1;
    if (user)
        entries[count++] = (typeof(*entries)){2, granted & 7, user};
    entries[count++] = (typeof(*entries)){4, mode >> 3 & 7, -1u};
    if (user)
        entries[count++] = (typeof(*entries)){0x10, (mode >> 3 | granted) & 7, -1u};
    entries[count++] = (typeof(*entries)){0x20, mode & 7, -1u};
    memcpy(data, &(uint32_t){2}, 4);
    memcpy(data + 4, entries, (size_t)count * 8);
    return 4 + (size_t)count * 8;
}

/* The kernel asks the mode that it knew last whether a directory is sticky before attributes are set there: it is told the mode of
 * now (docs/semantics.md). */
static void tell_kernel(int descriptor, const char *path, int flags)
{
    struct stat found;
    syscall(SYS_newfstatat, descriptor, path, &found, flags);
}

static void do_setxattr(char **w)
{
    struct place at;
    size_t length = value_of(w[2]);
    tell_kernel(AT_FDCWD, path_of(w[0], &at), 0);
    say_done(setxattr(path_of(w[0], &at), w[1], data, length, (int)number(w[3])));
}

static void do_lsetxattr(char **w)
{
    struct place at;
    size_t length = value_of(w[2]);
    tell_kernel(AT_FDCWD, path_of(w[0], &at), AT_SYMLINK_NOFOLLOW);
    say_done(lsetxattr(path_of(w[0], &at), w[1], data, length, (int)number(w[3])));
}

static void do_fsetxattr(char **w)
{
    size_t length = value_of(w[2]);
    tell_kernel(descriptor_of(w[0]), "", AT_EMPTY_PATH);
    say_done(fsetxattr(descriptor_of(w[0]), w[1], data, length, (int)number(w[3])));
}

static void say_value(ssize_t length)
{
    say_result(length);
    if (length > 0)
        say(" %016llx", (unsigned long long)hash(1, data, (size_t)length));
}

static void do_getxattr(char **w)
{
    struct place at;
    size_t room = (size_t)number(w[2]);
    ssize_t length = getxattr(path_of(w[0], &at), w[1], data, room);
    room ? say_value(length) : say_result(length);
}

static void do_fgetxattr(char **w)
{
    say_value(fgetxattr(descriptor_of(w[0]), w[1], data, DATA_MAX));
}

static void do_removexattr(char **w)
{
    struct place at;
    tell_kernel(AT_FDCWD, path_of(w[0], &at), 0);
    say_done(removexattr(path_of(w[0], &at), w[1]));
}

static void do_lremovexattr(char **w)
{
    struct place at;
    tell_kernel(AT_FDCWD, path_of(w[0], &at), AT_SYMLINK_NOFOLLOW);
    say_done(lremovexattr(path_of(w[0], &at), w[1]));
}

static void do_fremovexattr(char **w)
{
    tell_kernel(descriptor_of(w[0]), "", AT_EMPTY_PATH);
    say_done(fremovexattr(descriptor_of(w[0]), w[1]));
}
