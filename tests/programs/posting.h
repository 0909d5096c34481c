/* Declarations shared by the parts of the test of many small writes: a board in memory, on which every writer says which of its writes have
 * returned, and what a file must hold then.
 *
 * A log is made of records: complete ones, each writer's in the order of its numbers, none twice, and all that had returned. Blocks are
 * overwritten at random places: a sector holds what was written there last, or something newer. */
#pragma once
#include "raw.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* The parts of a file are who writes it: its writer, the writer's signal handler, and guests with and without the library. */
enum { WRITER, HANDLER, GUEST, BARE_GUEST, PARTS };

/* How a file is written. */
enum { NOTHING, APPENDED, AT_OFFSET, BY_PWRITE, BLOCKS, KINDS };

enum {
    FILES = 48,
    NUMBERS = 1 << 14,
    LOG_MAX = 400 << 10,
    RECORD_MIN = 128,
    RECORD_MAX = 4096,
    SECTOR = 512,
    SECTORS = 512,
    ROOM = 4 << 20,
    MAGIC = 0x706f7374,
};

struct part {
    _Atomic uint64_t started, returned, synced;
    /* Of what has returned: bytes, and when the last of them was begun by the clock of filesystems. */
    _Atomic uint64_t bytes, begun_ns;
    atomic_flag taken;
};

struct file {
    _Atomic int kind, writer_pid, is_over;
    struct part parts[PARTS];
    /* Writes of the writer that it left by siglongjmp, or was killed in: each is there once or not at all, sooner or later. */
    _Atomic uint8_t left[NUMBERS / 8];
    _Atomic int any_left;
};

struct board {
    _Atomic int stop, wrong, next_file;
    /* Whether several look at once, and at writers that run. */
    _Atomic int is_crowded;
    _Atomic uint64_t looks, stopped_looks, writes, kills, zeros, late;
    struct file files[FILES];
};

struct record {
    uint32_t magic, length, file, part;
    uint64_t number;
};

static struct board *board;
static const char *folder, *what_am_i = "";
static uint64_t dice = 88172645463325252u;

static uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

__attribute__((unused)) static uint64_t below(uint64_t limit)
{
    dice ^= dice << 13;
    dice ^= dice >> 7;
    dice ^= dice << 17;
    return (dice >> 11) % limit;
}

__attribute__((format(printf, 1, 2), noreturn)) static void wrong(const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (board)
        atomic_store(&board->wrong, 1);
    dprintf(2, "wrong (%s, process %d): %s\n", what_am_i, (int)getpid(), text);
    _exit(1);
}

static void needed(int fine, int line, const char *what)
{
    if (!fine)
        wrong("line %d: %s: %s", line, what, strerror(errno));
}

#define need(what) needed((what), __LINE__, #what)

static uint64_t now_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static char *path_of(char *room, int file)
{
    snprintf(room, 4096, "%s/f%02d", folder, file);
    return room;
}

static void use_board(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT, 0666);
    need(fd >= 0 && !ftruncate(fd, sizeof *board));
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    need(board != MAP_FAILED);
    close(fd);
}

static int is_left(const struct file *file, uint64_t number)
{
    return atomic_load(&file->left[number / 8]) >> number % 8 & 1;
}

__attribute__((unused)) static void leave(struct file *file, uint64_t number)
{
    atomic_fetch_or(&file->left[number / 8], (uint8_t)(1 << number % 8));
    atomic_store(&file->any_left, 1);
}

static uint32_t length_of(int file, int part, uint64_t number)
{
    uint64_t h = mix((uint64_t)file << 48 ^ (uint64_t)part << 40 ^ number);
    /* Mostly little ones; some end at the end of a page. */
    return h % 8 ? RECORD_MIN + (uint32_t)(h >> 8) % 400 : RECORD_MIN + (uint32_t)(h >> 8) % (RECORD_MAX - RECORD_MIN + 1);
}

static uint32_t make_record(unsigned char *at, int file, int part, uint64_t number)
{
    struct record head = {MAGIC, length_of(file, part, number), (uint32_t)file, (uint32_t)part, number};
    memcpy(at, &head, sizeof head);
    uint64_t seed = mix((uint64_t)file << 52 ^ (uint64_t)part << 48 ^ number);
    for (uint32_t n = sizeof head; n < head.length; n++)
        at[n] = (unsigned char)(seed >> n % 8 * 8) ^ (unsigned char)(n / 8 * 37);
    return head.length;
}

/* Where the writer's write of this number to blocks goes: as often across the borders of pages as not. */
static uint64_t sector_of(uint64_t number, uint64_t *count)
{
    uint64_t h = mix(number * 2654435761u + 17);
    *count = h % 4 ? 8 : 1 + (h >> 8) % 8;
    return (h >> 16) % (SECTORS - 8);
}

static void make_sector(unsigned char *at, int file, uint64_t number, uint64_t sector)
{
    uint64_t words[SECTOR / 8] = {number + 1, sector, (uint64_t)file};
    for (size_t n = 3; n < SECTOR / 8; n++)
        words[n] = mix(words[0] * 1000003 + sector * 64 + n);
    memcpy(at, words, sizeof words);
}

/* What had to be there when somebody began to look. */
struct known {
    uint64_t returned[PARTS], bytes, begun_ns;
};

