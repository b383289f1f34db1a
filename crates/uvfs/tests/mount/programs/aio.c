// What libaio's calls answer on a file, a line each: the same with `uvfs run` and without.
// Usage: aio FILE OTHER, where OTHER is a file of another file system.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <libaio.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define DEPTH 32
static io_context_t ctx;
static struct io_event events[1024];
static struct iocb blocks[1024], *list[1024];
static char *memory;
static const char *path, *other;

static char *room(int i) { return memory + (size_t)i * 65536; }

static void say(const char *what, long n) { printf("%s: %ld\n", what, n); fflush(stdout); }

// In the order in which they were submitted, whichever ended first.
static int by_block(const void *a, const void *b) {
    const struct io_event *x = a, *y = b;
    return x->obj < y->obj ? -1 : x->obj > y->obj;
}

static void reap(const char *what, int n) {
    int got = io_getevents(ctx, n, 1024, events, NULL);
    if (got > 0) qsort(events, got, sizeof *events, by_block);
    printf("%s: %d:", what, got);
    for (int i = 0; i < got; i++)
        printf(" %ld%s", (long)events[i].res, events[i].data == (void *)events[i].obj ? "" : "?");
    printf("\n"); fflush(stdout);
}

static void add(int i) { list[i] = &blocks[i]; blocks[i].data = &blocks[i]; }

static void each_kind(const char *name, int fd, int from) {
    printf("%s\n", name);
    for (int i = 0; i < DEPTH; i++) {
        memset(room(i), from + i, 8192);
        io_prep_pwrite(&blocks[i], fd, room(i), 8192, i * 8192LL); add(i);
    }
    say("write", io_submit(ctx, DEPTH, list)); reap("written", DEPTH);
    for (int i = 0; i < DEPTH; i++) {
        memset(room(i), 0, 8192);
        io_prep_pread(&blocks[i], fd, room(i), 8192, i * 8192LL); add(i);
    }
    say("read", io_submit(ctx, DEPTH, list)); reap("have", DEPTH);
    for (int i = 0; i < DEPTH; i++)
        if (room(i)[0] != (char)(from + i) || room(i)[8191] != (char)(from + i)) say("wrong", i);
    // At and behind the end, in parts, nothing, and where nothing can be.
    struct iovec parts[3] = {{room(0), 4096}, {room(1), 512}, {room(2), 8192 - 512}};
    io_prep_pread(&blocks[0], fd, room(0), 8192, DEPTH * 8192LL - 4096); add(0);
    io_prep_pread(&blocks[1], fd, room(1), 8192, DEPTH * 8192LL); add(1);
    io_prep_pread(&blocks[2], fd, room(2), 0, 0); add(2);
    io_prep_pread(&blocks[3], fd, room(3), 4096, 1LL << 40); add(3);
    say("end", io_submit(ctx, 4, list)); reap("ends", 4);
    io_prep_pwritev(&blocks[0], fd, parts, 3, 4096); add(0);
    say("writev", io_submit(ctx, 1, list)); reap("writtenv", 1);
    memset(room(0), 1, 65536 * 3);
    io_prep_preadv(&blocks[0], fd, parts, 3, 8192); add(0);
    say("readv", io_submit(ctx, 1, list)); reap("havev", 1);
    printf("%d %d %d %d\n", room(0)[0], room(1)[0], room(2)[0], room(2)[8192 - 513]);
    io_prep_pwrite(&blocks[0], fd, room(5), 4096, 100000 * 4096LL); add(0);
    io_prep_fsync(&blocks[1], fd); add(1);
    io_prep_fdsync(&blocks[2], fd); add(2);
    say("far", io_submit(ctx, 3, list)); reap("farther", 3);
    ftruncate(fd, DEPTH * 8192LL);
    // Refused.
    io_prep_pread(&blocks[0], fd, room(0), 4096, -4096); add(0);
    say("offset", io_submit(ctx, 1, list));
    io_prep_pread(&blocks[0], fd, room(0), 4096, 0); add(0);
    io_prep_pread(&blocks[1], 9999, room(1), 4096, 0); add(1);
    say("bad second", io_submit(ctx, 2, list)); reap("first", 1);
    say("bad first", io_submit(ctx, 1, &list[1]));
    blocks[1].aio_fildes = fd; blocks[1].aio_lio_opcode = 99;
    say("opcode", io_submit(ctx, 1, &list[1]));
    io_prep_preadv(&blocks[1], fd, parts, 5000, 0); add(1);
    say("vectors", io_submit(ctx, 1, &list[1]));
    io_prep_pread(&blocks[1], fd, (char *)8, 4096, 0); add(1);
    if (io_submit(ctx, 1, &list[1]) == 1) reap("pointer", 1);
    // An eventfd is told, and only of an eventfd.
    int bell = eventfd(0, EFD_NONBLOCK);
    for (int i = 0; i < 5; i++) {
        io_prep_pread(&blocks[i], fd, room(i), 4096, i * 4096); add(i);
        io_set_eventfd(&blocks[i], bell);
    }
    say("told", io_submit(ctx, 5, list));
    uint64_t told = 0, sum = 0;
    for (double i = 0; sum < 5 && i < 1e9; i++) if (read(bell, &told, 8) == 8) sum += told;
    say("tells", sum); reap("tellings", 5);
    io_set_eventfd(&blocks[0], fd); say("no eventfd", io_submit(ctx, 1, list));
    io_set_eventfd(&blocks[0], 9999); say("no descriptor", io_submit(ctx, 1, list));
    close(bell);
    // Cancelling, closing and replacing what is under way.
    int again = dup(fd);
    for (int i = 0; i < 8; i++) { io_prep_pread(&blocks[i], again, room(i), 65536, 0); add(i); }
    say("again", io_submit(ctx, 8, list));
    struct io_event one;
    say("cancel", io_cancel(ctx, &blocks[3], &one));
    close(again); reap("closed", 8);
}

