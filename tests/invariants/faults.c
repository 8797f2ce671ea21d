/* Preloaded into a process, counts its file-system calls below one folder and lets one of them end it or fail.
 *
 * A call is an event when its path lies below the folder: those that change something, and with `reads` also those that
 * open a file or folder to read it. A process that is killed in a write has written half of it. Everything that goes
 * through libc is seen: Python, PyTorch and the Rust of safetensors alike.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096];
static size_t length;      /* of folder; 0 before `faults_arm` */
static long at, count;     /* the event that goes wrong; events so far */
static int error, reads, log_file = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* failure: the errno of event `number`, 0 to kill the process there. A full disk (ENOSPC) stays full. */
void faults_arm(const char *path, long number, int failure, int with_reads, int log_descriptor) {
    strncpy(folder, path, sizeof folder - 1);
    at = number, error = failure, reads = with_reads, log_file = log_descriptor, count = 0;
    length = strlen(folder);
}

static int is_below(const char *path) {
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

/* The path of a file descriptor, or of a name in a folder that a descriptor stands for. */
static int resolve(int directory, const char *name, char *path, size_t size) {
    char link[64];
    ssize_t found;
    if (name && (*name == '/' || directory == AT_FDCWD)) {
        snprintf(path, size, "%s", name);
        return 1;
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    found = syscall(SYS_readlinkat, AT_FDCWD, link, path, size - 1);
    if (found < 0) return 0;
    path[found] = 0;
    if (name) snprintf(path + found, size - found, "/%s", name);
    return 1;
}

enum { NOTHING, FAIL, DIE };

/* Whether an event goes wrong. grows: a full disk refuses it. */
static int event(const char *call, int directory, const char *name, int grows) {
    char path[8192], line[8400];
    int verdict = NOTHING, before = errno;
    if (!length || !resolve(directory, name, path, sizeof path) || !is_below(path)) {
        errno = before;
        return NOTHING;
    }
    pthread_mutex_lock(&mutex);
    count++;
    if (count == at || (error == ENOSPC && grows && at > 0 && count > at)) verdict = error ? FAIL : DIE;
    if (log_file >= 0) {
        int size = snprintf(line, sizeof line, "%s %s\n", call, path + length);
        syscall(SYS_write, log_file, line, size);
    }
    if (verdict != DIE) pthread_mutex_unlock(&mutex); /* nobody else gets further than a process that dies */
    errno = verdict == FAIL ? error : before;
    return verdict;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define GUARD(call, directory, name, grows, failed)                \
    switch (event(call, directory, name, grows)) {                 \
        case DIE: die();                                           \
        case FAIL: return failed;                                  \
    }

static int opening(const char *name, int directory, int flags) {
    if (flags & (O_CREAT | O_TRUNC)) return event("create", directory, name, 1);
    if ((flags & O_ACCMODE) != O_RDONLY) return event("open", directory, name, 0);
    return reads ? event("read", directory, name, 0) : NOTHING;
}

#define OPEN(name)                                                 \
    int name(const char *path, int flags, ...) {                   \
        va_list list;                                              \
        va_start(list, flags);                                     \
        int mode = va_arg(list, int);                              \
        va_end(list);                                              \
        switch (opening(path, AT_FDCWD, flags)) {                  \
            case DIE: die();                                       \
            case FAIL: return -1;                                  \
        }                                                          \
        return NEXT(name)(path, flags, mode);                      \
    }
#define OPENAT(name)                                               \
    int name(int directory, const char *path, int flags, ...) {    \
        va_list list;                                              \
        va_start(list, flags);                                     \
        int mode = va_arg(list, int);                              \
        va_end(list);                                              \
        switch (opening(path, directory, flags)) {                 \
            case DIE: die();                                       \
            case FAIL: return -1;                                  \
        }                                                          \
        return NEXT(name)(directory, path, flags, mode);           \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void *data, size_t size) {
    switch (event("write", file, NULL, 1)) {
        case DIE:
            if (syscall(SYS_write, file, data, size / 2) < 0) die();
            die();
        case FAIL: return -1;
    }
    return NEXT(write)(file, data, size);
}

ssize_t writev(int file, const struct iovec *parts, int number) {
    GUARD("write", file, NULL, 1, -1)
    return NEXT(writev)(file, parts, number);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) {
    GUARD("write", file, NULL, 1, -1)
    return NEXT(pwrite64)(file, data, size, offset);
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) {
    GUARD("write", out, NULL, 1, -1)
    return ((ssize_t(*)(int, int, off64_t *, size_t))dlsym(RTLD_NEXT, "sendfile64"))(out, in, offset, size);
}

int ftruncate64(int file, off64_t size) {
    GUARD("truncate", file, NULL, 0, -1)
    return NEXT(ftruncate64)(file, size);
}

/* A process that dies leaves what it wrote in the kernel's memory, so a sync changes nothing that a test could see, and
 * takes a third of a run's time. It is an event, and not done. */
int fsync(int file) {
    GUARD("fsync", file, NULL, 0, -1)
    return length ? 0 : NEXT(fsync)(file);
}

int fdatasync(int file) {
    GUARD("fsync", file, NULL, 0, -1)
    return length ? 0 : NEXT(fdatasync)(file);
}

int rename(const char *from, const char *to) {
    GUARD("rename", AT_FDCWD, to, 0, -1)
    return NEXT(rename)(from, to);
}

int renameat(int source, const char *from, int target, const char *to) {
    GUARD("rename", target, to, 0, -1)
    return NEXT(renameat)(source, from, target, to);
}

int link(const char *from, const char *to) {
    GUARD("link", AT_FDCWD, to, 0, -1)
    return NEXT(link)(from, to);
}

int unlink(const char *path) {
    GUARD("unlink", AT_FDCWD, path, 0, -1)
    return NEXT(unlink)(path);
}

int unlinkat(int directory, const char *path, int flags) {
    GUARD("unlink", directory, path, 0, -1)
    return NEXT(unlinkat)(directory, path, flags);
}

int rmdir(const char *path) {
    GUARD("rmdir", AT_FDCWD, path, 0, -1)
    return NEXT(rmdir)(path);
}

int mkdir(const char *path, mode_t mode) {
    /* One that is there already changes nothing. */
    if (syscall(SYS_faccessat, AT_FDCWD, path, F_OK) != 0) GUARD("mkdir", AT_FDCWD, path, 1, -1)
    return NEXT(mkdir)(path, mode);
}

int chmod(const char *path, mode_t mode) {
    GUARD("chmod", AT_FDCWD, path, 0, -1)
    return NEXT(chmod)(path, mode);
}

int fchmodat(int directory, const char *path, mode_t mode, int flags) {
    GUARD("chmod", directory, path, 0, -1)
    return NEXT(fchmodat)(directory, path, mode, flags);
}

int utimensat(int directory, const char *path, const struct timespec times[2], int flags) {
    GUARD("touch", directory, path, 0, -1)
    return NEXT(utimensat)(directory, path, times, flags);
}

DIR *opendir(const char *path) {
    if (reads) GUARD("list", AT_FDCWD, path, 0, NULL)
    return NEXT(opendir)(path);
}
