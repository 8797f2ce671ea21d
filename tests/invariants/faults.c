/* Preloaded into a process, counts its file-system calls below one folder and lets one of them end it or fail.
 *
 * A call is an event when its path lies below the folder: those that change something, and with `reads` also those that
 * open a file or folder to read it. A process that is killed in a write has written half of it. Or nothing goes wrong,
 * and every event leaves a copy of the folder: what a process that is killed there leaves. Everything that goes through
 * libc is seen: Python, PyTorch and the Rust of safetensors alike.
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
static char copies[4096];  /* where each event leaves a copy of folder, named by its number; empty for none */
static size_t length;      /* of folder; 0 before `faults_arm` */
static long at, count;     /* the event that goes wrong; events so far */
static int error, reads, log_file = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* failure: the errno of event `number`, 0 to kill the process there. A full disk (ENOSPC) stays full. */
void faults_arm(const char *path, long number, int failure, int with_reads, int log_descriptor, const char *into) {
    strncpy(folder, path, sizeof folder - 1);
    strncpy(copies, into, sizeof copies - 1);
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

enum { NOTHING, FAIL, DIE, COPY };

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
    if (*copies) verdict = COPY;
    if (verdict < DIE) pthread_mutex_unlock(&mutex); /* nobody else gets further, while it dies or copies */
    errno = verdict == FAIL ? error : before;
    return verdict;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static void copy(void) {
    char command[9000];
    snprintf(command, sizeof command, "cp -a '%s' '%s/%ld' 2>/dev/null", folder, copies, count);
    int failed = system(command); /* as at the first event, where there is no folder yet */
    (void)failed;
    pthread_mutex_unlock(&mutex);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OBEY(verdict, failed)                                      \
    switch (verdict) {                                             \
        case DIE: die();                                           \
        case FAIL: return failed;                                  \
        case COPY: copy();                                         \
    }
#define GUARD(call, directory, name, grows, failed) OBEY(event(call, directory, name, grows), failed)

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
        OBEY(opening(path, AT_FDCWD, flags), -1)                   \
        return NEXT(name)(path, flags, mode);                      \
    }
#define OPENAT(name)                                               \
    int name(int directory, const char *path, int flags, ...) {    \
        va_list list;                                              \
        va_start(list, flags);                                     \
        int mode = va_arg(list, int);                              \
        va_end(list);                                              \
        OBEY(opening(path, directory, flags), -1)                  \
        return NEXT(name)(directory, path, flags, mode);           \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void *data, size_t size) {
    int verdict = event("write", file, NULL, 1);
    ssize_t half = verdict < DIE ? 0 : syscall(SYS_write, file, data, size / 2);
    if (half < 0) half = 0;
    OBEY(verdict, -1)
    ssize_t rest = NEXT(write)(file, (const char *)data + half, size - half);
    return rest < 0 ? rest : half + rest;
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
