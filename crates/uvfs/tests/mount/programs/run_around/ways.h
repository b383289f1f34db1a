// The ways into the kernel. Each takes a system call's number and arguments, and answers as the kernel does: a
// negative errno where the call failed.
#pragma once
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

typedef long Way(long nr, long a, long b, long c, long d, long e, long f);

static long from_errno(long result) { return result == -1 ? -errno : result; }

// The C library's functions: nothing goes around it.
static long by_libc(long nr, long a, long b, long c, long d, long e, long f) {
    switch (nr) {
    case SYS_openat: return from_errno(openat(a, (char *)b, c, d));
    case SYS_close: return from_errno(close(a));
    case SYS_dup: return from_errno(dup(a));
    case SYS_dup2: return from_errno(dup2(a, b));
    case SYS_dup3: return from_errno(dup3(a, b, c));
#ifdef __GLIBC__
    case SYS_close_range: return from_errno(close_range(a, b, c));
#endif
    case SYS_lseek: return from_errno(lseek(a, b, c));
    case SYS_read: return from_errno(read(a, (void *)b, c));
    case SYS_write: return from_errno(write(a, (void *)b, c));
    case SYS_writev: return from_errno(writev(a, (void *)b, c));
    case SYS_pread64: return from_errno(pread(a, (void *)b, c, d));
    case SYS_pwrite64: return from_errno(pwrite(a, (void *)b, c, d));
    case SYS_ftruncate: return from_errno(ftruncate(a, b));
    case SYS_sendfile: return from_errno(sendfile(a, b, (void *)c, d));
    case SYS_fcntl: return from_errno(fcntl(a, b, c));
    case SYS_mmap: return from_errno((long)mmap((void *)a, b, c, d, e, f));
    case SYS_prlimit64: return from_errno(setrlimit(b, (void *)c));
    case SYS_sendmsg: return from_errno(sendmsg(a, (void *)b, c));
    case SYS_clone: return from_errno(fork());
    case SYS_execve: return from_errno(execve((char *)a, (void *)b, (void *)c));
    case SYS_exit_group: _exit(a);
    }
    return from_errno(syscall(nr, a, b, c, d, e, f));
}

static long by_syscall(long nr, long a, long b, long c, long d, long e, long f) {
    return from_errno(syscall(nr, a, b, c, d, e, f));
}

