// Goes around the C library in the middle of its use. Arguments: a way (ways.h), a place (places.h), an operation, a
// directory. The program works on the files A and B by the C library, does the operation in that way at that place,
// and works on by the C library. It writes down every outcome, numbers of descriptors too: they are the same on every
// file system, whichever server serves it.
#include "ways.h"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

static Way *way;
static const char *self, *where, *way_name, *operation;
static int a = -1, b = -1;
static int low_output = 1;

// Past every layer: children that share this memory or have no C library's state write, too.
static void line(const char *format, ...) {
    char text[500];
    va_list list;
    va_start(list, format);
    int n = vsnprintf(text, sizeof text, format, list);
    va_end(list);
    by_asm(SYS_write, low_output, (long)text, n, 0, 0, 0);
}

static const char *name_of(long result) {
    const char *name = result < 0 && result > -4096 ? strerror(-result) : "";
    return name;
}
static void step(const char *what, long result) { line("%s: %ld %s\n", what, result < 0 ? -1 : result, name_of(result)); }

#define CALL(nr, a1, a2, a3, a4, a5, a6) way(nr, (long)(a1), (long)(a2), (long)(a3), (long)(a4), (long)(a5), (long)(a6))
#define AROUND(nr, a1, a2, a3, a4) step("around " #nr, CALL(nr, a1, a2, a3, a4, 0, 0))
#define LIBC(call) step(#call, from_errno(call))

static const char *files[] = {"A", "B", "C"};

// Works with a descriptor as most programs would, and tells which file it is.
static void use(const char *name, int fd) {
    char text[9] = "";
    struct stat st, other;
    line("-- %s, %d\n", name, fd);
    LIBC(lseek(fd, 0, SEEK_CUR));
    LIBC(write(fd, "<used>", 6));
    LIBC(lseek(fd, 0, SEEK_CUR));
    LIBC(read(fd, text, 5));
    line("  %s\n", text);
    memset(text, 0, sizeof text);
    LIBC(pread(fd, text, 8, 3));
    line("  %s\n", text);
    LIBC(pwrite(fd, "+", 1, 30));
    LIBC(lseek(fd, -2, SEEK_CUR));
    LIBC(fcntl(fd, F_GETFD));
    step("flags", from_errno(fcntl(fd, F_GETFL)) & ~(long)(O_LARGEFILE | 0100000));
    if (fstat(fd, &st) < 0) return;
    line("  %ld bytes of", (long)st.st_size);
    for (int i = 0; i < 3; i++)
        if (stat(files[i], &other) == 0 && other.st_ino == st.st_ino) line(" %s", files[i]);
    line("\n");
}

static void begin(void) {
    if (chdir(where) < 0) { perror(where); exit(3); }
    a = open("A", O_RDWR | O_CREAT | O_TRUNC, 0644);
    b = open("B", O_RDWR | O_CREAT | O_TRUNC, 0644);
    line("A %d B %d\n", a, b);
}

// Enough by the C library that both files are served where that is possible, with dirty data and positions.
static void work(void) {
    char record[101], text[20] = "";
    for (int i = 0; i < 40; i++) {
        snprintf(record, sizeof record, "%0100d", i);
        if (write(a, record, 100) != 100) step("write A", -errno);
        if (i < 12 && write(b, record + 90, 10) != 10) step("write B", -errno);
    }
    LIBC(lseek(a, 350, SEEK_SET));
    LIBC(read(a, text, 10));
    LIBC(lseek(b, 55, SEEK_SET));
    LIBC(write(b, "in the middle", 13));
    LIBC(pread(a, text, 10, 1090));
}

static void waited(const char *what, pid_t child) {
    int status = 0;
    if (child < 0) { step(what, child); return; }
    pid_t done = waitpid(child, &status, 0);
    line("%s: %s, status %d\n", what, done == child ? "ended" : "lost", status);
}

static char wide[5000];

