// Operations by functions of the C library that make their system calls inside it, where nothing intercepts them.
#pragma once
#include <aio.h>
#include <pty.h>
#include <spawn.h>
#include <termios.h>
#include <utmp.h>
#include <wordexp.h>

static void in_a_child(void (*run)(void)) {
    pid_t child = fork();
    if (child == 0) {
        run();
        _exit(3);
    }
    waited("child", child);
}
static void op_stdout(void) {
    fflush(stdout);
    low_output = fcntl(1, F_DUPFD, 100);
    LIBC(dup2(a, 1));
    LIBC(printf("printed"));
    LIBC(fflush(stdout));
    use("A", a);
    LIBC(printf("again"));
    LIBC(fflush(stdout));
    LIBC(puts("a line"));
    LIBC(fflush(stdout));
}
static void op_perror(void) {
    LIBC(dup2(a, 2));
    errno = ENOENT;
    perror("of A");
    use("A", a);
    LIBC(fprintf(stderr, "to A"));
    psignal(SIGINT, "signal");
}
static void op_aio(void) {
    char text[8] = "";
    struct aiocb one = {.aio_fildes = a, .aio_buf = "by aio", .aio_nbytes = 6, .aio_offset = 355};
    const struct aiocb *list[] = {&one};
    LIBC(aio_write(&one));
    while (aio_error(&one) == EINPROGRESS) aio_suspend(list, 1, NULL);
    LIBC(aio_return(&one));
    LIBC(write(a, "mine", 4));
    struct aiocb other = {.aio_fildes = a, .aio_buf = text, .aio_nbytes = 7, .aio_offset = 358};
    const struct aiocb *others[] = {&other};
    LIBC(aio_read(&other));
    while (aio_error(&other) == EINPROGRESS) aio_suspend(others, 1, NULL);
    LIBC(aio_return(&other));
    line("  %s\n", text);
}
static void op_allocate(void) {
    LIBC(-posix_fallocate(a, 5000, 3000));
    LIBC(lseek(a, 0, SEEK_END));
    use("A", a);
}
static void becomes_daemon(void) {
    LIBC(dup2(a, 0));
    use("standard input", 0);
    // Its own fork has the rest; the child that waits for it is this one's.
    if (daemon(1, 0) < 0) step("daemon", -errno);
    int files = open("C", O_RDWR | O_CREAT, 0644);
    char byte;
    int n = write(0, "to nowhere", 10), m = read(0, &byte, 1), there = pread(0, &byte, 1, 0), put = pwrite(0, "nowhere", 7, 50);
    dprintf(files, "%d %d %d %d", n, m, there, put);
    close(files);
    rename("C", "D");
    _exit(0);
}
static void op_daemon(void) {
    in_a_child(becomes_daemon);
    for (int i = 0; i < 5000 && access("D", F_OK); i++) usleep(1000);
    char text[20] = "";
    int from = open("D", O_RDONLY);
    read(from, text, 19);
    close(from);
    line("the daemon: %s\n", text);
}
static void logs_in(void) {
    int master, slave;
    LIBC(dup2(a, 0));
    use("standard input", 0);
    if (openpty(&master, &slave, NULL, NULL, NULL) < 0) { step("openpty", -errno); return; }
    low_output = fcntl(1, F_DUPFD, 100);
    LIBC(login_tty(slave));
    LIBC(lseek(0, 0, SEEK_CUR));
    LIBC(write(0, "to the terminal", 15));
    LIBC(pwrite(0, "to the terminal", 15, 60));
}
static void op_login(void) { in_a_child(logs_in); }
static void op_wordexp(void) {
    char words[100];
    wordexp_t found;
    snprintf(words, sizeof words, "$(echo shell >&%d; head -c 5 <&%d)", a, b);
    LIBC(wordexp(words, &found, 0));
    for (size_t i = 0; i < found.we_wordc; i++) line("  %s\n", found.we_wordv[i]);
}
static void op_popen(void) {
    char command[100], text[50] = "";
    snprintf(command, sizeof command, "echo child >&%d; head -c 5 <&%d", a, b);
    FILE *pipe = popen(command, "r");
    if (pipe) { fgets(text, sizeof text, pipe); LIBC(pclose(pipe)); }
    line("  %s\n", text);
    LIBC(system(command));
}
static void op_stream(void) {
    FILE *stream = fdopen(dup(a), "r+");
    char text[9] = "";
    LIBC(fread(text, 1, 8, stream));
    line("  %s\n", text);
    LIBC(fseek(stream, 10, SEEK_CUR));
    LIBC(fwrite("stream", 1, 6, stream));
    LIBC(fflush(stream));
    use("A", a);
    LIBC(fclose(stream));
    LIBC(dprintf(a, "%d and %s", 5, "five"));
}
#define INSIDE {"stdout", op_stdout}, {"perror", op_perror}, {"aio", op_aio}, {"allocate", op_allocate}, \
    {"daemon", op_daemon}, {"login", op_login}, {"wordexp", op_wordexp}, {"popen", op_popen}, {"stream", op_stream},
