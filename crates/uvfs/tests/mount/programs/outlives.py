"""Programs that know what their calls have to give, while the server of the mount is replaced.

outlives.py DIRECTORY SECONDS [WITHOUT,... [full]]: exits with 0 if no call failed, nothing acknowledged was lost, and nothing
was done twice. Prints the longest call in milliseconds. WITHOUT are programs, or "links", "symlinks" and "fifos", that the file
system does not have. With `full`, git, make, fio and tail run beside.
"""

import ctypes
import fcntl
import mmap
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import traceback

libc = ctypes.CDLL(None, use_errno=True)
top = sys.argv[1]
without = sys.argv[3].split(",") if len(sys.argv) > 3 else []
bad, rounds, longest = [], {}, [0.0]


def path(name):
    return os.path.join(top, name)


def checked(result):
    if result:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))


def write(name, data):
    with open(path(name), "wb") as file:
        file.write(data)


def read(name):
    with open(path(name), "rb") as file:
        return file.read()


def appends(n):
    """Two descriptors append to one file: each acknowledged line is there once, in order."""
    fd = os.open(path("appended"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def step(i):
        line = b"%d:%08d\n" % (n, i)
        assert os.write(fd, line) == len(line)
        appended[n].append(line)

    return step


appended = [[], []]


def commits(i):
    db = sqlite3.connect(path("db"), timeout=60)
    db.execute("create table if not exists t(n)")
    db.execute("insert into t values(?)", (i,))
    db.commit()
    db.close()


def names(i):
    """Each change of a name is made once."""
    name = "n%d" % i
    fd = os.open(path(name), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND, 0o400)
    os.write(fd, b"one")
    os.write(fd, b"two")
    os.close(fd)
    os.rename(path(name), path(name + "r"))
    assert read(name + "r") == b"onetwo"
    os.mkdir(path(name + "d"))
    if "symlinks" not in without:
        os.symlink("target", path(name + "s"))
        os.unlink(path(name + "s"))
    if "links" not in without:
        os.link(path(name + "r"), path(name + "l"))
        assert os.stat(path(name + "l")).st_nlink == 2
        os.unlink(path(name + "l"))
    os.rmdir(path(name + "d"))
    if "fifos" not in without:
        os.mkfifo(path(name + "p"))
        os.unlink(path(name + "p"))
    os.unlink(path(name + "r"))


def exchanges(i):
    """renameat2(2) with RENAME_EXCHANGE, which a second time would undo, and RENAME_NOREPLACE, which would fail."""
    checked(libc.renameat2(-100, path("xa").encode(), -100, path("xb").encode(), 2))
    assert read("xa") + read("xb") == (b"BA" if i % 2 == 0 else b"AB")
    write("x1", b"%d" % i)
    checked(libc.renameat2(-100, path("x1").encode(), -100, path("x2").encode(), 1))
    assert read("x2") == b"%d" % i
    os.unlink(path("x2"))


def attributes(i):
    os.setxattr(path("attributes"), "user.a", b"%d" % i, os.XATTR_CREATE)
    assert os.getxattr(path("attributes"), "user.a") == b"%d" % i
    os.removexattr(path("attributes"), "user.a")


def unnamed(i):
    """A file without a name, which gets one later, and a file that has lost its name."""
    fd = os.open(top, os.O_TMPFILE | os.O_RDWR)
    os.write(fd, b"unnamed")
    time.sleep(0.02)
    assert os.pread(fd, 20, 0) == b"unnamed"
    name = path("t%d" % i).encode()
    checked(libc.linkat(-100, b"/proc/self/fd/%d" % fd, -100, name, 0x400))
    os.unlink(name)
    time.sleep(0.02)
    assert os.pread(fd, 20, 0) == b"unnamed"
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)


def replaces(i):
    """A file that is open loses its name to another one, and keeps its contents."""
    write("replaced", b"old%d" % i)
    fd = os.open(path("replaced"), os.O_RDWR)
    write("replacing", b"new%d" % i)
    os.rename(path("replacing"), path("replaced"))
    assert os.pread(fd, 20, 0) == b"old%d" % i
    assert os.pwrite(fd, b"OLD", 0) == 3
    time.sleep(0.02)
    assert os.pread(fd, 20, 0) == b"OLD%d" % i
    assert read("replaced") == b"new%d" % i
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)


