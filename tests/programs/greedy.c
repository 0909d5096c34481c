/* Allocates and touches as many MiB of memory as its argument says, page by page.
 *
 * Under a lower limit the kernel kills it. Programs of several pages of code, such as head and tail in a pipe, may instead run on
 * for minutes at their limit: the kernel then drops one page of them to read the next (thrashing). The loop here is on one page, which is
 * missing only when nothing is left to drop. */
#include <stdlib.h>
#include <sys/mman.h>

int main(int count, char **arguments)
{
    size_t bytes = count > 1 ? strtoul(arguments[1], NULL, 10) << 20 : 0;
    volatile char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return 3;
    for (size_t at = 0; at < bytes; at += 4096)
        memory[at] = 1;
    return 0;
}
