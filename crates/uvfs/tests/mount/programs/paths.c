// Calls with paths, each written down with its result, its errno and what it leaves: the same on every
// file system. Arguments: a directory to work in, and which part (0: every call on every kind of path;
// 1: descriptors, processes and the rest, in the order of a program's life).
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <glob.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static char base[1000];
static int root;

static const char *code(long result) { return result < 0 ? strerrorname_np(errno) : ""; }

static int succeeded;

// Numbers of descriptors are not compared.
static void say(const char *what, const char *on, long result) {
    const char *name = code(result);
    succeeded |= result >= 0;
    printf("%s %s: %s%ld %s\n", what, on, result > 2 ? "~" : "", result > 2 ? 0 : result, name);
}
#define T(call) do { errno = 0; long result_ = (long)(call); say(#call, "", result_); } while (0)
// The number counts.
#define N(call) do { errno = 0; long result_ = (long)(call); printf("%s: %ld %s\n", #call, result_, code(result_)); } while (0)
#define S(what, text) printf("%s: %s\n", what, text)

static void must(int done, const char *what) {
    if (done < 0) { printf("no %s: %s\n", what, strerrorname_np(errno)); fflush(stdout); exit(3); }
}

static int entry_order(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static void contents(int dir, const char *name) {
    int fd = openat(dir, name, O_RDONLY);
    char text[65]; long n = fd < 0 ? -1 : read(fd, text, 64);
    for (long i = 0; i < n; i++) if (text[i] < 32) text[i] = '.';
    text[n < 0 ? 0 : n] = 0;
    printf(" \"%s\"", n < 0 ? strerrorname_np(errno) : text);
    if (fd >= 0) close(fd);
}

// Through the kernel: relative to descriptors.
static void tree(int dir, int depth) {
    char *names[1000]; int count = 0;
    int copy = openat(dir, ".", O_RDONLY | O_DIRECTORY);
    if (copy < 0) { printf("?%s\n", strerrorname_np(errno)); return; }
    DIR *list = fdopendir(copy);
    for (struct dirent *e; (e = readdir(list));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..") && count < 1000) names[count++] = strdup(e->d_name);
    qsort(names, count, sizeof *names, entry_order);
    for (int i = 0; i < count; i++) {
        struct stat st; char target[300];
        printf("%*s", depth * 2 + 2, "");
        for (char *c = names[i]; *c; c++) if (*c < 32 || *c > 126) printf("\\%02x", *c & 255); else putchar(*c);
        if (fstatat(dir, names[i], &st, AT_SYMLINK_NOFOLLOW) < 0) { printf(" ?%s\n", strerrorname_np(errno)); continue; }
        printf(" %o %d:%d", st.st_mode, st.st_uid, st.st_gid);
        if (!S_ISDIR(st.st_mode)) printf(" %ld*%ld", (long)st.st_size, (long)st.st_nlink);
        if (S_ISLNK(st.st_mode)) {
            ssize_t n = readlinkat(dir, names[i], target, sizeof target - 1);
            target[n < 0 ? 0 : n] = 0; printf(" -> %s", target);
        }
        if (S_ISREG(st.st_mode)) contents(dir, names[i]);
        putchar('\n');
        if (S_ISDIR(st.st_mode)) {
            int below = openat(dir, names[i], O_RDONLY | O_DIRECTORY);
            if (below >= 0) { tree(below, depth + 1); close(below); }
        }
        free(names[i]);
    }
    closedir(list);
}

static int removed(const char *path, const struct stat *st, int kind, struct FTW *ftw) {
    (void)st; (void)kind; (void)ftw; return remove(path);
}

static char longest[300], *too_long, *long_path;

static void file(const char *name, const char *text) {
    int fd = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    must(fd, name); must(write(fd, text, strlen(text)), name); close(fd);
}

// A fresh tree in `t`, which is the current directory then.
static void fresh(void) {
    must(chdir(base), "base"); must(chmod(".", 0755), "base"); must(chown(".", 0, 0), "base");
    nftw("t", removed, 20, FTW_DEPTH | FTW_PHYS);
    must(mkdir("t", 0755), "t"); must(chdir("t"), "t");
    file("file", "contents"); file("other", "another");
    must(mkdir("dir", 0755), "dir"); must(mkdir("dir/sub", 0700), "sub"); file("dir/inner", "inside");
    must(mkdir("empty", 0755), "empty");
    must(symlink("file", "link"), "link"); must(symlink("dir", "linkdir"), "linkdir");
    must(symlink("nowhere", "dangling"), "dangling"); must(symlink("loop", "loop"), "loop");
    must(mkfifo("fifo", 0644), "fifo"); must(link("other", "hard"), "hard");
    file("odd\xff\x01\n name", "odd");
    if (root >= 0) close(root);
    must(root = open(".", O_RDONLY | O_DIRECTORY), "root");
}

static const char *paths[] = {
    "file", "dir", "empty", "link", "linkdir", "dangling", "loop", "fifo", "hard", "missing", "odd\xff\x01\n name",
    "dir/inner", "dir/sub", "dir/missing", "missing/x", "file/x", "link/x", "linkdir/inner", "linkdir/missing",
    "dir/../file", "./file", ".", "..", "dir/.", "dir/..", "dir//inner", "file/", "dir/", "link/", "linkdir/", "missing/",
    "dangling/", "", NULL, NULL, NULL,
};
enum { PATHS = sizeof paths / sizeof *paths };

static struct stat st;
static void shown(const char *what, const char *on, long result) {
    say(what, on, result);
    if (result < 0) return;
    printf("  %o %d:%d", st.st_mode, st.st_uid, st.st_gid);
    if (!S_ISDIR(st.st_mode)) printf(" %ld*%ld", (long)st.st_size, (long)st.st_nlink);
    putchar('\n');
}

static void opened(const char *what, const char *on, long fd) {
    say(what, on, fd);
    if (fd < 0) return;
    struct stat there, here; char c[4] = "";
    int flags = fcntl(fd, F_GETFL);
    printf("  flags %o %d", flags & ~O_LARGEFILE, fcntl(fd, F_GETFD));
    must(fstat(fd, &here), "fstat");
    printf(" %o %ld", here.st_mode, S_ISDIR(here.st_mode) ? 0 : (long)here.st_size);
    if (S_ISREG(here.st_mode) && !(flags & O_PATH)) {
        printf(" write %ld", (long)write(fd, "W", 1)); printf(" read %ld", (long)pread(fd, c, 3, 0));
        printf(" %s", c);
        printf(" at %ld", (long)lseek(fd, 0, SEEK_CUR));
    }
    char at[64]; snprintf(at, sizeof at, "/proc/self/fd/%ld", fd);
    must(fstat(fd, &here), "fstat again"); must(stat(at, &there), at);
    printf(" same %d\n", here.st_ino == there.st_ino && here.st_dev == there.st_dev && here.st_size == there.st_size);
    close(fd);
}

// What names a path's last directory, for the three ways of giving one.
enum Way { RELATIVE, ABSOLUTE, AT };
static int way_dir; static char way_path[PATH_MAX * 2];
static void give(enum Way way, const char *path) {
    way_dir = way == AT ? root : AT_FDCWD;
    if (way == ABSOLUTE && *path) snprintf(way_path, sizeof way_path, "%s/t/%s", base, path);
    else snprintf(way_path, sizeof way_path, "%s", path);
}

#define OPEN(flags, mode) do { opened("open " #flags, on, openat(way_dir, way_path, flags, mode)); } while (0)
#define PLAIN(call) do { errno = 0; long result_ = (call); say(#call, on, result_); } while (0)

static int one_call(int number, const char *on) {
    char text[8] = ""; DIR *list; struct statx stx;
    switch (number) {
    case 0: OPEN(O_RDONLY | O_NONBLOCK, 0); return 0;
    case 1: OPEN(O_RDWR | O_NONBLOCK | O_CLOEXEC, 0); return 1;
    case 2: OPEN(O_WRONLY | O_CREAT | O_NONBLOCK, 0600); return 1;
    case 3: OPEN(O_RDWR | O_CREAT | O_EXCL, 0666); return 1;
    case 4: OPEN(O_RDWR | O_CREAT | O_TRUNC | O_NONBLOCK, 04751); return 1;
    case 5: OPEN(O_RDONLY | O_NOFOLLOW | O_NONBLOCK, 0); return 0;
    case 6: OPEN(O_RDONLY | O_DIRECTORY, 0); return 0;
    case 7: OPEN(O_PATH | O_NOFOLLOW, 0); return 0;
    case 8: OPEN(O_RDONLY | O_CREAT | O_NONBLOCK, 0); return 1;
    case 9: OPEN(O_RDWR | O_APPEND | O_NONBLOCK, 0); return 1;
    case 10: OPEN(O_WRONLY | O_TRUNC | O_NONBLOCK | O_SYNC, 0); return 1;
    case 11: OPEN(O_RDWR | O_TMPFILE, 0600); return 0;
    case 12: shown("stat", on, fstatat(way_dir, way_path, &st, 0)); return 0;
    case 13: shown("lstat", on, fstatat(way_dir, way_path, &st, AT_SYMLINK_NOFOLLOW)); return 0;
    case 14: shown("stat", on, fstatat(way_dir, way_path, &st, AT_EMPTY_PATH)); return 0;
    case 15: PLAIN(faccessat(way_dir, way_path, F_OK, 0)); PLAIN(faccessat(way_dir, way_path, R_OK | W_OK, 0));
        PLAIN(faccessat(way_dir, way_path, X_OK, 0)); PLAIN(faccessat(way_dir, way_path, X_OK, AT_SYMLINK_NOFOLLOW)); return 0;
    case 16: PLAIN(readlinkat(way_dir, way_path, text, 7)); S("  to", text); return 0;
    case 17: PLAIN(mkdirat(way_dir, way_path, 02777)); return 1;
    case 18: PLAIN(unlinkat(way_dir, way_path, 0)); return 1;
    case 19: PLAIN(unlinkat(way_dir, way_path, AT_REMOVEDIR)); return 1;
    case 20: PLAIN(symlinkat("some/where", way_dir, way_path)); return 1;
    case 21: PLAIN(symlinkat("", way_dir, way_path)); return 1;
    case 22: PLAIN(mknodat(way_dir, way_path, S_IFREG | 0640, 0)); return 1;
    case 23: PLAIN(fchmodat(way_dir, way_path, 0640, 0)); return 1;
    case 24: PLAIN(fchownat(way_dir, way_path, 7, 8, AT_SYMLINK_NOFOLLOW)); return 1;
    case 25: PLAIN(statx(way_dir, way_path, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &stx));
        printf("  %d\n", stx.stx_mode); return 0;
    case 26: if (way_dir != AT_FDCWD) return 0;
        PLAIN(truncate(way_path, 3)); return 1;
    case 27: if (way_dir != AT_FDCWD) return 0;
        errno = 0; list = opendir(way_path); say("opendir", on, list ? 0 : -1);
        if (list) closedir(list);
        return 0;
    case 28: if (way_dir != AT_FDCWD) return 0;
        PLAIN(remove(way_path)); return 1;
    case 29: if (way_dir != AT_FDCWD) return 0;
        PLAIN(chdir(way_path)); PLAIN(access("inner", F_OK)); PLAIN(access("../file", F_OK)); must(fchdir(root), "root"); return 0;
    case 30: if (way_dir != AT_FDCWD) return 0;
        PLAIN(stat(way_path, &st)); PLAIN(lstat(way_path, &st)); PLAIN(access(way_path, R_OK)); PLAIN(euidaccess(way_path, R_OK));
        PLAIN(readlink(way_path, text, 7)); PLAIN(rmdir(way_path)); PLAIN(unlink(way_path)); PLAIN(mkdir(way_path, 0111));
        PLAIN(symlink("x", way_path)); PLAIN(open(way_path, O_RDONLY | O_NONBLOCK)); PLAIN(creat(way_path, 0600)); return 1;
    }
    return -1;
}

static void every_call(void) {
    memset(longest, 'l', 255);
    too_long = malloc(257); memset(too_long, 'm', 256); too_long[256] = 0;
    // Too long with the directory in front of it, as an absolute path.
    long_path = malloc(PATH_MAX);
    for (int i = 0; i < PATH_MAX - 11; i++) long_path[i] = "./"[i % 2];
    strcpy(long_path + (PATH_MAX - 12) / 2 * 2, "file");
    paths[PATHS - 3] = longest; paths[PATHS - 2] = too_long; paths[PATHS - 1] = long_path;
    for (int call = 0; call >= 0; call++) {
        fresh();
        for (int i = 0; i < PATHS; i++)
            for (enum Way way = RELATIVE; way <= AT; way++) {
                // What changes nothing is cheap; of the rest every third.
                if (call >= 17 && way != (enum Way)((i + call) % 3)) continue;
                succeeded = 0;
                char on[80]; snprintf(on, sizeof on, "%d %.40s", way, paths[i]);
                give(way, paths[i]);
                int changes = one_call(call, on);
                if (changes < 0) return;
                if (changes && succeeded) { tree(root, 0); fresh(); }
            }
    }
}

static void every_pair(void) {
    static const char *some[] = { "file", "hard", "other", "dir", "empty", "link", "linkdir", "dangling", "missing", "dir/inner",
        "dir/sub", "dir/new", "missing/x", "file/x", "dir/", "missing/", ".", "..", "" };
    enum { SOME = sizeof some / sizeof *some };
    static char first[PATH_MAX * 2];
    fresh(); succeeded = 0;
    for (int i = 0; i < SOME; i++) for (int j = 0; j < SOME; j++) for (int call = 0; call < 6; call++) {
        char on[80]; snprintf(on, sizeof on, "%s %s", some[i], some[j]);
        enum Way way = (i + j + call) % 3;
        if ((i * 7 + j * 5 + call) % 3) continue;
        if (succeeded) fresh();
        succeeded = 0;
        give(way, some[i]); strcpy(first, way_path);
        int first_dir = way_dir;
        give((way + j % 2) % 3, some[j]);
        long done = -1; errno = 0;
        switch (call) {
        case 0: done = renameat(first_dir, first, way_dir, way_path); break;
        case 1: done = renameat2(first_dir, first, way_dir, way_path, RENAME_NOREPLACE); break;
        case 2: done = renameat2(first_dir, first, way_dir, way_path, RENAME_EXCHANGE); break;
        case 3: done = linkat(first_dir, first, way_dir, way_path, 0); break;
        case 4: done = linkat(first_dir, first, way_dir, way_path, AT_SYMLINK_FOLLOW); break;
        case 5: succeeded = 1; if (first_dir != AT_FDCWD || way_dir != AT_FDCWD) continue;
            done = rename(first, way_path); printf("%s ", code(done)); errno = 0; done = link(first, way_path); break;
        }
        printf("%d ", call); say("pair", on, done);
        if (done == 0) tree(root, 0);
    }
}

static long get(int fd, int n) { char text[100] = ""; long done = read(fd, text, n); printf("  \"%s\"\n", text); return done; }
static int wait_for(pid_t child) { int status = 0; if (waitpid(child, &status, 0) < 0) return -1; return status; }

static int run(const char *script, int fd) {
    char number[12]; snprintf(number, sizeof number, "%d", fd);
    char *arguments[] = { "sh", "-c", (char *)script, "sh", number, NULL };
    extern char **environ; pid_t child;
    fflush(stdout);
    if (posix_spawn(&child, "/bin/sh", NULL, NULL, arguments, environ)) return -1;
    return wait_for(child);
}

static void descriptors(void) {
    fresh();
    int fd = open("file", O_RDWR), other, pipes[2], sockets[2];
    struct stat there; char text[100] = ""; off_t at;
    N(fd); N(open("dir/inner", O_RDONLY)); close(fd + 1);
    must(fstat(fd, &st), "fstat"); must(stat("file", &there), "stat");
    N(st.st_ino == there.st_ino && st.st_dev == there.st_dev && !memcmp(&st.st_mtim, &there.st_mtim, sizeof st.st_mtim));
    T(get(fd, 3)); other = dup(fd); T(get(other, 2)); T(lseek(fd, 0, SEEK_CUR)); N(dup2(fd, 60)); T(get(60, 1)); T(close(fd)); T(get(other, 10));
    T(lseek(60, 1, SEEK_SET)); T(write(other, "XY", 2)); T(close(other)); T(close(60)); T(close(fd)); T(read(fd, text, 1));
    fd = open("file", O_RDWR | O_CLOEXEC); N(fcntl(fd, F_GETFD)); N(fcntl(fd, F_DUPFD, 40)); N(fcntl(40, F_GETFD)); N(fcntl(fd, F_DUPFD_CLOEXEC, 41));
    N(fcntl(41, F_GETFD)); N(fcntl(fd, F_GETFD)); T(dup3(fd, 42, O_CLOEXEC)); N(fcntl(42, F_GETFD)); T(dup3(fd, fd, 0)); N(dup2(fd, fd)); T(dup2(999, 43)); T(dup2(fd, -1));
    T(get(42, 4)); T(get(40, 4)); T(close_range(40, 42, 0)); T(fcntl(41, F_GETFD)); close(fd);
    fd = open("file", O_RDWR); T(fcntl(fd, F_SETFD, FD_CLOEXEC)); N(fcntl(fd, F_GETFD)); T(fcntl(fd, F_SETFL, O_APPEND)); N(fcntl(fd, F_GETFL) & (O_APPEND | O_RDWR | O_NOFOLLOW | O_TRUNC));
    T(write(fd, "end", 3)); T(lseek(fd, 0, SEEK_SET)); T(get(fd, 20)); close(fd);
    struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
    fd = open("file", O_RDWR); T(fcntl(fd, F_SETLK, &lock)); close(fd);
    fd = open("file", O_RDONLY); T(flock(fd, LOCK_EX | LOCK_NB)); other = open("file", O_RDONLY); T(flock(other, LOCK_EX | LOCK_NB)); close(fd); T(flock(other, LOCK_EX | LOCK_NB)); close(other);
    fd = open("file", O_RDWR); T(fchmod(fd, 0606)); close(fd);
    fd = open("file", O_RDWR); T(fchown(fd, 5, 6)); close(fd);
    struct timespec times[2] = { { 1000, 5 }, { 2000, 7 } };
    fd = open("file", O_RDWR); T(futimens(fd, times)); T(fstat(fd, &st)); N(st.st_mtim.tv_sec); close(fd);
    fd = open("file", O_RDWR); T(ftruncate(fd, 5)); T(fallocate(fd, 0, 0, 20)); T(posix_fallocate(fd, 0, 30)); T(lseek(fd, 0, SEEK_END)); T(fsync(fd)); T(fdatasync(fd)); close(fd);
    fd = open("file", O_RDONLY); T(write(fd, "x", 1)); T(ftruncate(fd, 0)); T(pwrite(fd, "x", 1, 0)); close(fd);
    fd = open("file", O_WRONLY); T(read(fd, text, 1)); T(pread(fd, text, 1, 0)); T(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED ? -1 : 0); close(fd);
    fd = open("file", O_RDWR);
    char *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    T(map == MAP_FAILED ? -1 : 0);
    if (map != MAP_FAILED) { memcpy(map, "mapped", 6); T(get(fd, 6)); T(pwrite(fd, "M", 1, 0)); printf("  %c\n", map[0]); munmap(map, 4096); }
    close(fd);
    fd = open("file", O_RDONLY); map = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0); T(map == MAP_FAILED ? -1 : 0);
    if (map != MAP_FAILED) { printf("  %.6s\n", map); munmap(map, 4096); }
    close(fd);
    must(pipe(pipes), "pipe");
    fd = open("dir/inner", O_RDONLY); other = open("new", O_RDWR | O_CREAT, 0644);
    T(get(fd, 2)); T(sendfile(other, fd, NULL, 2)); at = 0; T(sendfile(other, fd, &at, 3)); T(copy_file_range(fd, NULL, other, NULL, 10, 0)); T(lseek(fd, 0, SEEK_CUR)); T(pread(other, text, 20, 0)); S("copied", text);
    at = 1; T(splice(fd, &at, pipes[1], NULL, 4, 0)); at = 20; T(splice(pipes[0], NULL, other, &at, 4, 0)); T(fstat(other, &st)); N(st.st_size);
    close(fd); close(other); close(pipes[0]); close(pipes[1]);
    fd = open("stream", O_RDWR | O_CREAT, 0600); FILE *stream = fdopen(fd, "r+"); fprintf(stream, "line\nmore\n"); fflush(stream); T(pread(fd, text, 5, 0)); rewind(stream);
    fgets(text, 50, stream); S("line", text); fclose(stream); T(close(fd));
    stream = fopen("stream", "a"); fputs("end\n", stream); fclose(stream); T(stat("stream", &st)); N(st.st_size);
    stream = freopen("stream", "r", fopen("file", "r")); fgets(text, 50, stream); S("line", text); fclose(stream);
    // Variadic calls keep their arguments, those in vector registers too.
    fd = open("printed", O_RDWR | O_CREAT, 0600); T(write(fd, "> ", 2));
    T(dprintf(fd, "%g %g %d %g %g %g %g %g %g\n", 0.5, 1.5, 2, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5)); memset(text, 0, sizeof text); T(pread(fd, text, 50, 0)); S("printed", text); close(fd);
    // Through /proc, and relative to it.
    fd = open("file", O_RDWR); T(get(fd, 2)); snprintf(text, sizeof text, "/proc/self/fd/%d", fd); char to[PATH_MAX] = "";
    T(readlink(text, to, sizeof to)); S("link", to + strlen(base)); T(stat(text, &st)); N(st.st_size); other = open(text, O_RDONLY); T(get(other, 4)); close(other);
    T(fchdir(fd)); T(openat(fd, "x", O_RDONLY)); T(fstatat(fd, "", &st, AT_EMPTY_PATH)); N(st.st_size); T(linkat(fd, "", AT_FDCWD, "linked", AT_EMPTY_PATH)); T(faccessat(fd, "", R_OK, AT_EMPTY_PATH)); T(get(fd, 3)); close(fd);
    // By syscall(2).
    fd = open("file", O_RDWR); T(get(fd, 2)); T(syscall(SYS_read, fd, text, 2)); T(syscall(SYS_lseek, fd, 0, SEEK_CUR)); close(fd);
    fd = open("file", O_RDWR); T(syscall(SYS_ftruncate, fd, 9)); T(syscall(SYS_flock, fd, LOCK_SH)); T(syscall(SYS_dup, fd)); close(fd);
    // Waiting.
    fd = open("file", O_RDONLY); struct pollfd one = { fd, POLLIN | POLLOUT, 0 }; T(poll(&one, 1, 0)); N(one.revents); close(fd);
    fd = open("file", O_RDONLY); fd_set set; FD_ZERO(&set); FD_SET(fd, &set); T(select(fd + 1, &set, NULL, NULL, NULL)); close(fd);
    fd = open("file", O_RDONLY); other = epoll_create1(0); struct epoll_event event = { EPOLLIN, { 0 } }; N(epoll_ctl(other, EPOLL_CTL_ADD, fd, &event) < 0 ? errno == EPERM : 1); close(other); T(isatty(fd)); close(fd);
    // To another process, and back.
    must(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), "sockets"); fd = open("file", O_RDWR); T(get(fd, 3));
    union { struct cmsghdr header; char room[CMSG_SPACE(sizeof(int))]; } control; struct iovec vector = { text, 1 };
    struct msghdr message = { .msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control };
    control.header = (struct cmsghdr) { CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS }; memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    T(sendmsg(sockets[0], &message, 0)); close(fd); T(recvmsg(sockets[1], &message, 0)); memcpy(&fd, CMSG_DATA(&control.header), sizeof fd); T(get(fd, 3)); close(fd); close(sockets[0]); close(sockets[1]);
    // Names that change behind open files.
    fd = open("moved", O_RDWR | O_CREAT, 0640); T(write(fd, "moved", 5)); T(rename("moved", "dir/moved")); T(fstat(fd, &st)); N(st.st_nlink); T(pread(fd, text, 5, 0)); other = dup(fd); T(pread(other, text, 9, 0));
    snprintf(to, sizeof to, "/proc/self/fd/%d", other); T(get(other, 3)); T(write(other, "!", 1)); close(fd); close(other);
    fd = open("gone", O_RDWR | O_CREAT | O_EXCL, 0600); T(write(fd, "gone", 4)); T(unlink("gone")); T(fstat(fd, &st)); N(st.st_nlink); other = dup(fd); T(lseek(other, 0, SEEK_SET)); T(get(other, 5)); T(ftruncate(other, 2)); T(fstat(fd, &st)); N(st.st_size); close(fd); close(other);
    fd = open("file", O_RDONLY); T(rename("other", "file")); other = dup(fd); T(get(other, 20)); T(get(open("file", O_RDONLY), 20)); close(fd); close(other);
    T(open("file", O_RDONLY | O_CREAT | O_EXCL, 0600)); T(open("file", 0x40000000 | O_RDONLY)); T(open("file", O_ACCMODE)); closefrom(3); must(root = open(".", O_RDONLY | O_DIRECTORY), "root");
    N(open("file", O_RDONLY)); N(open("dir/inner", O_RDONLY)); T(close_range(4, 5, 0)); T(get(4, 2)); T(close_range(4, 3, 0)); fd = open("file", O_RDONLY); T(close_range(fd, fd, CLOSE_RANGE_CLOEXEC)); N(fcntl(fd, F_GETFD)); T(get(fd, 3)); close(fd);
    tree(root, 0);
}