static void *later(void *fd) {
    usleep(30000);
    io_prep_pread(&blocks[0], *(int *)fd, room(0), 4096, 0); add(0);
    io_submit(ctx, 1, list);
    return NULL;
}

static volatile int handled;
static void handler(int signal) { (void)signal; handled++; }

static int called;
static void done(io_context_t c, struct iocb *block, long res, long res2) {
    called++; printf("called %d %ld %ld\n", c == ctx, res, res2); (void)block;
}

static void waits(int fd, int foreign) {
    struct timespec none = {0, 0}, some = {0, 20000000};
    say("none", io_getevents(ctx, 0, 8, events, NULL));
    say("now", io_getevents(ctx, 1, 8, events, &none));
    say("soon", io_getevents(ctx, 1, 8, events, &some));
    say("counts", io_getevents(ctx, 5, 4, events, &some));
    say("negative", io_getevents(ctx, -1, 4, events, &some));
    // Both kinds at once.
    for (int i = 0; i < 20; i++) {
        io_prep_pread(&blocks[i], i % 3 ? fd : foreign, room(i), 4096, 0); add(i);
    }
    say("both", io_submit(ctx, 20, list)); reap("all", 20);
    for (int i = 0; i < 20; i++) { io_prep_pread(&blocks[i], i % 2 ? fd : foreign, room(i), 4096, 0); add(i); }
    int seen = 0, n = io_submit(ctx, 20, list);
    while (seen < n) { int k = io_getevents(ctx, 0, 1, events, &none); if (k < 0) break; seen += k; }
    say("polled", seen);
    // What another thread submits.
    pthread_t thread;
    pthread_create(&thread, NULL, later, &fd); reap("of a thread", 1); pthread_join(thread, NULL);
    pthread_create(&thread, NULL, later, &foreign); reap("of a thread", 1); pthread_join(thread, NULL);
    // Signals.
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    // Again and again: the first may come before the wait.
    struct itimerval timer = {{0, 30000}, {0, 30000}}, off = {{0, 0}, {0, 0}};
    handled = 0;
    setitimer(ITIMER_REAL, &timer, NULL);
    say("interrupted", io_getevents(ctx, 1, 8, events, NULL)); say("handled", handled > 0);
    setitimer(ITIMER_REAL, &off, NULL); handled = 0;
    sigset_t set, old; sigemptyset(&set); sigaddset(&set, SIGALRM); sigprocmask(SIG_BLOCK, &set, &old);
    setitimer(ITIMER_REAL, &timer, NULL);
    say("blocked", io_getevents(ctx, 1, 8, events, &(struct timespec){0, 100000000})); say("handled", handled);
    say("let in", io_pgetevents(ctx, 1, 8, events, NULL, &old)); say("handled", handled > 0);
    setitimer(ITIMER_REAL, &off, NULL);
    sigprocmask(SIG_SETMASK, &old, NULL);
    // A child has no context.
    fflush(stdout);
    io_prep_pread(&blocks[0], fd, room(0), 4096, 0); add(0);
    say("before", io_submit(ctx, 1, list));
    if (fork() == 0) {
        say("child", io_getevents(ctx, 1, 1, events, &some)); say("child", io_submit(ctx, 1, list));
        _exit(0);
    }
    wait(NULL); reap("after", 1);
}

