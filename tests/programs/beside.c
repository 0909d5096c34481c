/* beside FILE: threads work on an open file, each answer on standard output after a line on standard input: "works" once they have begun, "rests" when
 * they have ended, "done" after TURNS more operations. */
#include <err.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

enum { THREADS = 4, TURNS = 100 };

static int file;
static volatile int ends;

static void work(void)
{
    if (pwrite(file, "works", 5, 0) != 5 || fdatasync(file) != 0)
        err(1, "work");
}

static void *work_always(void *argument)
{
    while (!ends)
        work();
    return argument;
}

static void say(const char *what)
{
    puts(what);
    fflush(stdout);
    getchar();
}

int main(int argc, char **argv)
{
    pthread_t threads[THREADS];
    file = argc == 2 ? open(argv[1], O_RDWR | O_CREAT, 0666) : -1;
    if (file < 0)
        err(1, "open");
    for (int turn = 0; turn < TURNS; turn++)
        work();
    for (int thread = 0; thread < THREADS; thread++)
        pthread_create(&threads[thread], NULL, work_always, NULL);
    say("works");
    ends = 1;
    for (int thread = 0; thread < THREADS; thread++)
        pthread_join(threads[thread], NULL);
    say("rests");
    for (int turn = 0; turn < TURNS; turn++)
        work();
    say("done");
    return 0;
}