static void processes(void) {
    fresh();
    int fd = open("file", O_RDWR), other; char text[100] = "";
    T(get(fd, 2)); fflush(stdout);
    pid_t child = fork();
    if (!child) { T(get(fd, 2)); T(write(fd, "C", 1)); T(access("dir/inner", F_OK)); file("child", "was here"); T(unlink("hard")); T(mkdir("childs", 0700)); fflush(stdout); _exit(7); }
    N(wait_for(child)); T(lseek(fd, 0, SEEK_CUR)); T(get(fd, 3)); T(access("child", R_OK)); T(access("hard", F_OK)); T(rmdir("childs"));
    close(fd);
    fd = open("file", O_RDONLY); T(get(fd, 1)); N(run("head -c 3 <&$1; test -e /proc/self/fd/$1 && echo there", fd)); T(lseek(fd, 0, SEEK_CUR)); close(fd);
    fd = open("file", O_RDONLY | O_CLOEXEC); T(get(fd, 1)); N(run("test -e /proc/self/fd/$1 || echo closed; echo more >more; cat more", fd)); T(stat("more", &st)); N(st.st_size); close(fd);
    fd = open("appended", O_WRONLY | O_CREAT | O_TRUNC, 0644); T(write(fd, "one ", 4)); fflush(stdout); N(system("cat dir/inner; echo two >>appended")); T(write(fd, "ONE", 3)); close(fd);
    fd = open("file", O_RDONLY); T(get(fd, 2)); fflush(stdout); child = vfork(); if (!child) { dup2(fd, 0); execl("/bin/cat", "cat", NULL); _exit(127); } N(wait_for(child)); T(get(fd, 2)); close(fd);
    posix_spawn_file_actions_t actions; posix_spawn_file_actions_init(&actions); fd = open("dir/inner", O_RDONLY); T(get(fd, 2)); posix_spawn_file_actions_adddup2(&actions, fd, 0);
    posix_spawn_file_actions_addopen(&actions, 1, "spawned", O_WRONLY | O_CREAT, 0600); char *words[] = { "cat", NULL }; extern char **environ; fflush(stdout);
    N(posix_spawnp(&child, "cat", &actions, NULL, words, environ)); N(wait_for(child)); close(fd); T(stat("spawned", &st)); N(st.st_size);
    // Programs that run are not written to.
    T(system("cp /bin/sleep sleeps && chmod 755 sleeps")); char *sleeps[] = { "sleeps", "100", NULL }; T(posix_spawn(&child, "./sleeps", NULL, NULL, sleeps, environ)); T(open("sleeps", O_WRONLY)); T(open("sleeps", O_RDWR | O_TRUNC)); T(creat("sleeps", 0600)); T(stat("sleeps", &st)); N(st.st_size > 1000);
    T(kill(child, SIGKILL)); N(wait_for(child)); fd = open("sleeps", O_RDWR); N(posix_spawn(&child, "./sleeps", NULL, NULL, sleeps, environ)); close(fd); T(unlink("sleeps"));
    // A child that closes everything, as daemons do, and goes on.
    fd = open("file", O_RDWR); T(get(fd, 1)); fflush(stdout); child = fork();
    if (!child) { for (int i = 3; i < 1000; i++) close(i); other = open("daemon", O_RDWR | O_CREAT, 0600); write(other, "alive", 5); _exit(other == 3 && unlink("dir/inner") == 0 ? 0 : 9); }
    N(wait_for(child)); T(get(fd, 1)); close(fd); T(access("dir/inner", F_OK)); T(stat("daemon", &st)); N(st.st_size);
    // vfork's child changes what is its own.
    umask(022); child = vfork(); if (!child) { umask(0777); chdir("/"); _exit(0); } N(wait_for(child)); T(mkdir("masked", 0777)); T(stat("masked", &st)); N(st.st_mode & 07777); T(access("file", F_OK));
    snprintf(text, sizeof text, "%.90s/nowhere", base); T(execl(text, text, NULL)); T(access("file", F_OK)); fd = open("file", O_RDONLY); T(execl(text, text, NULL)); T(get(fd, 2)); close(fd);
    tree(root, 0);
}