static void helpers(int fd) {
    io_context_t saved = ctx;
    ctx = NULL; say("init", io_queue_init(8, &ctx));
    for (int round = 0; round < 2; round++) {
        // The first time shows that events are asked for.
        for (int i = 0; i < 4; i++) {
            io_prep_pread(&blocks[i], fd, room(i), 4096, i * 4096); add(i); io_set_callback(&blocks[i], done);
        }
        say("queue", io_submit(ctx, 4, list));
        struct timespec some = {5, 0};
        for (int i = 0; i < 4; i++) if (io_getevents(ctx, 1, 1, events, &some) == 1)
            ((io_callback_t)events[0].data)(ctx, events[0].obj, events[0].res, events[0].res2);
        for (int i = 0; i < 4; i++) io_set_callback(&blocks[i], done);
        say("queue", io_submit(ctx, 4, list)); called = 0;
        int run = 0;
        while (called < 4 && run == 0) run = io_queue_run(ctx);
        say("run", run);
    }
    say("release", io_queue_release(ctx));
    ctx = saved;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    path = argv[1]; other = argv[2];
    if (posix_memalign((void **)&memory, 65536, 65536 * 1024)) return 2;
    memset(memory, 0, 65536 * 64);
    say("setup", io_setup(64, &ctx));
    say("again", io_setup(64, &ctx));
    say("nothing", io_getevents(ctx, 0, 1, events, &(struct timespec){0, 0}));
    int buffered = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    int direct = open(path, O_RDWR | O_DIRECT), foreign = open(other, O_RDWR | O_CREAT, 0644);
    if (buffered < 0 || direct < 0 || foreign < 0) return 3;
    if (pwrite(foreign, memory, 8192, 0) != 8192) return 3;
    each_kind("buffered", buffered, 1);
    each_kind("direct", direct, 77);
    each_kind("buffered again", buffered, 33);
    // Each sees what the other wrote.
    pwrite(buffered, "shared", 6, 0);
    io_prep_pread(&blocks[0], direct, room(0), 4096, 0); add(0);
    say("shared", io_submit(ctx, 1, list)); reap("shares", 1); printf("%.6s\n", room(0));
    int only = open(path, O_WRONLY), readonly = open(path, O_RDONLY);
    io_prep_pread(&blocks[0], only, room(0), 4096, 0); add(0); say("write only", io_submit(ctx, 1, list));
    io_prep_pwrite(&blocks[0], readonly, room(0), 4096, 0); add(0); say("read only", io_submit(ctx, 1, list));
    int append = open(path, O_WRONLY | O_APPEND);
    io_prep_pwrite(&blocks[0], append, "appended", 8, 0); add(0); say("append", io_submit(ctx, 1, list)); reap("appends", 1);
    char last[8]; say("last", pread(buffered, last, 8, DEPTH * 8192LL)); printf("%.8s\n", last);
    for (int how = 0; how < 2; how++) {
        int sync = open(path, O_RDWR | (how ? O_SYNC : O_DSYNC));
        io_prep_pwrite(&blocks[0], sync, room(9), 4096, 0); add(0);
        say("sync", io_submit(ctx, 1, list)); reap("synced", 1); close(sync);
    }
    io_prep_pread(&blocks[0], direct, room(0), 4096, 0); add(0); blocks[0].aio_rw_flags = 0x40000000;
    say("flags", io_submit(ctx, 1, list)); blocks[0].aio_rw_flags = 0;
    waits(buffered, foreign);
    waits(direct, foreign);
    helpers(direct);
    // As many as there is room for.
    int many = 0;
    for (int i = 0; i < 1024; i++) { io_prep_pread(&blocks[i], direct, room(i % 64), 512, 0); add(i); }
    while (many < 1024) { int n = io_submit(ctx, 1, &list[many]); if (n != 1) { say("full", n); break; } many++; }
    int back = 0;
    while (back < many) { int n = io_getevents(ctx, 1, 1024, events, NULL); if (n <= 0) break; back += n; }
    say("came back", back == many && many >= 64);
    // Destroyed with reads under way: they have ended then.
    memset(memory, 0, 65536 * 16);
    int n = 0;
    for (int i = 0; i < 16; i++) { io_prep_pread(&blocks[i], direct, room(i), 65536, 65536); add(i); }
    n = io_submit(ctx, 16, list);
    say("under way", n); say("destroy", io_destroy(ctx));
    for (int i = 0; i < 16; i++) if (room(i)[65535] == 0) say("missing", i);
    say("gone", io_submit(ctx, 1, list)); say("gone", io_destroy(ctx));
    return 0;
}