static void op_none(void) {}
static void op_close(void) { AROUND(SYS_close, a, 0, 0, 0); }
static void op_reopen(void) {
    AROUND(SYS_close, a, 0, 0, 0);
    AROUND(SYS_openat, AT_FDCWD, "B", O_RDWR, 0);
}
static void op_open(void) {
    long fd = CALL(SYS_openat, AT_FDCWD, "A", O_RDWR | O_APPEND, 0, 0, 0);
    step("around open", fd);
    use("again", fd);
    fd = CALL(SYS_openat, AT_FDCWD, "C", O_RDWR | O_CREAT, 0600, 0, 0);
    step("around open", fd);
    use("new", fd);
}
static void op_dup(void) {
    long fd = CALL(SYS_dup, a, 0, 0, 0, 0, 0);
    step("around dup", fd);
    use("duplicate", fd);
    fd = CALL(SYS_fcntl, b, F_DUPFD_CLOEXEC, 30, 0, 0, 0);
    step("around F_DUPFD", fd);
    use("duplicate", fd);
}
static void op_dup2(void) {
    AROUND(SYS_dup2, a, 25, 0, 0);
    use("duplicate", 25);
    AROUND(SYS_dup2, b, a, 0, 0);
}
static void op_dup3(void) {
    AROUND(SYS_dup3, b, a, O_CLOEXEC, 0);
    AROUND(SYS_dup3, b, 26, 0, 0);
    use("duplicate", 26);
}
static void op_close_range(void) { AROUND(SYS_close_range, a, b, 0, 0); }
// Everything but the standard descriptors and the two files, as a program does that becomes a daemon.
static void op_close_all(void) {
    AROUND(SYS_close_range, (a > b ? a : b) + 1, ~0u, 0, 0);
    use("A", a);
    for (int fd = (a > b ? a : b) + 1; fd < 1100; fd++) CALL(SYS_close, fd, 0, 0, 0, 0, 0);
}
// A program finds only descriptors of its own.
static void op_look(void) {
    long there = 0, copied = 0, described = 0;
    struct stat st;
    for (int fd = 3; fd < 1100; fd++) {
        there += CALL(SYS_fcntl, fd, F_GETFD, 0, 0, 0, 0) >= 0;
        described += from_errno(fstat(fd, &st)) == 0;
        long copy = CALL(SYS_dup, fd, 0, 0, 0, 0, 0);
        copied += copy >= 0;
        if (copy >= 0) close(copy);
    }
    step("there", there);
    step("copied", copied);
    step("described", described);
}
// Numbers that hardly any program has.
static void op_take(void) {
    long taken = 0;
    for (int fd = 400; fd < 600; fd++) taken += CALL(SYS_dup2, a, fd, 0, 0, 0, 0) == fd;
    step("taken", taken);
    use("A", a);
    use("400", 400);
    use("599", 599);
}
static void op_lseek(void) {
    AROUND(SYS_lseek, a, 0, SEEK_CUR, 0);
    AROUND(SYS_lseek, a, 7, SEEK_SET, 0);
    use("A", a);
    AROUND(SYS_lseek, a, 0, SEEK_CUR, 0);
    AROUND(SYS_lseek, a, -3, SEEK_END, 0);
    AROUND(SYS_lseek, b, 5, SEEK_CUR, 0);
}
static void op_read(void) {
    char text[20] = "";
    AROUND(SYS_read, a, text, 11, 0);
    line("  %s\n", text);
    use("A", a);
    AROUND(SYS_read, a, text, 11, 0);
    line("  %s\n", text);
    memset(text, 0, sizeof text);
    AROUND(SYS_pread64, a, text, 11, 348);
    line("  %s\n", text);
}
static void op_write(void) {
    AROUND(SYS_write, a, "around!", 7, 0);
    use("A", a);
    AROUND(SYS_write, a, "again", 5, 0);
    AROUND(SYS_pwrite64, a, "placed", 6, 3998);
    struct iovec vector[] = {{"one", 3}, {"two", 3}};
    AROUND(SYS_writev, b, vector, 2, 0);
}
static void op_mmap(void) {
    char *at = (char *)CALL(SYS_mmap, 0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, a, 0);
    if ((long)at < 0 && (long)at > -4096) { step("around mmap", (long)at); return; }
    char text[9] = "";
    memcpy(text, at + 348, 8);
    line("mapped: %s\n", text);
    memcpy(at + 20, "MAPPED", 6);
    LIBC(pread(a, text, 8, 19));
    line("  %s\n", text);
    LIBC(pwrite(a, "WROTE", 5, 200));
    memcpy(text, at + 198, 8);
    line("mapped: %s\n", text);
    use("A", a);
    memcpy(text, at + 360, 8);
    line("mapped: %s\n", text);
}
static void op_fork(void) {
    long child = CALL(SYS_clone, SIGCHLD, 0, 0, 0, 0, 0);
    if (child == 0) {
        use("A in the child", a);
        LIBC(close(b));
        LIBC(open("C", O_RDWR | O_CREAT, 0644));
        use("C in the child", b);
        _exit(7);
    }
    waited("around fork", child);
}
extern char **environ;
static char *after_exec[8];
static void op_exec(void) { step("around exec", CALL(SYS_execve, self, after_exec, environ, 0, 0, 0)); }
static void op_spawn(void) {
    pid_t child = -1;
    int done = posix_spawn(&child, self, NULL, NULL, after_exec, environ);
    waited("spawn", done ? -done : child);
}
// Threads that write their own files, half of it around: numbers are closed and used again all the time.
enum { RACERS = 4, ROUNDS = 60 };
static void *race(void *which) {
    char name[] = {'r', '0' + (long)which, 0}, record[41];
    unlink(name);
    for (int round = 0; round < ROUNDS; round++) {
        int fd = round % 3 ? open(name, O_RDWR | O_CREAT, 0644) : CALL(SYS_openat, AT_FDCWD, name, O_RDWR | O_CREAT, 0644, 0, 0);
        if (fd < 0 || lseek(fd, 0, SEEK_END) != round * 160) { step("no file, or another size", fd); return NULL; }
        for (int part = 0; part < 4; part++) {
            snprintf(record, sizeof record, "%s %030d %5d\n", name, round, part);
            long n = part == 2 ? CALL(SYS_write, fd, record, 40, 0, 0, 0) : write(fd, record, 40);
            if (n != 40) step("write", n);
        }
        if (round % 2) CALL(SYS_close, fd, 0, 0, 0, 0, 0);
        else close(fd);
    }
    return NULL;
}
static void op_race(void) {
    pthread_t threads[RACERS];
    for (long i = 0; i < RACERS; i++) pthread_create(&threads[i], NULL, race, (void *)i);
    for (int i = 0; i < RACERS; i++) pthread_join(threads[i], NULL);
    for (char name[] = "r0"; name[1] < '0' + RACERS; name[1]++) {
        char record[41] = "", expected[41];
        int fd = open(name, O_RDONLY), wrong = 0, round = 0;
        for (; read(fd, record, 40) == 40; round++) {
            snprintf(expected, sizeof expected, "%s %030d %5d\n", name, round / 4, round % 4);
            wrong += strcmp(record, expected) != 0;
        }
        line("%s: %d records, %d wrong\n", name, round, wrong);
        close(fd);
    }
}
static void op_setfl(void) { AROUND(SYS_fcntl, a, F_SETFL, O_APPEND, 0); }
static void op_append(void) {
    long fd = CALL(SYS_openat, AT_FDCWD, "C", O_RDWR | O_CREAT, 0644, 0, 0);
    AROUND(SYS_fcntl, fd, F_SETFL, O_APPEND, 0);
    LIBC(write(fd, "0123456789", 10));
    LIBC(pwrite(fd, "+", 1, 3));
    LIBC(lseek(fd, 0, SEEK_END));
    use("C", fd);
}
static void op_truncate(void) { AROUND(SYS_ftruncate, a, 355, 0, 0); }
static void op_sendfile(void) {
    AROUND(SYS_sendfile, b, a, NULL, 15);
    use("A", a);
}
// To another process, which moves the position before this one goes on.
static void op_send(void) {
    int both[2], ready[2];
    char byte = 'x';
    union { struct cmsghdr header; char room[CMSG_SPACE(sizeof(int))]; } control = {0};
    struct iovec vector = {&byte, 1};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, both) < 0 || pipe(ready) < 0) { step("sockets", -errno); return; }
    control.header.cmsg_len = CMSG_LEN(sizeof(int));
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    memcpy(CMSG_DATA(&control.header), &a, sizeof(int));
    AROUND(SYS_sendmsg, both[0], &message, 0, 0);
    close(both[0]);
    message.msg_controllen = sizeof control;
    LIBC(recvmsg(both[1], &message, 0));
    int fd;
    memcpy(&fd, CMSG_DATA(&control.header), sizeof fd);
    use("received", fd);
}
static void op_limit(void) {
    struct rlimit limit = {4000, 4000};
    signal(SIGXFSZ, SIG_IGN);
    AROUND(SYS_prlimit64, 0, RLIMIT_FSIZE, &limit, 0);
    LIBC(pwrite(a, wide, sizeof wide, 0));
}
static void op_exit(void) { CALL(SYS_exit_group, 5, 0, 0, 0, 0, 0); }