static void list_of(DIR *list, int most) {
    char *names[1000]; int count = 0;
    for (struct dirent *e; count < most && (e = readdir(list));) { char *text = malloc(300); snprintf(text, 300, "%s:%d", e->d_name, e->d_type); names[count++] = text; }
    qsort(names, count, sizeof *names, entry_order);
    for (int i = 0; i < count; i++) { printf(" %s", names[i]); free(names[i]); }
    printf(" (%d)\n", count);
}

static int visited(const char *path, const struct stat *s, int kind, struct FTW *ftw) { (void)s; (void)path; static int count; count += kind == FTW_F || ftw->level; return 0; }

static void streams(void) {
    fresh();
    DIR *list = opendir("."), *second; list_of(list, 999); rewinddir(list); file("added", "x"); unlink("file"); rewinddir(list); list_of(list, 999);
    rewinddir(list); long at = telldir(list); struct dirent *e = readdir(list); char first[300], then[300]; strcpy(first, e->d_name); long next = telldir(list); strcpy(then, readdir(list)->d_name);
    seekdir(list, next); N(strcmp(readdir(list)->d_name, then)); seekdir(list, at); N(strcmp(readdir(list)->d_name, first));
    int fd = dirfd(list); T(fd); T(fstat(fd, &st)); N(S_ISDIR(st.st_mode)); T(openat(fd, "added", O_RDONLY)); T(faccessat(fd, "dir/inner", F_OK, 0)); T(fchdir(fd)); T(access("added", F_OK)); T(closedir(list)); T(fstat(fd, &st));
    list = opendir("dir"); second = opendir("dir"); readdir(list); list_of(second, 999); T(closedir(second)); T(unlink("dir/inner")); T(rmdir("dir/sub")); T(rmdir("dir")); T(closedir(list)); T(opendir("dir") ? 0 : -1);
    mkdir("many", 0755); char name[100]; for (int i = 0; i < 700; i++) { snprintf(name, sizeof name, "many/a-name-that-is-not-that-short-%d", i); T(close(creat(name, 0600))); }
    list = opendir("many"); int count = 0; while ((e = readdir(list))) if (e->d_name[0] != '.') { snprintf(name, sizeof name, "many/%.80s", e->d_name); count += unlink(name) == 0; } N(count); T(closedir(list)); T(rmdir("many"));
    list = opendir("."); readdir(list); readdir(list); fflush(stdout); pid_t child = fork();
    if (!child) { count = 0; while (readdir(list)) count++; closedir(list); printf("rest %d\n", count); list_of(opendir("empty"), 99); fflush(stdout); _exit(0); } N(wait_for(child)); count = 0; while (readdir(list)) count++; N(count); closedir(list);
    list = opendir("."); struct dirent room, *result = NULL; N(readdir_r(list, &room, &result)); N(result == &room); while (!readdir_r(list, &room, &result) && result); N(result == NULL); closedir(list);
    struct dirent **found; N(scandir("empty", &found, NULL, alphasort)); glob_t matches; N(glob("*", 0, NULL, &matches)); N(matches.gl_pathc); N(nftw(".", visited, 9, FTW_PHYS));
    fd = open("empty", O_RDONLY | O_DIRECTORY); list = fdopendir(fd); list_of(list, 9); T(closedir(list)); T(close(fd)); fd = open("other", O_RDONLY); T(fdopendir(fd) ? 0 : -1); T(get(fd, 3)); close(fd);
    T(opendir("other") ? 0 : -1); T(opendir("") ? 0 : -1);
}

