// Threads that make, read, rename and remove files, beside others that fork and spawn, under a timer's
// signals: everything that one of them wrote it finds again. Arguments: a directory, and rounds.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *base; static int rounds; static volatile sig_atomic_t alarms;
static void alarmed(int signal) { (void)signal; alarms++; }
#define must(condition) do { if (!(condition)) { fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, strerrorname_np(errno)); abort(); } } while (0)

static void use(const char *dir, int round) {
    char name[300], other[300], text[64], back[64]; struct stat st;
    snprintf(name, sizeof name, "%s/file%d", dir, round % 3); snprintf(other, sizeof other, "%s/other", dir);
    int len = snprintf(text, sizeof text, "round %d of %s", round, strrchr(dir, '/'));
    int fd = open(name, O_RDWR | O_CREAT | (round % 2 ? O_EXCL : O_TRUNC), 0644);
    must(fd >= 0); must(write(fd, text, len) == len);
    switch (round % 7) {
    case 0: must(!flock(fd, LOCK_EX)); break;
    case 1: { int two = dup(fd); must(two >= 0); must(!close(two)); break; }
    case 2: must(!fchmod(fd, 0600)); break;
    case 3: must(!fsync(fd)); break;
    }
    must(lseek(fd, 0, SEEK_CUR) == len);
    must(pread(fd, back, sizeof back, 0) == len && !memcmp(text, back, len));
    must(!fstat(fd, &st) && st.st_size == len); must(!close(fd));
    must(!stat(name, &st) && st.st_size == len); must(!rename(name, other)); must(access(name, F_OK) < 0 && errno == ENOENT);
    fd = open(other, O_RDONLY); must(fd >= 0); must(read(fd, back, sizeof back) == len && !memcmp(text, back, len)); must(!close(fd));
    DIR *list = opendir(dir); must(list); int seen = 0; for (struct dirent *e; (e = readdir(list));) seen += !strcmp(e->d_name, "other"); must(!closedir(list)); must(seen == 1);
    snprintf(name, sizeof name, "%s/sub", dir); must(!mkdir(name, 0755)); must(!rmdir(name)); must(!unlink(other));
}

static void *works(void *number) {
    char dir[200]; snprintf(dir, sizeof dir, "%s/thread%ld", base, (long)number); must(!mkdir(dir, 0755));
    for (int i = 0; i < rounds; i++) use(dir, i);
    must(!rmdir(dir)); return NULL;
}

static void *forks(void *number) {
    extern char **environ;
    for (int i = 0; i < rounds / 10; i++) {
        char dir[200], path[300], text[8] = "";
        snprintf(dir, sizeof dir, "%s/forker%ld", base, (long)number); must(!mkdir(dir, 0755));
        snprintf(path, sizeof path, "%s/shared", dir); int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600); must(fd >= 0); must(write(fd, "parent ", 7) == 7);
        pid_t child; int status;
        if (i % 3) {
            child = fork();
            if (!child) { use(dir, i); must(write(fd, "child", 5) == 5); _exit(0); }
        } else {
            char *arguments[] = { "cat", path, NULL }; posix_spawn_file_actions_t actions; posix_spawn_file_actions_init(&actions);
            posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
            must(!posix_spawn(&child, "/bin/cat", &actions, NULL, arguments, environ)); posix_spawn_file_actions_destroy(&actions);
        }
        must(child > 0); while (waitpid(child, &status, 0) < 0) must(errno == EINTR);
        must(status == 0);
        if (i % 3) { must(pread(fd, text, 5, 7) == 5 && !strcmp(text, "child")); must(lseek(fd, 0, SEEK_CUR) == 12); }
        must(!close(fd)); must(!unlink(path)); must(!rmdir(dir));
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    base = argv[1]; rounds = atoi(argv[2]);
    struct sigaction action = { .sa_handler = alarmed, .sa_flags = SA_RESTART }; sigaction(SIGALRM, &action, NULL);
    struct itimerval timer = { { 0, 3000 }, { 0, 3000 } }; setitimer(ITIMER_REAL, &timer, NULL);
    pthread_t threads[8];
    for (long i = 0; i < 8; i++) must(!pthread_create(&threads[i], NULL, i < 6 ? works : forks, (void *)i));
    for (int i = 0; i < 8; i++) must(!pthread_join(threads[i], NULL));
    printf("done %d\n", alarms > 0);
    return 0;
}
