// Where a job is done: in which thread or process, with which signals blocked or handled, before or after the first
// work on the files.
#pragma once
#include <sched.h>
#include <time.h>
#include <setjmp.h>
#include <ucontext.h>
#ifdef __GLIBC__
#include <threads.h>
#endif

static void (*the_job)(void);
static volatile int go, gone;

static int is(const char *place, const char *name) { return !strcmp(place, name); }

// What a thread does once it is told. One that does not sleep calls around the C library all the time until then.
static void *in_thread(void *awake) {
    struct timespec pause = {0, 100000};
    while (!go) by_asm(awake ? SYS_sched_yield : SYS_nanosleep, (long)&pause, 0, 0, 0, 0, 0);
    the_job();
    return NULL;
}
static void *in_own_table(void *raw) {
    step("unshare", raw ? by_asm(SYS_unshare, CLONE_FILES, 0, 0, 0, 0, 0) : from_errno(unshare(CLONE_FILES)));
    the_job();
    use("A in the thread", a);
    use("B in the thread", b);
    return NULL;
}
static void raw_thread(void) {
    in_thread(NULL);
    gone = 1;
}
static void raw_process(void) {
    the_job();
    by_asm(SYS_exit_group, 6, 0, 0, 0, 0, 0);
}

// clone(2) without the C library: `run` in a new thread or process, on a stack of its own.
static long raw_clone(unsigned long flags, void (*run)(void)) {
    // Unwinders look above the first frame.
    size_t size = 256 << 10, above = 4096;
    char *stack = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) return -ENOMEM;
    long result;
    register long nobody __asm__("r10") = 0;
    register void (*function)(void) __asm__("r8") = run;
    __asm__ volatile("syscall; test %%rax, %%rax; jnz 1f; xor %%ebp, %%ebp; call *%%r8;"
                     "mov $60, %%eax; xor %%edi, %%edi; syscall; hlt; 1:"
                     : "=a"(result)
                     : "a"((long)SYS_clone), "D"(flags), "S"(stack + size - above), "d"(0l), "r"(nobody), "r"(function)
                     : "rcx", "r11", "memory");
    return result;
}
enum { THREAD = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM };

// Threads that the C library makes for others.
static int c11_thread(void *unused) { return in_thread(unused) != NULL; }
static void on_timer(union sigval value) {
    (void)value;
    in_thread(NULL);
    gone = 1;
}
static int libc_thread(void *unused) {
    (void)unused;
    raw_thread();
    by_asm(SYS_exit, 0, 0, 0, 0, 0, 0);
    return 0;
}
static void wait_for_it(void) {
    struct timespec pause = {0, 100000};
    go = 1;
    while (!gone) by_asm(SYS_nanosleep, (long)&pause, 0, 0, 0, 0, 0);
}
static void with_timer(void) {
    struct sigevent event = {.sigev_notify = SIGEV_THREAD, .sigev_notify_function = on_timer};
    struct itimerspec soon = {.it_value = {0, 1000000}};
    timer_t timer;
    LIBC(timer_create(CLOCK_MONOTONIC, &event, &timer));
    LIBC(timer_settime(timer, 0, &soon, NULL));
    wait_for_it();
}