static void places(void) {
    fresh();
    char here[PATH_MAX];
    T(chdir("dir")); S("in", getcwd(here, sizeof here) + strlen(base)); T(access("inner", F_OK)); T(stat("../file", &st)); T(mkdir("made", 0755)); T(chdir("made")); T(chdir("..")); T(access("inner", F_OK));
    T(rename("../dir", "../renamed")); T(access("inner", F_OK)); T(unlink("inner")); S("in", getcwd(here, sizeof here) + strlen(base)); T(mkdir("after", 0755)); T(access("../renamed/after", F_OK));
    T(chdir("after")); T(rmdir("../after")); T(open("new", O_RDWR | O_CREAT, 0600)); T(mkdir("x", 0755)); T(stat(".", &st)); T(opendir(".") ? 0 : -1); T(access("..", F_OK)); S("in", getcwd(here, sizeof here) ? "somewhere" : strerrorname_np(errno));
    T(fchdir(root)); T(access("file", F_OK)); T(chdir("/")); T(access("file", F_OK)); T(chdir(base)); T(chdir("t/linkdir")); T(chdir("t/linkdir/none")); T(access("t/file", F_OK)); fresh(); T(chdir("linkdir")); T(access("inner", F_OK)); S("in", getcwd(here, sizeof here) + strlen(base)); T(fchdir(root));
    // Another file system below, and the same one elsewhere.
    T(access("dir/inner", F_OK)); T(mount("none", "dir", "tmpfs", 0, "size=1m")); T(access("dir/inner", F_OK)); file("dir/above", "covered"); T(stat("dir/above", &st)); N(st.st_size); snprintf(here, sizeof here, "%.900s/t/dir/above", base); T(access(here, F_OK));
    T(rename("file", "dir/file")); T(rmdir("dir")); T(chdir("dir")); T(access("above", F_OK)); T(chdir("..")); T(umount("dir")); T(access("dir/above", F_OK)); T(access("dir/inner", F_OK)); T(access(here, F_OK));
    fflush(stdout); N(system("mount -t tmpfs none dir && echo by another >dir/above")); T(stat("dir/above", &st)); T(open("dir/inner", O_RDONLY)); N(system("umount dir")); T(access("dir/above", F_OK)); T(access("dir/inner", F_OK));
    T(mount("dir", "empty", NULL, MS_BIND, NULL)); T(access("empty/inner", F_OK)); file("empty/bound", "through"); T(access("dir/bound", F_OK)); T(link("empty/bound", "dir/linked")); T(rename("empty/bound", "dir/renamed")); T(mount(NULL, "empty", NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL)); T(creat("empty/no", 0600)); T(mkdir("empty/no", 0700)); T(close(creat("dir/yes", 0600))); T(chdir("empty")); T(access("inner", F_OK)); T(creat("no", 0600)); T(chdir("..")); T(umount("empty"));
    T(symlink(base, "absolute") + unlink("absolute")); T(symlink(base, "dir/../absolute")); T(access("absolute/t/file", F_OK)); T(rename("absolute/t/file", "file2")); T(access("file2", F_OK)); unlink("absolute");
    tree(root, 0);
}