static struct known known_of(const struct file *file)
{
    struct known known = {0};
    for (int part = 0; part < PARTS; part++) {
        /* The latest is counted last. */
        uint64_t begun = atomic_load(&file->parts[part].begun_ns);
        known.returned[part] = atomic_load(&file->parts[part].returned);
        known.begun_ns = begun > known.begun_ns ? begun : known.begun_ns;
    }
    if (atomic_load(&file->kind) == BLOCKS) {
        for (uint64_t number = 0, count; number < known.returned[WRITER]; number++) {
            uint64_t end = (sector_of(number, &count) + count) * SECTOR;
            known.bytes = end > known.bytes ? end : known.bytes;
        }
        return known;
    }
    int index = (int)(file - board->files);
    for (int part = 0; part < PARTS; part++)
        for (uint64_t number = 0; number < known.returned[part]; number++)
            known.bytes += part == WRITER && is_left(file, number) ? 0 : length_of(index, part, number);
    return known;
}

static int is_under_way(const struct file *file, const struct known *known)
{
    for (int part = 0; part < PARTS; part++)
        if (atomic_load(&file->parts[part].started) > known->returned[part])
            return 1;
    return atomic_load(&file->any_left);
}

static char complaint[800];

__attribute__((format(printf, 1, 2))) static int complain(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(complaint, sizeof complaint, format, arguments);
    va_end(arguments);
    return 0;
}

/* Whether a log's content is what it has to be. */
static int is_log_right(const struct file *file, const struct known *known, const unsigned char *bytes, size_t size)
{
    static unsigned char expected[RECORD_MAX];
    static uint8_t seen[NUMBERS];
    uint64_t next[PARTS] = {0};
    size_t at = 0;
    int index = (int)(file - board->files);
    memset(seen, 0, sizeof seen);
    while (size - at >= sizeof(struct record)) {
        struct record head;
        memcpy(&head, bytes + at, sizeof head);
        if (head.magic != MAGIC || head.part >= PARTS || head.number >= NUMBERS || head.file != (uint32_t)index ||
            head.length != length_of(index, (int)head.part, head.number) || head.length > size - at)
            break;
        make_record(expected, index, (int)head.part, head.number);
        if (memcmp(expected, bytes + at, head.length))
            break;
        uint64_t *expects = &next[head.part];
        if (head.part == WRITER && is_left(file, head.number)) {
            if (seen[head.number]++)
                return complain("record %lu, which was left, is there twice, again at %zu", head.number, at);
        } else {
            while (head.part == WRITER && *expects < head.number && is_left(file, *expects))
                ++*expects;
            if (*expects != head.number)
                return complain("record %lu of part %u at %zu of %zu, where %lu was to come", head.number, head.part, at, size, *expects);
            ++*expects;
        }
        at += head.length;
    }
    for (int part = 0; part < PARTS; part++) {
        while (part == WRITER && next[part] < known->returned[part] && is_left(file, next[part]))
            ++next[part];
        if (next[part] < known->returned[part]) {
            uint64_t words[4] = {0};
            memcpy(words, bytes + at, size - at < sizeof words ? size - at : sizeof words);
            return complain("%lu records of part %d had returned, %lu are there; at %zu of %zu there is %lx %lx %lx %lx",
                            known->returned[part], part, next[part], at, size, words[0], words[1], words[2], words[3]);
        }
    }
    if (at < size && !is_under_way(file, known))
        return complain("nobody writes, and behind all records there are %zu bytes more at %zu", size - at, at);
    return 1;
}

static int are_blocks_right(const struct file *file, const struct known *known, const unsigned char *bytes, size_t size)
{
    static uint64_t last[SECTORS];
    static unsigned char expected[SECTOR];
    int index = (int)(file - board->files);
    uint64_t started = atomic_load(&file->parts[WRITER].started), count;
    memset(last, 0, sizeof last);
    for (uint64_t number = 0; number < known->returned[WRITER]; number++) {
        uint64_t first = sector_of(number, &count);
        for (uint64_t sector = first; sector < first + count; sector++)
            last[sector] = number + 1;
    }
    for (uint64_t sector = 0; sector < SECTORS; sector++) {
        uint64_t found = 0, covers = 0;
        if ((sector + 1) * SECTOR <= size)
            memcpy(&found, bytes + sector * SECTOR, sizeof found);
        /* A write that is under way may be there in part. */
        for (uint64_t number = known->returned[WRITER]; number < started && !covers; number++) {
            uint64_t first = sector_of(number, &count);
            covers = first <= sector && sector < first + count;
        }
        if (covers)
            continue;
        if (found != last[sector])
            return complain("sector %lu has write %ld and not %ld; %lu had returned, %lu are started, size %zu", sector, (long)found - 1,
                            (long)last[sector] - 1, known->returned[WRITER], started, size);
        if (found == 0)
            memset(expected, 0, sizeof expected);
        else
            make_sector(expected, index, found - 1, sector);
        size_t there = size <= sector * SECTOR ? 0 : size - sector * SECTOR < SECTOR ? size - sector * SECTOR : SECTOR;
        if (memcmp(expected, bytes + sector * SECTOR, there))
            return complain("sector %lu is not whole: write %ld", sector, (long)found - 1);
    }
    return 1;
}

static int is_right(const struct file *file, const struct known *known, const unsigned char *bytes, size_t size)
{
    if (size < known->bytes)
        return complain("%zu bytes, where %lu had been written", size, known->bytes);
    return atomic_load(&file->kind) == BLOCKS ? are_blocks_right(file, known, bytes, size) : is_log_right(file, known, bytes, size);
}