// SIGSYS of the program's own.
static volatile int handled, last_code;
static void on_sigsys(int signal, siginfo_t *info, void *context) {
    (void)signal;
    handled++;
    last_code = info->si_code;
    if (info->si_code == 1 /* SYS_SECCOMP */) ((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = 4242;
}
static void handle(int raw) {
    struct sigaction action = {.sa_sigaction = on_sigsys, .sa_flags = SA_SIGINFO};
    if (!raw) { LIBC(sigaction(SIGSYS, &action, NULL)); return; }
    // As the kernel has it, with the restorer of the C library.
    struct { void *handler; unsigned long flags; void *restorer; unsigned long mask; } old = {0};
    struct sigaction libc_action = {.sa_sigaction = on_sigsys, .sa_flags = SA_SIGINFO};
    sigaction(SIGWINCH, &libc_action, NULL);
    step("read SIGWINCH", by_asm(SYS_rt_sigaction, SIGWINCH, 0, (long)&old, 8, 0, 0));
    old.handler = on_sigsys;
    step("set SIGSYS", by_asm(SYS_rt_sigaction, SIGSYS, (long)&old, 0, 8, 0, 0));
}
static void dispose(int raw, void *to) {
    struct { void *handler; unsigned long flags; void *restorer; unsigned long mask; } action = {to, 0, NULL, 0};
    if (raw) step("set SIGSYS", by_asm(SYS_rt_sigaction, SIGSYS, (long)&action, 0, 8, 0, 0));
    else step("signal", signal(SIGSYS, to) == SIG_ERR ? -errno : 0);
}
static void ask_for_sigsys(int handler) {
    struct sigaction old;
    handled = 0;
    if (handler) {
        LIBC(kill(getpid(), SIGSYS));
        line("handled %d, code %d\n", handled, last_code);
    }
    LIBC(sigaction(SIGSYS, NULL, &old));
    line("the handler is %s\n", old.sa_sigaction == on_sigsys ? "the program's" : old.sa_handler == SIG_IGN ? "ignore" :
         old.sa_handler == SIG_DFL ? "default" : "another");
}

static void mask(int raw, int how) {
    sigset_t all;
    sigfillset(&all);
    if (raw) step("mask", by_asm(SYS_rt_sigprocmask, how, (long)&all, 0, 8, 0, 0));
    else LIBC(pthread_sigmask(how, &all, NULL));
}
// But for SIGSYS, which `uvfs run` takes out of every mask.
static void show_mask(void) {
    sigset_t now, raw;
    sigemptyset(&now); sigemptyset(&raw);
    pthread_sigmask(SIG_BLOCK, NULL, &now);
    by_asm(SYS_rt_sigprocmask, SIG_BLOCK, 0, (long)&raw, 8, 0, 0);
    line("SIGUSR1 blocked %d %d, SIGSEGV blocked %d %d\n", sigismember(&now, SIGUSR1), sigismember(&raw, SIGUSR1),
         sigismember(&now, SIGSEGV), sigismember(&raw, SIGSEGV));
}

// The other functions that block signals.
static void masked_by(const char *place) {
    static ucontext_t here, there;
    static jmp_buf out;
    sigset_t all, none;
    volatile int rounds = 0;
    sigfillset(&all);
    sigemptyset(&none);
    if (is(place, "sighold")) LIBC(sighold(SIGSYS));
#ifdef __GLIBC__
    else if (is(place, "sigsetmask")) step("sigsetmask", sigsetmask(~0));
    else if (is(place, "context")) {
        LIBC(getcontext(&here));
        if (!rounds++) {
            sigfillset(&here.uc_sigmask);
            setcontext(&here);
        }
    } else {
        if (!sigsetjmp(out, 1)) {
            // With a mask that blocks all, written into what sigsetjmp saved.
            for (size_t i = 0; i + sizeof(long) <= sizeof out[0].__saved_mask; i += sizeof(long))
                *(long *)((char *)&out[0].__saved_mask + i) = ~0l;
            siglongjmp(out, 1);
        }
    }
#endif
    show_mask();
    the_job();
    show_mask();
    LIBC(sigprocmask(SIG_SETMASK, &none, NULL));
    the_job();
}
// The handler's return blocks all.
static void blocks_all(int signal, siginfo_t *info, void *context) {
    (void)signal; (void)info;
    memset(&((ucontext_t *)context)->uc_sigmask, 0xff, 8);
}
static void masked_by_return(void) {
    struct sigaction action = {.sa_sigaction = blocks_all, .sa_flags = SA_SIGINFO};
    LIBC(sigaction(SIGUSR1, &action, NULL));
    LIBC(kill(getpid(), SIGUSR1));
    show_mask();
    the_job();
    mask(0, SIG_UNBLOCK);
    show_mask();
}

static void job_in_handler(int signal) {
    (void)signal;
    show_mask();
    the_job();
}
static void with_handler(int flags) {
    struct sigaction action = {.sa_handler = job_in_handler, .sa_flags = flags};
    stack_t stack = {.ss_sp = malloc(64 << 10), .ss_size = 64 << 10};
    sigfillset(&action.sa_mask);
    if (flags & SA_ONSTACK) LIBC(sigaltstack(&stack, NULL));
    LIBC(sigaction(SIGUSR1, &action, NULL));
    LIBC(kill(getpid(), SIGUSR1));
    show_mask();
}

// Signals all the time, whose handler goes around.
static void on_alarm(int signal) {
    (void)signal;
    int before = errno;
    by_asm(SYS_lseek, a, 0, SEEK_CUR, 0, 0, 0);
    errno = before;
}
static void in_a_storm(void) {
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    struct itimerval often = {{0, 300}, {0, 300}}, never = {{0, 0}, {0, 0}};
    LIBC(sigaction(SIGALRM, &action, NULL));
    setitimer(ITIMER_REAL, &often, NULL);
    the_job();
    setitimer(ITIMER_REAL, &never, NULL);
}

// The program's own Syscall User Dispatch.
static volatile char selector;
static void on_dispatch(int signal, siginfo_t *info, void *context) {
    (void)signal; (void)context;
    selector = 0;
    handled++;
    last_code = info->si_code;
}
static void dispatch_once(void) {
    handled = 0;
    selector = 1;
    by_asm(SYS_getppid, 0, 0, 0, 0, 0, 0);
    selector = 0;
    line("dispatched %d, code %d\n", handled, last_code);
}

static void filter(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getppid, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {4, code};
    LIBC(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    LIBC(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}
static void ask_the_filter(void) {
    handled = 0;
    line("getppid: %ld %d\n", by_asm(SYS_getppid, 0, 0, 0, 0, 0, 0), getppid());
    line("handled %d, code %d\n", handled, last_code);
}

static pthread_t made_before;

// Before the files are opened. Says whether the job comes before the work on them.
static int place_before(const char *place) {
    if (is(place, "thread-before") && pthread_create(&made_before, NULL, in_thread, NULL)) exit(3);
    if (is(place, "thread-awake") && pthread_create(&made_before, NULL, in_thread, (void *)place)) exit(3);
    if (is(place, "raw-thread-before") && raw_clone(THREAD, raw_thread) < 0) exit(3);
    if (is(place, "masked-before")) mask(1, SIG_BLOCK);
    if (is(place, "handler") || is(place, "trapped")) handle(0);
    if (is(place, "handler-raw")) handle(1);
    if (is(place, "ignored")) dispose(0, SIG_IGN);
    if (is(place, "trapped")) { filter(); ask_the_filter(); }
    if (is(place, "dispatch-before")) {
        struct sigaction action = {.sa_sigaction = on_dispatch, .sa_flags = SA_SIGINFO};
        LIBC(sigaction(SIGSYS, &action, NULL));
        LIBC(prctl(59, 1, 0, 0, &selector));
        dispatch_once();
    }
#ifdef WITH_URING
    if (is(place, "ring-before")) {
        if (way == by_sqpoll) ring_flags = IORING_SETUP_SQPOLL;
        make_ring();
    }
#endif
    return is(place, "early");
}

static void in_another_program(void) {
    char first[12], second[12];
    snprintf(first, sizeof first, "%d", a); snprintf(second, sizeof second, "%d", b);
    const char *program = getenv("AROUND_CHILD");
    char *list[] = {(char *)program, (char *)way_name, "main", (char *)operation, (char *)where, first, second, NULL};
    pid_t child = -1;
    int done = posix_spawn(&child, program, NULL, NULL, list, environ);
    waited("the other program", done ? -done : child);
}

static int run_at(const char *place, void (*job)(void)) {
    pthread_t thread;
    the_job = job;
    if (is(place, "main") || is(place, "early") || is(place, "ring-before")) job();
    else if (is(place, "thread-before") || is(place, "thread-awake")) { go = 1; pthread_join(made_before, NULL); }
    else if (is(place, "thread-after")) {
        go = 1;
        if (pthread_create(&thread, NULL, in_thread, NULL)) return 0;
        pthread_join(thread, NULL);
    } else if (is(place, "raw-thread-before") || is(place, "raw-thread")) {
        if (is(place, "raw-thread")) step("raw clone", raw_clone(THREAD, raw_thread) > 0);
        wait_for_it();
    } else if (is(place, "clone-thread")) {
        static char stack[128 << 10] __attribute__((aligned(16)));
        step("clone", clone(libc_thread, stack + sizeof stack, THREAD, NULL) > 0);
        wait_for_it();
    } else if (is(place, "timer-thread")) with_timer();
#ifdef __GLIBC__
    else if (is(place, "c11-thread")) {
        thrd_t other;
        step("thrd_create", thrd_create(&other, c11_thread, NULL));
        go = 1;
        thrd_join(other, NULL);
    }
#endif
    else if (is(place, "masked-attr")) {
        pthread_attr_t how;
        sigset_t all;
        sigfillset(&all);
        pthread_attr_init(&how);
#ifdef __GLIBC__
        pthread_attr_setsigmask_np(&how, &all);
#endif
        go = 1;
        if (pthread_create(&thread, &how, in_thread, NULL)) return 0;
        pthread_join(thread, NULL);
    } else if (is(place, "sighold") || is(place, "sigsetmask") || is(place, "context") || is(place, "longjmp")) masked_by(place);
    else if (is(place, "masked-return")) masked_by_return();
    else if (is(place, "storm")) in_a_storm();
    else if (is(place, "busy")) {
        // So many calls around the C library that it does not pay to look at them.
        for (int i = 0; i < 40000; i++) by_asm(SYS_getppid, 0, 0, 0, 0, 0, 0);
        job();
        for (int i = 0; i < 40000; i++) by_asm(SYS_getppid, 0, 0, 0, 0, 0, 0);
    }
    else if (is(place, "sysv-handler")) {
        step("sigset", sigset(SIGSYS, (void (*)(int))job_in_handler) == SIG_ERR ? -errno : 0);
        job();
        LIBC(kill(getpid(), SIGSYS));
        job();
    } else if (is(place, "files-clone")) waited("raw clone", raw_clone(CLONE_FILES | SIGCHLD, raw_process));
    else if (is(place, "raw-vforked")) waited("raw vfork", raw_clone(CLONE_VM | CLONE_VFORK | SIGCHLD, raw_process));
    else if (is(place, "vforked")) {
        pid_t child = vfork();
        if (child == 0) raw_process();
        waited("vfork", child);
    } else if (is(place, "forked")) {
        pid_t child = fork();
        if (child == 0) {
            job();
            use("A in the child", a);
            exit(8);
        }
        waited("fork", child);
    } else if (is(place, "unshared") || is(place, "unshared-raw")) {
        if (pthread_create(&thread, NULL, in_own_table, is(place, "unshared") ? NULL : &thread)) return 0;
        pthread_join(thread, NULL);
    } else if (is(place, "masked") || is(place, "masked-libc") || is(place, "masked-before")) {
        int raw = !is(place, "masked-libc");
        if (!is(place, "masked-before")) mask(raw, SIG_BLOCK);
        show_mask();
        job();
        use("A", a);
        show_mask();
        mask(raw, SIG_UNBLOCK);
        show_mask();
    } else if (is(place, "handler") || is(place, "handler-raw")) {
        ask_for_sigsys(1); job(); ask_for_sigsys(1);
    } else if (is(place, "handler-after")) {
        handle(0); ask_for_sigsys(1); job(); ask_for_sigsys(1);
    } else if (is(place, "handler-raw-after")) {
        handle(1); ask_for_sigsys(1); job(); ask_for_sigsys(1);
    } else if (is(place, "ignored") || is(place, "ignored-raw") || is(place, "default-raw")) {
        if (!is(place, "ignored")) dispose(1, is(place, "ignored-raw") ? SIG_IGN : SIG_DFL);
        ask_for_sigsys(!is(place, "default-raw")); job(); ask_for_sigsys(!is(place, "default-raw"));
    } else if (is(place, "in-handler")) with_handler(0);
    else if (is(place, "in-handler-alt")) with_handler(SA_ONSTACK | SA_RESTART);
    else if (is(place, "trapped")) { ask_the_filter(); job(); ask_the_filter(); }
    else if (is(place, "dispatch-before")) { dispatch_once(); job(); dispatch_once(); }
    else if (is(place, "dispatch")) {
        struct sigaction action = {.sa_sigaction = on_dispatch, .sa_flags = SA_SIGINFO};
        LIBC(sigaction(SIGSYS, &action, NULL));
        LIBC(prctl(59, 1, 0, 0, &selector));
        dispatch_once(); job(); dispatch_once();
    } else if (is(place, "child")) in_another_program();
    else return 0;
    return 1;
}