static void limits_and_masks(void) {
    fresh();
    for (int i = 0; i < 3; i++) { int masks[] = { 0, 027, 0777 }; umask(masks[i]); unlink("masked"); rmdir("maskeddir"); T(open("masked", O_CREAT | O_WRONLY | O_EXCL, 0666)); T(mkdir("maskeddir", 01777)); umask(022); stat("masked", &st); N(st.st_mode); stat("maskeddir", &st); N(st.st_mode); }
    fflush(stdout); T(chown("dir", 3, 4)); T(chmod("dir", 02775)); T(mkdir("dir/inherits", 0755)); stat("dir/inherits", &st); N(st.st_mode); N(st.st_gid); T(close(creat("dir/created", 02755))); stat("dir/created", &st); N(st.st_mode); N(st.st_gid); N(st.st_uid);
    int fd = open("file", O_RDWR); signal(SIGXFSZ, SIG_IGN); struct rlimit old, limit; getrlimit(RLIMIT_FSIZE, &old); T(pwrite(fd, "a", 1, 100)); limit = old; limit.rlim_cur = 50; T(setrlimit(RLIMIT_FSIZE, &limit));
    T(pwrite(fd, "a", 1, 100)); T(ftruncate(fd, 200)); int other = open("limited", O_RDWR | O_CREAT, 0600); T(pwrite(other, "abcdef", 6, 47)); T(pwrite(other, "a", 1, 50)); T(setrlimit(RLIMIT_FSIZE, &old)); T(pwrite(fd, "a", 1, 150)); close(fd); close(other);
    getrlimit(RLIMIT_NOFILE, &old); limit = old; limit.rlim_cur = 12; T(setrlimit(RLIMIT_NOFILE, &limit)); int count = 0; while (open("file", O_RDONLY) >= 0) count++; printf("%d %s\n", count, strerrorname_np(errno)); T(opendir(".") ? 0 : -1); T(open("never", O_WRONLY | O_CREAT | O_EXCL, 0600)); T(access("never", F_OK)); T(access("file", F_OK)); T(mkdir("full", 0755));
    close_range(5, 11, 0); T(setrlimit(RLIMIT_NOFILE, &old));
    tree(root, 0);
}

