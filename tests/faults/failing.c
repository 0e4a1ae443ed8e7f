/* Make calls of the C library fail, as a quota, a damaged disk or a full one does: LD_PRELOAD.

   FAIL_CALLS: "read" or "write"; FAIL_ERRNO: a number; FAIL_BELOW: files below this path; FAIL_AFTER:
   bytes that succeed before. The environment is read at each call, so that a fork can set it. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static long done;

static int fails(const char *calls, int descriptor, size_t bytes) {
  const char *wanted = getenv("FAIL_CALLS"), *below = getenv("FAIL_BELOW");
  if (!wanted || !below || strcmp(wanted, calls)) return 0;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  if (strncmp(path, below, strlen(below))) return 0;
  done += bytes;
  if (done <= atol(getenv("FAIL_AFTER"))) return 0;
  errno = atoi(getenv("FAIL_ERRNO"));
  return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int f, const void *from, size_t n) {
  return fails("write", f, n) ? -1 : REAL(write)(f, from, n);
}
ssize_t pwrite(int f, const void *from, size_t n, off_t at) {
  return fails("write", f, n) ? -1 : REAL(pwrite)(f, from, n, at);
}
ssize_t pwrite64(int f, const void *from, size_t n, off64_t at) {
  return fails("write", f, n) ? -1 : REAL(pwrite64)(f, from, n, at);
}
ssize_t writev(int f, const struct iovec *from, int n) {
  size_t bytes = 0;
  for (int i = 0; i < n; i++) bytes += from[i].iov_len;
  return fails("write", f, bytes) ? -1 : REAL(writev)(f, from, n);
}
int fsync(int f) { return fails("write", f, 0) ? -1 : REAL(fsync)(f); }
int ftruncate(int f, off_t n) { return fails("write", f, n) ? -1 : REAL(ftruncate)(f, n); }
ssize_t read(int f, void *to, size_t n) {
  return fails("read", f, n) ? -1 : REAL(read)(f, to, n);
}
ssize_t pread(int f, void *to, size_t n, off_t at) {
  return fails("read", f, n) ? -1 : REAL(pread)(f, to, n, at);
}
ssize_t pread64(int f, void *to, size_t n, off64_t at) {
  return fails("read", f, n) ? -1 : REAL(pread64)(f, to, n, at);
}
