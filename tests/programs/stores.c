// Stores into a new file by a shared mapping, with msync after each step, until that fails or BYTES are stored. Prints how many were,
// and the error.
//
//     stores FILE BYTES

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// So much is stored between two calls of msync.
#define STEP (256 << 10)

int main(int argc, char **argv)
{
	size_t bytes = argc == 3 ? strtoul(argv[2], NULL, 10) : 0;
	int file = argc == 3 ? open(argv[1], O_RDWR | O_CREAT, 0644) : -1;
	if (file < 0 || bytes == 0 || ftruncate(file, (off_t)bytes)) {
		perror("stores");
		return 2;
	}
	char *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (mapped == MAP_FAILED) {
		perror("mmap");
		return 2;
	}
	// The mapping is what counts from here on.
	close(file);
	size_t done = 0;
	while (done < bytes) {
		size_t step = bytes - done < STEP ? bytes - done : STEP;
		memset(mapped + done, 's', step);
		if (msync(mapped + done, step, MS_SYNC)) {
			printf("%zu %s\n", done, strerror(errno));
			return 1;
		}
		done += step;
	}
	printf("%zu\n", done);
	return 0;
}