static void as_another(const char *who) {
    printf("%s\n", who);
    T(open("private", O_RDONLY)); T(access("private", R_OK)); T(eaccess("private", R_OK)); T(open("hers", O_RDWR)); T(open("new", O_RDWR | O_CREAT, 0600)); T(unlink("file")); T(mkdir("mine", 0755)); T(rename("file", "file3")); T(open("dir/sub/x", O_RDONLY)); T(stat("dir/sub/x", &st)); T(opendir("dir/sub") ? 0 : -1); T(stat("file", &st)); T(link("private", "open/linked")); T(close(creat("open/hers", 0644))); T(stat("open/hers", &st)); N(st.st_uid); N(st.st_gid); T(unlink("open/roots")); T(open("open/roots", O_RDWR | O_CREAT, 0600));
}

static void identities(void) {
    fresh(); file("private", "private"); file("hers", "hers"); T(chmod("private", 0600)); T(chown("hers", 65534, 65534)); T(mkdir("open", 0755)); T(chmod("open", 01777)); file("open/roots", "root's"); file("dir/sub/x", "x"); T(chmod("dir/sub", 0700));
    as_another("root");
    T(seteuid(65534)); as_another("seteuid"); T(seteuid(0)); as_another("root again"); T(setegid(65534)); T(close(creat("group", 0664))); stat("group", &st); N(st.st_gid); T(setegid(0)); T(close(creat("group2", 0664))); stat("group2", &st); N(st.st_gid);
    fflush(stdout); pid_t child = fork(); if (!child) { T(setresgid(65534, 65534, 65534)); T(setresuid(65534, 65534, 65534)); as_another("for good"); fflush(stdout); _exit(0); } N(wait_for(child));
    child = fork(); if (!child) { T(chroot(".")); T(chdir("/")); T(access("/file3", F_OK)); T(open("/hers", O_RDONLY)); T(mkdir("/rooted", 0755)); T(access("rooted", F_OK)); fflush(stdout); _exit(0); } N(wait_for(child)); T(access("rooted", F_OK)); T(access("/rooted", F_OK));
    child = fork(); if (!child) { T(access("dir/inner", F_OK)); T(unshare(CLONE_NEWNS)); T(mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL)); T(mount("none", "dir", "tmpfs", 0, NULL)); T(access("dir/inner", F_OK)); T(close(creat("dir/hidden", 0600))); fflush(stdout); _exit(0); } N(wait_for(child)); T(access("dir/hidden", F_OK)); T(access("dir/inner", F_OK));
    // Files of others in a directory that all may write to: fs.protected_regular and its kind.
    file("open/theirs", "theirs"); chown("open/theirs", 1234, 1234); T(open("open/theirs", O_RDWR | O_CREAT, 0600)); T(open("open/theirs", O_RDWR)); symlink("../file3", "open/linkout"); lchown("open/linkout", 1234, 1234); T(open("open/linkout", O_RDONLY)); T(stat("open/linkout", &st));
    tree(root, 0);
}

int main(int argc, char **argv) {
    if (argc != 3 || !realpath(argv[1], base)) return 2;
    setvbuf(stdout, malloc(1 << 20), _IOFBF, 1 << 20);
    umask(022); root = -1; signal(SIGPIPE, SIG_IGN);
    if (atoi(argv[2]) == 0) { every_call(); every_pair(); }
    else { descriptors(); processes(); streams(); places(); limits_and_masks(); identities(); }
    chdir(base); nftw("t", removed, 20, FTW_DEPTH | FTW_PHYS);
    puts("to its end");
    return 0;
}
