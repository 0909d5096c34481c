/* Declarations shared by the parts of the differential test's process. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/falloc.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { SLOTS = 4, DATA_MAX = 1 << 20, ANSWER_MAX = 1 << 18, PATH_BYTES = 4096, LINE_MAX_BYTES = 1 << 13, NAMES_MAX = 64 };

struct place {
    int directory;
    char path[PATH_BYTES];
};

struct operation {
    const char *name;
    int words;
    void (*run)(char **words);
};

extern const struct operation operations[];

void run(int count, char **words);
void unmap(int slot);
void catch_bus_errors(void);
void open_mailbox(const char *path, int process);
void empty_mailbox(void);
void bury(void);
