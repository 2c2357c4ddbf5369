/* Make calls fail for paths under a folder, as a network file system does: preloaded into the processes of tests.
 *
 * HPCRL_TEST_FAULTY_FOLDER is the folder, HPCRL_TEST_FAULTY_SWITCH a file outside it. Its content is
 * `ERRNO KINDS MILLISECONDS`: the number of
 * the error (0: none), the kinds of calls that fail (r: those that read, w: those that change), and a lag for each of
 * them (-1: the call hangs until the switch changes). Without the file all is well. HPCRL_TEST_FAULTY_SWITCH.NODE and
 * HPCRL_TEST_FAULTY_SWITCH.PID are switches of one node of a lab and of one process.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

static int read_file(const char *path, char *kinds, int *lag_ms) {
    char text[64] = {0};
    int number = 0, fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    *lag_ms = 0;
    strcpy(kinds, "");
    if (fd < 0) return 0;
    if (syscall(SYS_read, fd, text, sizeof text - 1) > 0) sscanf(text, "%d %7s %d", &number, kinds, lag_ms);
    syscall(SYS_close, fd);
    return number;
}

/* Read the first switch that is there: that of the process, of its node, or of all. */
static int read_switch(char *kinds, int *lag_ms) {
    const char *path = getenv("HPCRL_TEST_FAULTY_SWITCH"), *node = getenv("SLURMD_NODENAME");
    char own[PATH_MAX];
    int number;
    *lag_ms = 0;
    strcpy(kinds, "");
    if (!path) return 0;
    snprintf(own, sizeof own, "%s.%d", path, (int)getpid());
    number = read_file(own, kinds, lag_ms);
    if (kinds[0]) return number;
    snprintf(own, sizeof own, "%s.%s", path, node ? node : "");
    number = read_file(own, kinds, lag_ms);
    return kinds[0] ? number : read_file(path, kinds, lag_ms);
}

/* Return the error of a call on a path, or 0, after its lag. */
static int find_fault(const char *path, char kind) {
    const char *folder = getenv("HPCRL_TEST_FAULTY_FOLDER");
    char kinds[8];
    int lag_ms, number;
    if (!folder || !path || strncmp(path, folder, strlen(folder))) return 0;
    for (;;) {
        number = read_switch(kinds, &lag_ms);
        if (!strchr(kinds, kind)) return 0;
        if (lag_ms >= 0) break;
        struct timespec moment = {0, 10000000};
        nanosleep(&moment, NULL);
    }
    struct timespec lag = {lag_ms / 1000, (lag_ms % 1000) * 1000000L};
    if (lag_ms) nanosleep(&lag, NULL);
    return number;
}

static int fails(const char *path, char kind) {
    int number = find_fault(path, kind);
    if (number) errno = number;
    return number;
}

static int fails_fd(int fd, char kind) {
    char link[32], path[PATH_MAX] = {0};
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1) < 0) {
        errno = before;
        return 0;
    }
    return fails(path, kind);
}

#define OPEN_KIND(flags) ((flags) & (O_CREAT | O_TRUNC) ? 'w' : 'r')

int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    return fails(path, OPEN_KIND(flags)) ? -1 : REAL(open64)(path, flags, mode);
}

int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    return fails(path, OPEN_KIND(flags)) ? -1 : REAL(open)(path, flags, mode);
}

DIR *opendir(const char *path) { return fails(path, 'r') ? NULL : REAL(opendir)(path); }
int stat64(const char *path, struct stat64 *facts) { return fails(path, 'r') ? -1 : REAL(stat64)(path, facts); }
int lstat64(const char *path, struct stat64 *facts) { return fails(path, 'r') ? -1 : REAL(lstat64)(path, facts); }
int fstatat64(int dir, const char *path, struct stat64 *facts, int flags) {
    return fails(path, 'r') ? -1 : REAL(fstatat64)(dir, path, facts, flags);
}
ssize_t read(int fd, void *data, size_t num) { return fails_fd(fd, 'r') ? -1 : REAL(read)(fd, data, num); }
ssize_t write(int fd, const void *data, size_t num) { return fails_fd(fd, 'w') ? -1 : REAL(write)(fd, data, num); }
ssize_t pwrite64(int fd, const void *data, size_t num, off64_t at) {
    return fails_fd(fd, 'w') ? -1 : REAL(pwrite64)(fd, data, num, at);
}
ssize_t pwrite(int fd, const void *data, size_t num, off_t at) {
    return fails_fd(fd, 'w') ? -1 : REAL(pwrite)(fd, data, num, at);
}
int fsync(int fd) { return fails_fd(fd, 'w') ? -1 : REAL(fsync)(fd); }
int futimens(int fd, const struct timespec times[2]) { return fails_fd(fd, 'w') ? -1 : REAL(futimens)(fd, times); }
int utimensat(int dir, const char *path, const struct timespec times[2], int flags) {
    return fails(path, 'w') ? -1 : REAL(utimensat)(dir, path, times, flags);
}
int rename(const char *from, const char *to) { return fails(to, 'w') ? -1 : REAL(rename)(from, to); }
int link(const char *from, const char *to) { return fails(to, 'w') ? -1 : REAL(link)(from, to); }
int unlink(const char *path) { return fails(path, 'w') ? -1 : REAL(unlink)(path); }
int mkdir(const char *path, mode_t mode) { return fails(path, 'w') ? -1 : REAL(mkdir)(path, mode); }