#ifdef __x86_64__
static inline __attribute__((always_inline)) long inlined(long nr, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#endif

__attribute__((noinline)) static long by_asm(long nr, long a, long b, long c, long d, long e, long f) {
    return inlined(nr, a, b, c, d, e, f);
}

// The 32-bit entry of the kernel, whose numbers are i386's and whose pointers have 32 bits.
static __thread char *low;
static long copied(const void *from, size_t len) {
    static __thread size_t used;
    if (!low) {
        low = (char *)by_asm(SYS_mmap, 0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
        if ((long)low < 0) abort();
    }
    used = (used + len + 15) % (1 << 19) & ~15ul;
    char *to = low + used;
    if (from) memcpy(to, from, len);
    used += len;
    return (long)to;
}
static long with_int80(int nr, long a, long b, long c, long d, long e, long f) {
    long result;
    register long arg6 = f;
    __asm__ volatile("push %%rbp; mov %[six], %%rbp; int $0x80; pop %%rbp"
                     : "=a"(result)
                     : "a"((long)nr), "b"(a), "c"(b), "d"(c), "S"(d), "D"(e), [six] "r"(arg6)
                     : "r8", "r9", "r10", "r11", "memory");
    return (int)result == result || result < 0 ? result : (long)(unsigned)result;
}
static long vector32(char **strings) {
    unsigned list[64];
    int n = 0;
    for (; strings[n] && n < 63; n++) list[n] = copied(strings[n], strlen(strings[n]) + 1);
    list[n] = 0;
    return copied(list, (n + 1) * sizeof *list);
}
static long by_int80(long nr, long a, long b, long c, long d, long e, long f) {
    long buffer, done;
    switch (nr) {
    case SYS_openat: return with_int80(295, (int)a, copied((char *)b, strlen((char *)b) + 1), c, d, 0, 0);
    case SYS_close: return with_int80(6, a, 0, 0, 0, 0, 0);
    case SYS_dup: return with_int80(41, a, 0, 0, 0, 0, 0);
    case SYS_dup2: return with_int80(63, a, b, 0, 0, 0, 0);
    case SYS_dup3: return with_int80(330, a, b, c, 0, 0, 0);
    case SYS_close_range: return with_int80(436, a, b, c, 0, 0, 0);
    case SYS_lseek: return with_int80(19, a, (int)b, c, 0, 0, 0);
    case SYS_fcntl: return with_int80(221, a, b, c, 0, 0, 0);
    case SYS_ftruncate: return with_int80(93, a, b, 0, 0, 0, 0);
    case SYS_read: case SYS_pread64:
        buffer = copied(NULL, c);
        done = with_int80(nr == SYS_read ? 3 : 180, a, buffer, c, d, 0, 0);
        if (done > 0) memcpy((void *)b, (void *)buffer, done);
        return done;
    case SYS_write: return with_int80(4, a, copied((void *)b, c), c, 0, 0, 0);
    case SYS_pwrite64: return with_int80(181, a, copied((void *)b, c), c, d, 0, 0);
    case SYS_sendfile: return with_int80(187, a, b, c, d, 0, 0);
    case SYS_mmap: return with_int80(192, a, b, c, d, e, f >> 12);
    case SYS_clone: return with_int80(120, a, 0, 0, 0, 0, 0);
    case SYS_execve: return with_int80(11, copied((char *)a, strlen((char *)a) + 1), vector32((char **)b), vector32((char **)c), 0, 0, 0);
    case SYS_exit_group: return with_int80(252, a, 0, 0, 0, 0, 0);
    }
    return by_asm(nr, a, b, c, d, e, f);
}

#ifdef WITH_URING
#include <liburing.h>
static struct io_uring ring;
static int ring_made, ring_flags;
static void make_ring(void) {
    if (ring_made) return;
    int done = io_uring_queue_init(8, &ring, ring_flags);
    if (done < 0) { printf("no ring: %s\n", strerror(-done)); fflush(stdout); exit(3); }
    ring_made = 1;
}
// What a ring can do, by one; the rest by the C library.
static long by_uring(long nr, long a, long b, long c, long d, long e, long f) {
    make_ring();
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring);
    switch (nr) {
    case SYS_openat: io_uring_prep_openat(sqe, a, (char *)b, c, d); break;
    case SYS_close: io_uring_prep_close(sqe, a); break;
    case SYS_read: io_uring_prep_read(sqe, a, (void *)b, c, -1); break;
    case SYS_write: io_uring_prep_write(sqe, a, (void *)b, c, -1); break;
    case SYS_writev: io_uring_prep_writev(sqe, a, (void *)b, c, -1); break;
    case SYS_pread64: io_uring_prep_read(sqe, a, (void *)b, c, d); break;
    case SYS_pwrite64: io_uring_prep_write(sqe, a, (void *)b, c, d); break;
    case SYS_sendmsg: io_uring_prep_sendmsg(sqe, a, (void *)b, c); break;
    default:
        io_uring_prep_nop(sqe);
        if (nr != SYS_clone && nr != SYS_execve && nr != SYS_exit_group) break;
    }
    struct io_uring_cqe *cqe;
    int done = io_uring_submit(&ring);
    if (done < 0) return done;
    while ((done = io_uring_wait_cqe(&ring, &cqe)) == -EINTR) {}
    if (done < 0) return done;
    long result = cqe->res;
    int was_nop = sqe->opcode == IORING_OP_NOP;
    io_uring_cqe_seen(&ring, cqe);
    return was_nop ? by_libc(nr, a, b, c, d, e, f) : result;
}
// A thread of the kernel takes what is submitted, without a call.
static long by_sqpoll(long nr, long a, long b, long c, long d, long e, long f) {
    ring_flags = IORING_SETUP_SQPOLL;
    return by_uring(nr, a, b, c, d, e, f);
}
#endif

#ifdef WITH_UV
#include <uv.h>
// libuv's requests, which its own threads carry out (or its ring, where it has one); the rest by the C library.
static void uv_done(uv_fs_t *request) { (void)request; }
static long by_libuv(long nr, long a, long b, long c, long d, long e, long f) {
    uv_loop_t *loop = uv_default_loop();
    uv_fs_t request;
    uv_buf_t buffer = uv_buf_init((void *)b, c);
    int began;
    switch (nr) {
    case SYS_openat: began = uv_fs_open(loop, &request, (char *)b, c, d, uv_done); break;
    case SYS_close: began = uv_fs_close(loop, &request, a, uv_done); break;
    case SYS_read: began = uv_fs_read(loop, &request, a, &buffer, 1, -1, uv_done); break;
    case SYS_write: began = uv_fs_write(loop, &request, a, &buffer, 1, -1, uv_done); break;
    case SYS_pread64: began = uv_fs_read(loop, &request, a, &buffer, 1, d, uv_done); break;
    case SYS_pwrite64: began = uv_fs_write(loop, &request, a, &buffer, 1, d, uv_done); break;
    case SYS_ftruncate: began = uv_fs_ftruncate(loop, &request, a, b, uv_done); break;
    default: return by_libc(nr, a, b, c, d, e, f);
    }
    if (began < 0) return began;
    uv_run(loop, UV_RUN_DEFAULT);
    long result = request.result;
    uv_fs_req_cleanup(&request);
    return result;
}
#endif

#ifdef WITH_GO
// Go's own system calls, in the file around.go.
extern long goSyscall(long nr, long a, long b, long c, long d, long e, long f);
static long by_go(long nr, long a, long b, long c, long d, long e, long f) {
    // A process with more threads can't be copied by Go; the C library does that.
    return nr == SYS_clone ? by_libc(nr, a, b, c, d, e, f) : goSyscall(nr, a, b, c, d, e, f);
}
#endif

static const struct { const char *name; Way *way; } ways[] = {
    {"libc", by_libc}, {"syscall", by_syscall}, {"asm", by_asm}, {"int80", by_int80},
#ifdef WITH_URING
    {"uring", by_uring}, {"sqpoll", by_sqpoll},
#endif
#ifdef WITH_UV
    {"libuv", by_libuv},
#endif
#ifdef WITH_GO
    {"go", by_go},
#endif
};