#ifdef __GLIBC__
#include "inside.h"
#else
#define INSIDE
#endif

// A child that may only read, write and end from then on, in the middle of its work.
static void confined(int strict) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_read, 5, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_write, 4, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_lseek, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigreturn, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    pid_t child = fork();
    if (child == 0) {
        char byte = 0;
        int fd = open("C", O_RDWR | O_CREAT, 0644);
        for (int i = 0; i < 20; i++) write(fd, "of the child", 12);
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        if (strict) LIBC(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT));
        else LIBC(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
        LIBC(write(fd, "confined", 8));
        LIBC(write(a, "A", 1));
        LIBC(read(b, &byte, 1));
        by_asm(SYS_exit, 3, 0, 0, 0, 0, 0);
    }
    waited("the confined child", child);
}
// The program's last thread ends, and with it the program, whatever threads a library has.
static void last_thread(int raw) {
    pid_t child = fork();
    if (child == 0) {
        int fd = open("C", O_RDWR | O_CREAT, 0644);
        for (int i = 0; i < 20; i++) write(fd, "of the child", 12);
        if (raw) by_asm(SYS_exit, 4, 0, 0, 0, 0, 0);
        pthread_exit(NULL);
    }
    waited("the child", child);
}
static void op_thread_exit(void) { last_thread(0); }
static void op_raw_exit(void) { last_thread(1); }
static void op_strict(void) { confined(1); }
static void op_filter(void) { confined(0); }