def mapped():
    fd = os.open(path("mapped"), os.O_CREAT | os.O_RDWR)
    os.truncate(fd, 1 << 20)
    memory = mmap.mmap(fd, 1 << 20)

    def step(i):
        at, data = random.randrange(255) * 4096, b"%016d" % i
        memory[at : at + 16] = data
        memory.flush(at, 4096)
        assert os.pread(fd, 16, at) == data

    return step


def lists(_):
    """A listing goes on where it was."""
    with os.scandir(path("many")) as entries:
        seen = []
        for entry in entries:
            seen.append(entry.name)
            if len(seen) % 300 == 0:
                time.sleep(0.01)
    assert len(seen) == len(set(seen)) == 1000, (len(seen), len(set(seen)))


counted = [0]


def locks(_):
    """Two threads count under a lock of the file."""
    with open(path("lock"), "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        now = int(file.read() or b"0")
        time.sleep(0.001)
        os.pwrite(file.fileno(), b"%d" % (now + 1), 0)
        counted[0] += 1


def large(i):
    """Writes in large pieces, with and without O_DIRECT."""
    flags = os.O_CREAT | os.O_RDWR | os.O_TRUNC | (os.O_DIRECT if i % 2 else 0)
    fd = os.open(path("large"), flags)
    data = mmap.mmap(-1, 1 << 18)
    data.write(bytes([1 + i % 200]) * (1 << 18))
    for piece in range(8):
        assert os.pwrite(fd, data, piece << 18) == 1 << 18
    back = mmap.mmap(-1, 1 << 18)
    for piece in range(8):
        assert os.preadv(fd, [back], piece << 18) == 1 << 18
        assert back[:] == data[:]
    os.close(fd)


def runs(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout


def git(*words):
    return runs("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "gc.auto=0", *words)


def clones(origin):
    """A repository is cloned, changed, collected and checked."""
    for n in range(150):
        with open(os.path.join(origin, "f%d" % n), "w") as file:
            file.write("line %d\n" % n * (n + 1))
    git("init", "-q", origin)
    git("-C", origin, "add", ".")
    git("-C", origin, "commit", "-qm", "one")

    def step(i):
        clone = path("clone")
        git("clone", "-q", "--no-local", origin, clone)
        write("clone/f0", b"%d" % i)
        git("-C", clone, "commit", "-qam", "two")
        git("-C", clone, "gc", "--quiet", "--prune=now")
        git("-C", clone, "fsck", "--full", "--strict")
        assert git("-C", clone, "status", "--porcelain") == ""
        shutil.rmtree(clone)

    return step


MAKEFILE = """
objects := $(patsubst %.c,%.o,$(wildcard *.c))
all: program
program: $(objects)
\tcc -o $@ $(objects)
clean:
\trm -f program *.o
"""


def builds():
    os.mkdir(path("tree"))
    write("tree/Makefile", MAKEFILE.encode())
    for n in range(40):
        write("tree/f%d.c" % n, b"int f%d(void) { return %d; }\n" % (n, n))
    calls = "+".join("f%d()" % n for n in range(40))
    declared = " ".join("int f%d(void);" % n for n in range(40))
    write("tree/main.c", ("#include <stdio.h>\n%s int main(void) { return !printf(\"%%d\", %s); }" % (declared, calls)).encode())

    def step(i):
        runs("make", "-s", "-j2", "-C", path("tree"), "all")
        assert runs(path("tree/program")) == str(sum(range(40)))
        runs("make", "-s", "-C", path("tree"), "clean")

    return step


def verifies(i):
    how = ("--ioengine=psync", "--ioengine=libaio", "--ioengine=mmap")[i % 3]
    words = "--name=v --size=16m --rw=randrw --bs=4k-64k --verify=crc32c --verify_fatal=1 --verify_state_save=0 --iodepth=8"
    direct = "--direct=%d" % (i % 3 == 1)
    runs("fio", how, direct, "--filename=" + path("fio"), *words.split())


def follows(output):
    """Each line that is appended is seen by `tail -f`."""
    write("log", b"")
    tail = subprocess.Popen(["tail", "-f", "-n", "+1", "-s", "0.1", path("log")], stdout=output)

    def step(i):
        if i < 0:
            tail.kill()
            return tail.wait()
        with open(path("log"), "ab") as file:
            file.write(b"%d\n" % i)
        time.sleep(0.005)

    return step


INSIDE = """
import os, sys, time
os.chdir(sys.argv[1])
while True:
    os.stat("."), os.listdir("."), os.close(os.open("beside", os.O_CREAT)), time.sleep(0.005)
"""


def run(name, step):
    global end
    i = 0
    try:
        while time.monotonic() < end:
            began = time.monotonic()
            step(i)
            longest[0] = max(longest[0], time.monotonic() - began) if name in QUICK else longest[0]
            i += 1
    except BaseException:
        traceback.print_exc()
        bad.append(name)
        end = 0
    rounds[name] = i


# What takes a few short calls.
QUICK = ("attributes", "append0", "append1")

for name in ("many", "inside"):
    os.mkdir(path(name))
if "lists" not in without:
    for i in range(1000):
        write("many/%d" % i, b"")
write("xa", b"A")
write("xb", b"B")
write("attributes", b"")
write("lock", b"")
inside = subprocess.Popen([sys.executable, "-c", INSIDE, path("inside")])
steps = {
    "append0": appends(0),
    "append1": appends(1),
    "commits": commits,
    "names": names,
    "exchanges": exchanges,
    "attributes": attributes,
    "unnamed": unnamed,
    "replaces": replaces,
    "mapped": mapped(),
    "lists": lists,
    "locks0": locks,
    "locks1": locks,
    "large": large,
}
steps = {name: step for name, step in steps.items() if name not in without}
if sys.argv[4:] == ["full"]:
    aside = tempfile.mkdtemp()
    os.mkdir(os.path.join(aside, "origin"))
    seen = open(os.path.join(aside, "seen"), "w+b")
    more = {
        "clones": clones(os.path.join(aside, "origin")),
        "builds": builds(),
        "verifies": verifies,
        "follows": follows(seen),
    }
    steps.update(more)
end = time.monotonic() + float(sys.argv[2])
threads = [threading.Thread(target=run, args=one) for one in steps.items()]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if inside.poll() is not None:
    bad.append("inside")
inside.kill()
inside.wait()
lines = read("appended").splitlines(True)
for n in 0, 1:
    if [line for line in lines if line.startswith(b"%d:" % n)] != appended[n]:
        bad.append("appended %d" % n)
if int(read("lock")) != counted[0]:
    bad.append("counted %s, has %s" % (counted[0], read("lock")))
db = sqlite3.connect(path("db"))
if db.execute("select count(*) from t").fetchone()[0] != rounds["commits"]:
    bad.append("committed")
if db.execute("pragma integrity_check").fetchone()[0] != "ok":
    bad.append("integrity")
db.close()
if "follows" in steps:
    late = time.monotonic() + 30
    while os.fstat(seen.fileno()).st_size < os.stat(path("log")).st_size and time.monotonic() < late:
        time.sleep(0.1)
    steps["follows"](-1)
    seen.seek(0)
    if seen.read() != b"".join(b"%d\n" % i for i in range(rounds["follows"])):
        bad.append("followed")
    shutil.rmtree(aside)
print("longest %.1f ms, rounds %s, bad %s" % (1000 * longest[0], rounds, bad))
sys.exit(bool(bad) or min(rounds.values()) == 0)
