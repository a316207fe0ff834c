/* A disk for tests, to be preloaded in front of libc: it writes down what reaches it, can be full
 * and can stall. Only files whose names are given are looked at.
 *
 *   SHIM_LOG     file that all writes and flushes are appended to; none if unset
 *   SHIM_FULL    while this file exists, data.mdb can't grow: ENOSPC
 *   SHIM_STALL   while this file exists, a flush of data.mdb does not return
 *
 * A record of the log: u8 kind, u8 file, u64 offset, u64 length, then the data of a write.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { WRITE = 'W', DURABLE_WRITE = 'D', TRUNCATE = 'T', FLUSH = 'S' };

static const char *const NAMES[] = {"data.mdb", "lock.mdb", "writer.gate", "acks"};
enum { DATA = 1, N_NAMES = 4, MAX_FDS = 1 << 16 };

/* Per descriptor: number of its name counted from 1, 0 for all other files; and O_DSYNC. */
static unsigned char file_of[MAX_FDS];
static unsigned char durable[MAX_FDS];
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is_there(const char *variable) {
  const char *path = getenv(variable);
  return path && !access(path, F_OK);
}

static int file(int fd) { return fd >= 0 && fd < MAX_FDS ? file_of[fd] : 0; }

/* Appends a record. The caller holds `order`, so that the log has the order of the disk. */
static void record(enum kind kind, int fd, uint64_t offset, uint64_t length, const void *data) {
  const char *path = getenv("SHIM_LOG");
  if (!path) return;
  if (log_fd < 0) {
    log_fd = REAL(open)(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log_fd < 0) abort();
  }
  unsigned char head[18] = {(unsigned char)kind, file_of[fd]};
  memcpy(head + 2, &offset, 8);
  memcpy(head + 10, &length, 8);
  struct iovec parts[2] = {{head, sizeof head}, {(void *)data, data ? length : 0}};
  if (REAL(writev)(log_fd, parts, 2) < 0) abort();
}

static int noted(int fd, const char *path, int flags) {
  if (fd < 0 || fd >= MAX_FDS) return fd;
  const char *slash = strrchr(path, '/');
  const char *name = slash ? slash + 1 : path;
  file_of[fd] = 0;
  durable[fd] = (flags & O_DSYNC) != 0;
  for (int i = 0; i < N_NAMES; i++)
    if (!strcmp(name, NAMES[i])) file_of[fd] = (unsigned char)(i + 1);
  return fd;
}

/* Whether a write has to fail: no room, and it is one that needs some. */
static int is_full(int fd, off_t end) {
  struct stat status;
  if (file(fd) != DATA || !is_there("SHIM_FULL")) return 0;
  if (!fstat(fd, &status) && end <= status.st_size) return 0;
  errno = ENOSPC;
  return 1;
}

static ssize_t written(int fd, ssize_t n, off_t offset, const struct iovec *parts, int count) {
  size_t left = n > 0 ? (size_t)n : 0;
  for (int i = 0; i < count && left; i++) {
    size_t length = parts[i].iov_len < left ? parts[i].iov_len : left;
    record(durable[fd] ? DURABLE_WRITE : WRITE, fd, (uint64_t)offset, length, parts[i].iov_base);
    offset += (off_t)length;
    left -= length;
  }
  return n;
}

static off_t length_of(const struct iovec *parts, int count) {
  off_t sum = 0;
  for (int i = 0; i < count; i++) sum += (off_t)parts[i].iov_len;
  return sum;
}

/* Where a write without an offset goes. */
static off_t place(int fd) {
  int appends = fcntl(fd, F_GETFL) & O_APPEND;
  return lseek(fd, 0, appends ? SEEK_END : SEEK_CUR);
}

#define OPENS(name)                                       \
  int name(const char *path, int flags, ...) {            \
    va_list rest;                                         \
    va_start(rest, flags);                                \
    int mode = flags & O_CREAT ? va_arg(rest, int) : 0;   \
    va_end(rest);                                         \
    return noted(REAL(name)(path, flags, mode), path, flags); \
  }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                    \
  int name(int at, const char *path, int flags, ...) {    \
    va_list rest;                                         \
    va_start(rest, flags);                                \
    int mode = flags & O_CREAT ? va_arg(rest, int) : 0;   \
    va_end(rest);                                         \
    return noted(REAL(name)(at, path, flags, mode), path, flags); \
  }
OPENS_AT(openat)
OPENS_AT(openat64)

int close(int fd) {
  if (file(fd)) file_of[fd] = 0;
  return REAL(close)(fd);
}

#define WRITES(call, end, offset, parts, count)           \
  if (!file(fd)) return call;                             \
  if (is_full(fd, end)) return -1;                        \
  pthread_mutex_lock(&order);                             \
  off_t at = offset;                                      \
  ssize_t n = written(fd, call, at, parts, count);        \
  pthread_mutex_unlock(&order);                           \
  return n

ssize_t write(int fd, const void *data, size_t size) {
  struct iovec part = {(void *)data, size};
  WRITES(REAL(write)(fd, data, size), place(fd) + (off_t)size, place(fd), &part, 1);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
  WRITES(REAL(writev)(fd, parts, count), place(fd) + length_of(parts, count), place(fd), parts,
         count);
}

#define PWRITES(name)                                     \
  ssize_t name(int fd, const void *data, size_t size, off_t offset) { \
    struct iovec part = {(void *)data, size};             \
    WRITES(REAL(name)(fd, data, size, offset), offset + (off_t)size, offset, &part, 1); \
  }
PWRITES(pwrite)
PWRITES(pwrite64)

#define PWRITEVS(name)                                    \
  ssize_t name(int fd, const struct iovec *parts, int count, off_t offset) { \
    WRITES(REAL(name)(fd, parts, count, offset), offset + length_of(parts, count), offset, parts, \
           count);                                        \
  }
PWRITEVS(pwritev)
PWRITEVS(pwritev64)

#define TRUNCATES(name)                                   \
  int name(int fd, off_t size) {                          \
    if (!file(fd)) return REAL(name)(fd, size);           \
    if (is_full(fd, size)) return -1;                     \
    pthread_mutex_lock(&order);                           \
    int failed = REAL(name)(fd, size);                    \
    if (!failed) record(TRUNCATE, fd, (uint64_t)size, 0, NULL); \
    pthread_mutex_unlock(&order);                         \
    return failed;                                        \
  }
TRUNCATES(ftruncate)
TRUNCATES(ftruncate64)

/* What was written before a flush began is durable; what is written meanwhile may not be. */
#define FLUSHES(name)                                     \
  int name(int fd) {                                      \
    while (file(fd) == DATA && is_there("SHIM_STALL")) usleep(10000); \
    int failed = REAL(name)(fd);                          \
    if (!file(fd) || failed) return failed;               \
    pthread_mutex_lock(&order);                           \
    record(FLUSH, fd, 0, 0, NULL);                        \
    pthread_mutex_unlock(&order);                         \
    return 0;                                             \
  }
FLUSHES(fsync)
FLUSHES(fdatasync)
