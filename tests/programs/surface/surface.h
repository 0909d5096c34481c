/* Declarations shared by the programs of this folder, which call each name of libc's file surface and print the outcome. */
#ifndef SURFACE_H
#define SURFACE_H

#include "check.h"
#include <aio.h>
#include <fts.h>
#include <ftw.h>
#include <glob.h>
#include <grp.h>
#include <linux/aio_abi.h>
#include <linux/openat2.h>
#include <poll.h>
#include <pty.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/fsuid.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <sys/shm.h>
#include <utime.h>
#include <wordexp.h>

const char *base;

#endif
