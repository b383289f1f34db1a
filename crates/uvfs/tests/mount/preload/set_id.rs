//! Programs and files with set-id bits: the loader leaves the library out of such a program, and a write takes
//! the bits away.

use std::fs;
use std::process::Command;

use super::*;

/// Says whose rights it has and whether the library is in it, reads and writes descriptor 3, and tries to open
/// a file of another user.
const HELPER: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>
static int look(struct dl_phdr_info *info, size_t size, void *found) {
    (void)size;
    if (strstr(info->dlpi_name, "uvfs_preload")) *(int *)found = 1;
    return 0;
}
int main(int argc, char **argv) {
    (void)argc;
    char had[7] = "";
    int found = 0, n = pread(3, had, 6, 4002), wrote = pwrite(3, "helper", 6, 10);
    dl_iterate_phdr(look, &found);
    int other = open(argv[1], O_RDONLY);
    printf("%d %d secure %lu library %d read %d %s wrote %d other %s\n", getuid(), geteuid(),
           getauxval(AT_SECURE), found, n, had, wrote, other < 0 ? strerror(errno) : "open");
    return 0;
}
"#;

/// Runs the helper, which it writes itself, with a file that it has written to; then writes to files with
/// set-id bits as root, as another user, and as a user who was root when the file was opened.
const SCRIPT: &str = r##"
import os, subprocess, sys
os.chdir(sys.argv[1])
program = open(sys.argv[2], "rb").read()
helper = os.open("helper", os.O_CREAT | os.O_WRONLY, 0o755)
for at in range(0, len(program), 4096): os.pwrite(helper, program[at:at + 4096], at)
os.fchown(helper, 65534, 65534); os.fchmod(helper, 0o4755); os.close(helper)
other = os.open("other", os.O_CREAT | os.O_WRONLY, 0o600); os.write(other, b"other")
data = os.open("data", os.O_CREAT | os.O_RDWR, 0o600)
for at in range(0, 6000, 6): os.pwrite(data, b"parent", at)
os.dup2(data, 3, inheritable=True)
print(subprocess.run(["./helper", "other"], pass_fds=[3], stdout=subprocess.PIPE, text=True).stdout)
print(os.pread(data, 30, 0), os.pread(3, 6, 5994), os.fstat(data).st_size)

def file(name, mode):
    fd = os.open(name, os.O_CREAT | os.O_RDWR, 0o644)
    os.pwrite(fd, b"before" * 100, 0); os.pread(fd, 6, 0)
    os.fchown(fd, 65534, 65534); os.fchmod(fd, mode)
    return fd
def mode(name): return name, oct(os.stat(name).st_mode), open(name, "rb").read()[:8]
def as_another(work):
    sys.stdout.flush()
    if os.fork() == 0:
        os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
        work(); sys.stdout.flush(); os._exit(0)
    assert os.wait()[1] == 0
def writes(fd):
    for at in range(3): os.pwrite(fd, b"x", at)
for bits in (0o6755, 0o2745, 0o4644):
    name = oct(bits)
    writes(file("root" + name, bits)); print(mode("root" + name))
    before = file("opened-before" + name, bits)
    as_another(lambda: (writes(before), print(mode("opened-before" + name))))
    file("opened-after" + name, bits)
    as_another(lambda: (writes(os.open("opened-after" + name, os.O_RDWR)), print(mode("opened-after" + name))))
    cut = file("cut" + name, bits)
    as_another(lambda: (os.ftruncate(cut, 3), print(mode("cut" + name))))
    print(*(mode(kind + name) for kind in ("root", "opened-before", "opened-after", "cut")))
"##;

/// A set-user-id program under `uvfs run` has its privileges, and sees what its caller has written. A write clears
/// the set-id bits, so that its writer makes no program of another user's.
#[test]
fn programs_with_privileges_and_writes_that_take_them_away() {
    if !can() || !has(&["python3", "cc"].map(Need::Program)) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev).option("suid"));
    let (source, helper) = (
        served.scratch.path("helper.c"),
        served.scratch.path("helper"),
    );
    fs::write(&source, HELPER).unwrap();
    run(Command::new("cc").arg("-o").arg(&helper).arg(&source)).ok();
    let host = served.scratch.dir("host");
    let python = |mut command: Command, at: &Path| {
        command.args(["-c", SCRIPT]).arg(at).arg(&helper);
        served.mount.run(&mut command)
    };
    let on_host = python(Command::new("python3"), &host).ok();
    let expected = "0 65534 secure 1 library 0 read 6 parent wrote 6 other Permission denied\n";
    assert!(on_host.starts_with(expected), "{on_host}");
    assert!(
        on_host.contains("('opened-after0o6755', '0o100755', b'xxx"),
        "{on_host}"
    );
    let mut command = uvfs_run(How::Eager);
    command.args(["--", "python3"]);
    let outcome = python(command, &served.mount.at);
    assert!(
        outcome.status.success() && served_any(&outcome),
        "{outcome}"
    );
    assert_eq!(outcome.stdout, on_host, "{outcome}");
}
