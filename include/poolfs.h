/* poolfs: file operations by the user-level path, for programs that can be recompiled. Link with -lpoolfs.
 *
 * Every function does what the one of libc with the rest of its name does, on every file: files of a poolfs instance by
 * requests to its service, all others by the kernel. Errors are -1 and errno. Descriptors are ordinary ones, so that
 * functions of libc may be mixed with these on the same file.
 */
#ifndef POOLFS_H
#define POOLFS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Open files */
int poolfs_open(const char *path, int flags, mode_t mode);
int poolfs_openat(int directory, const char *path, int flags, mode_t mode);
int poolfs_close(int descriptor);
int poolfs_dup2(int from, int to);
ssize_t poolfs_read(int descriptor, void *buffer, size_t count);
ssize_t poolfs_write(int descriptor, const void *buffer, size_t count);
ssize_t poolfs_pread(int descriptor, void *buffer, size_t count, int64_t offset);
ssize_t poolfs_pwrite(int descriptor, const void *buffer, size_t count, int64_t offset);
int64_t poolfs_lseek(int descriptor, int64_t offset, int whence);
int poolfs_fsync(int descriptor);
int poolfs_fdatasync(int descriptor);
int poolfs_ftruncate(int descriptor, int64_t length);
int poolfs_fallocate(int descriptor, int mode, int64_t offset, int64_t length);
ssize_t poolfs_copy_file_range(int from, int64_t *from_offset, int to, int64_t *to_offset, size_t count,
                               unsigned flags);
int poolfs_fstat(int descriptor, struct stat *out);
int poolfs_fchmod(int descriptor, mode_t mode);
int poolfs_fchown(int descriptor, uid_t uid, gid_t gid);
int poolfs_futimens(int descriptor, const struct timespec times[2]);
ssize_t poolfs_fgetxattr(int descriptor, const char *name, void *value, size_t size);
int poolfs_fsetxattr(int descriptor, const char *name, const void *value, size_t size, int flags);
/* A shared mapping of a file takes it away from the user-level path: use this one, not mmap, for files open here. */
void *poolfs_mmap(void *place, size_t length, int protection, int flags, int descriptor, int64_t offset);

/* Files by name */
int poolfs_stat(const char *path, struct stat *out);
int poolfs_lstat(const char *path, struct stat *out);
int poolfs_fstatat(int directory, const char *path, struct stat *out, int flags);
int poolfs_access(const char *path, int mode);
int poolfs_mkdir(const char *path, mode_t mode);
int poolfs_mknod(const char *path, mode_t mode, dev_t device);
int poolfs_unlink(const char *path);
int poolfs_remove(const char *path);
int poolfs_rename(const char *from, const char *to);
int poolfs_renameat2(int directory, const char *from, int to_directory, const char *to, unsigned flags);
int poolfs_link(const char *from, const char *to);
int poolfs_symlink(const char *target, const char *path);
ssize_t poolfs_readlink(const char *path, char *out, size_t room);
int poolfs_truncate(const char *path, int64_t length);
int poolfs_chmod(const char *path, mode_t mode);
int poolfs_chown(const char *path, uid_t uid, gid_t gid);
int poolfs_lchown(const char *path, uid_t uid, gid_t gid);
int poolfs_utimensat(int directory, const char *path, const struct timespec times[2], int flags);
ssize_t poolfs_getxattr(const char *path, const char *name, void *value, size_t size);
int poolfs_setxattr(const char *path, const char *name, const void *value, size_t size, int flags);
ssize_t poolfs_listxattr(const char *path, char *names, size_t size);
int poolfs_removexattr(const char *path, const char *name);

/* What the library cannot see by itself. Each is to be called before the change it names. */
void poolfs_before_fork(void);     /* fork, posix_spawn, system, popen, sending a descriptor */
void poolfs_before_identity(void); /* setuid, setgid, setgroups and the like, capset */
void poolfs_before_view(void);     /* chroot, unshare, setns, Landlock, seccomp: the kernel serves from then on */

/* Operations of this process that took the user-level path so far. */
uint64_t poolfs_requests(void);

#ifdef __cplusplus
}
#endif

#endif
