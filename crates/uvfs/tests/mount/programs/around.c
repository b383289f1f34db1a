// System calls that don't go through the C library, between calls that do. Prints what each gives; the same with and
// without `uvfs run`.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <threads.h>
#include <unistd.h>

#define P(...) (printf(__VA_ARGS__), fflush(stdout))

static long raw(long n, long a, long b, long c, long d, long e, long f) {
    long r;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return r;
}
#define R1(n, a) raw(n, (long)(a), 0, 0, 0, 0, 0)
#define R3(n, a, b, c) raw(n, (long)(a), (long)(b), (long)(c), 0, 0, 0)

// A file with some served writes, by the position.
static int make(const char *name) {
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
    for (int i = 0; i < 5; i++) if (write(fd, "0123456789", 10) != 10) exit(90);
    return fd;
}
static void show(const char *name) {
    char text[200]; int fd = open(name, O_RDONLY), n = read(fd, text, sizeof text);
    P("%s: %.*s\n", name, n < 0 ? 0 : n, text); close(fd);
}
static int other = -1;
static ssize_t n_;
static volatile int handled;

static void table(void) {
    int a = make("a"), b;
    P("close %ld\n", R1(SYS_close, a)); errno = 0, n_ = write(a, "x", 1), P("write %zd %d\n", n_, errno);
    b = R3(SYS_open, "b", O_RDWR | O_CREAT | O_TRUNC, 0644); P("same number %d\n", a == b); P("write %zd\n", write(b, "of b", 4));
    a = make("c"); P("dup2 %d\n", R3(SYS_dup2, b, a, 0) == a); P("write %zd\n", write(a, " again", 6)); P("at %ld\n", lseek(b, 0, SEEK_CUR));
    int c = make("d"), d = R1(SYS_dup, c); P("write %zd %ld\n", write(d, "more", 4), lseek(c, 0, SEEK_CUR));
    P("range %ld\n", R3(SYS_close_range, c, d, 0)); errno = 0, n_ = write(c, "x", 1), P("gone %zd %d\n", n_, errno);
    P("seek %ld\n", R3(SYS_lseek, a, 2, SEEK_SET)); P("write %zd\n", write(a, "F", 1)); P("raw write %ld\n", R3(SYS_write, a, "!", 1)); P("at %ld\n", lseek(a, 0, SEEK_CUR));
    a = make("e"); P("append %ld\n", R3(SYS_fcntl, a, F_SETFL, O_APPEND)); lseek(a, 0, SEEK_SET); P("write %zd\n", write(a, "end", 3));
    a = make("f"); char *m = (char *)raw(SYS_mmap, 0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, a, 0);
    pwrite(a, "mapped", 6, 0); P("mapped %.8s\n", m); memcpy(m, "stored", 6); char text[9] = ""; pread(a, text, 8, 0); P("read %s\n", text);
    a = make("g"); int left = -1; lseek(a, 10, SEEK_SET); ioctl(a, FIONREAD, &left); P("left %d\n", left);
    a = make("h"); lseek(a, 5, SEEK_SET); struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_CUR, .l_len = 1};
    P("lock %d\n", fcntl(a, F_SETLK, &lock)); if (!fork()) { struct flock l = {.l_type = F_WRLCK, .l_start = 0, .l_len = 100}; fcntl(open("h", O_RDWR), F_GETLK, &l); P("locked at %ld\n", l.l_start); _exit(0); } wait(NULL);
    a = make("i"); int (*f)(int) = (int (*)(int))dlsym(dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD), "close"); P("by a handle %d\n", f(a)); errno = 0, n_ = write(a, "x", 1), P("write %zd %d\n", n_, errno);
    for (const char *n = "abcdefgh"; *n; n++) show((char[]){*n, 0});
}
static void on_signal(int s) { (void)s; if (other >= 0) { P("handler %ld\n", R1(SYS_close, other)); other = -1; } handled++; }
static void signals(void) {
    static char stack[16384]; stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    sigaltstack(&alternate, NULL);
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK}; sigfillset(&action.sa_mask);
    sigaction(SIGUSR1, &action, NULL);
    int a = make("a"); other = make("b"); raise(SIGUSR1); errno = 0; P("write %zd\n", write(a, "a", 1));
    sigset_t all; sigfillset(&all); sigprocmask(SIG_SETMASK, &all, NULL); P("pid %d\n", R1(SYS_getpid, 0) == getpid()); sigemptyset(&all); sigprocmask(SIG_SETMASK, &all, NULL);
    // A call from the handler of the library ends with EINTR as any other.
    struct timespec t = {5, 0}; struct itimerspec in = {{0, 0}, {0, 50000000}}; timer_t timer; struct sigevent e = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    timer_create(CLOCK_MONOTONIC, &e, &timer); timer_settime(timer, 0, &in, NULL); P("sleep %ld\n", R3(SYS_nanosleep, &t, &t, 0)); P("handled %d\n", handled);
    P("write %zd\n", write(a, "A", 1)); show("a"); show("b");
    struct sigaction old; sigaction(SIGSYS, NULL, &old); P("SIGSYS %d\n", old.sa_handler == SIG_DFL);
    signal(SIGSYS, on_signal); raise(SIGSYS); P("handled %d\n", handled); P("write %zd\n", write(a, "B", 1)); R1(SYS_close, a); errno = 0, n_ = write(a, "x", 1), P("write %zd %d\n", n_, errno); show("a");
}
static int nothing(void *a) { R1(SYS_close, *(int *)a); return 0; }
static void *nothing_too(void *a) { nothing(a); pthread_exit(a); }
static void threads(void) {
    pthread_t early; int none = -1; pthread_create(&early, NULL, nothing_too, &none); void *r; pthread_join(early, &r); P("joined %d\n", r == &none);
    int a = make("a"), b = make("b"), c = make("c"), code = 1;
    thrd_t t; thrd_create(&t, nothing, &a); thrd_join(t, &code); P("joined %d\n", code); errno = 0, n_ = write(a, "x", 1), P("write %zd %d\n", n_, errno);
    pthread_create(&early, NULL, nothing_too, &b); pthread_join(early, &r); P("joined %d\n", r == &b); errno = 0, n_ = write(b, "x", 1), P("write %zd %d\n", n_, errno);
    P("write %zd\n", write(c, "y", 1)); show("a"); show("b"); show("c");
}
// A thread that blocks all signals for a moment, as the C library has it while it makes another.
static void *blocks(void *unused) {
    unsigned long all = ~0ul, none = 0; raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&all, 0, 8, 0, 0); handled = 1;
    usleep(50000); raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&none, 0, 8, 0, 0); return NULL;
}
static void blocked(void) {
    pthread_t other; pthread_create(&other, NULL, blocks, NULL); while (!handled) usleep(100);
    int a = make("a"); pthread_join(other, NULL); P("close %ld\n", R1(SYS_close, a)); show("a");
}
static void processes(void) {
    int a = make("a"); pid_t child = raw(SYS_fork, 0, 0, 0, 0, 0, 0);
    if (!child) { write(a, "child", 5); R1(SYS_exit_group, 7); }
    int status; waitpid(child, &status, 0); P("child %d\n", WEXITSTATUS(status)); P("at %ld\n", lseek(a, 0, SEEK_CUR)); write(a, "parent", 6); show("a");
    // Another process with these descriptors.
    int b = make("b"); static char stack[65536];
    child = clone(nothing, stack + sizeof stack, CLONE_FILES | SIGCHLD, &b); waitpid(child, &status, 0); errno = 0, n_ = write(b, "x", 1), P("write %zd %d\n", n_, errno);
}
static void early(void) {
    // Before the first file is served.
    int a = open("a", O_RDWR | O_CREAT, 0644), b = R1(SYS_dup, a);
    for (int i = 0; i < 5; i++) { write(a, "0123456789", 10); P("at %ld\n", lseek(b, 0, SEEK_CUR)); } show("a");
}
// Children whose main threads end before the others, or as the last.
static pthread_t main_thread; static int last_file;
static void works_on(void) { for (int i = 0; i < 30; i++) write(last_file, "0123456789", 10); P("at %ld\n", lseek(last_file, 0, SEEK_CUR)); }
static void at_exit(void) { P("at exit\n"); works_on(); }
static void destroyed(void *value) { P("destroyed\n"); works_on(); }
static void *outlives(void *unused) { usleep(20000); works_on(); return NULL; }
static void *joins(void *unused) { void *result = NULL; int code = pthread_join(main_thread, &result); P("joined %d %ld\n", code, (long)result); works_on(); return NULL; }
static void *cancels(void *unused) { usleep(10000); pthread_cancel(main_thread); return joins(NULL); }
static void leaves(int how) {
    pthread_t other; pthread_key_t key; main_thread = pthread_self(); last_file = make("last"); atexit(at_exit); printf("printed\n");
    if (how == 1) { pthread_key_create(&key, destroyed); pthread_setspecific(key, &key); }
    void *(*bodies[])(void *) = {NULL, NULL, outlives, joins, cancels, outlives};
    if (bodies[how]) pthread_create(&other, NULL, bodies[how], NULL);
    while (how == 4) pause();
    if (how == 5) R1(SYS_exit, 7);
    pthread_exit((void *)5);
}
static void last(void) {
    for (int how = 0; how < 6; how++) {
        int status; fflush(stdout); pid_t child = fork();
        if (!child) leaves(how);
        waitpid(child, &status, 0); P("%d: %d\n", how, status); show("last"); unlink("last");
    }
    make("a");
}
static void ends(void) { make("a"); R1(SYS_exit_group, 0); }
static void executes(void) { make("a"); char *words[] = {"sh", "-c", "cat a", NULL}, *none[] = {NULL}; R3(SYS_execve, "/bin/sh", words, none); }
static void ring(void) {
    char parameters[200] = ""; int a = make("a"); int fd = R3(SYS_io_uring_setup, 4, parameters, 0); P("ring %d\n", fd >= 0);
    P("write %zd\n", write(a, "z", 1)); P("at %ld\n", R3(SYS_lseek, a, 0, SEEK_CUR)); show("a");
}
static void old_entry(void) {
    long r; int a = make("a");
    // close, by the 32-bit entry.
    __asm__ volatile("int $0x80" : "=a"(r) : "a"(6L), "b"((long)a) : "memory"); P("close %ld\n", r); errno = 0, n_ = write(a, "x", 1), P("write %zd %d\n", n_, errno); show("a");
}
int main(int n, char **words) {
    if (n < 3 || chdir(words[1])) return 91;
    const char *names[] = {"table", "signals", "threads", "processes", "early", "ends", "last", "executes", "ring", "old_entry", "blocked"};
    void (*parts[])(void) = {table, signals, threads, processes, early, ends, last, executes, ring, old_entry, blocked};
    for (int i = 0; i < 11; i++) if (!strcmp(words[2], names[i])) { parts[i](); P("done\n"); return 0; }
    return 92;
}
