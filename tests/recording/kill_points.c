/* Preloaded: ends the process by SIGKILL just before its n-th call that changes a file. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <sys/types.h>
#include <unistd.h>

static long calls_left = 0;

/* Counting starts now; 0 switches it off. */
void kill_before(long call) { calls_left = call; }

static void count(void)
{
    if (calls_left > 0 && --calls_left == 0) {
        kill(getpid(), SIGKILL);
        for (;;)
            pause();
    }
}

ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t offset)
{
    count();
    ssize_t (*next)(int, const void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pwrite64");
    return next(file, bytes, size, offset);
}

int ftruncate64(int file, off64_t size)
{
    count();
    int (*next)(int, off64_t) = dlsym(RTLD_NEXT, "ftruncate64");
    return next(file, size);
}

int fsync(int file)
{
    count();
    int (*next)(int) = dlsym(RTLD_NEXT, "fsync");
    return next(file);
}

int rename(const char *from, const char *to)
{
    count();
    int (*next)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
    return next(from, to);
}