static const struct { const char *name; void (*job)(void); } operations[] = {
    INSIDE
    {"none", op_none}, {"close", op_close}, {"reopen", op_reopen}, {"open", op_open}, {"dup", op_dup}, {"dup2", op_dup2},
    {"dup3", op_dup3}, {"close_range", op_close_range},
    {"close_all", op_close_all}, {"take", op_take}, {"look", op_look}, {"lseek", op_lseek}, {"read", op_read}, {"write", op_write},
    {"mmap", op_mmap}, {"fork", op_fork}, {"exec", op_exec}, {"spawn", op_spawn}, {"race", op_race}, {"setfl", op_setfl}, {"append", op_append},
    {"truncate", op_truncate}, {"sendfile", op_sendfile}, {"send", op_send}, {"limit", op_limit}, {"thread_exit", op_thread_exit},
    {"raw_exit", op_raw_exit}, {"strict", op_strict}, {"filter", op_filter}, {"exit", op_exit},
};

#include "places.h"

static void dump(const char *name) {
    unsigned long sum = 5381, size = 0;
    int c;
    FILE *from = fopen(name, "r");
    if (!from) { line("%s: %s\n", name, strerror(errno)); return; }
    for (; (c = getc(from)) != EOF; size++) sum = sum * 33 + c;
    fclose(from);
    line("%s: %lu bytes, %lx\n", name, size, sum);
}

static void finish(void) {
    use("A", a);
    use("B", b);
    int c = open("C", O_RDWR | O_CREAT, 0644);
    step("C", c);
    use("C", c);
    use("25", 25);
    LIBC(close(a));
    LIBC(close(b));
    LIBC(close(a));
    use("A", a);
    int again = open("A", O_RDWR);
    step("A", again);
    use("A", again);
    for (int i = 0; i < 3; i++) dump(files[i]);
    line("to its end\n");
}

int
#ifdef WITH_GO
around_main(int argc, char **argv)
#else
main(int argc, char **argv)
#endif
{
    if (argc < 5) return 2;
    self = "/proc/self/exe";
    way_name = argv[1]; operation = argv[3]; where = argv[4];
    const char *place = argv[2];
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        if (!strcmp(ways[i].name, way_name)) way = ways[i].way;
    void (*job)(void) = NULL;
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        if (!strcmp(operations[i].name, operation)) job = operations[i].job;
    if (!way || !job) { fprintf(stderr, "no way %s or operation %s\n", way_name, operation); return 2; }
    char first[12], second[12];
    // A program that was started with the descriptors: it does one operation, or looks.
    if (argc == 7) {
        a = atoi(argv[5]); b = atoi(argv[6]);
        line("another program\n");
        job();
        use("A", a);
        use("B", b);
        line("its end\n");
        return 9;
    }
    char *after[] = {argv[0], "libc", "main", "none", argv[4], first, second, NULL};
    memcpy(after_exec, after, sizeof after);
    int early = place_before(place);
    begin();
    snprintf(first, sizeof first, "%d", a); snprintf(second, sizeof second, "%d", b);
    if (!early) work();
    if (!run_at(place, job)) { fprintf(stderr, "no place %s\n", place); return 2; }
    if (early) work();
    finish();
    return 0;
}
