"""Programs that know what their calls have to give, while the server of the mount is replaced.

outlives.py DIRECTORY SECONDS [WITHOUT,...]: exits with 0 if no call failed, nothing acknowledged was lost, and nothing was
done twice. Prints the longest call in milliseconds. WITHOUT are programs, or "links", "symlinks" and "fifos", that the file
system does not have.
"""

import ctypes
import fcntl
import mmap
import os
import random
import sqlite3
import subprocess
import sys
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


INSIDE = """
import os, sys, time
os.chdir(sys.argv[1])
while True:
    os.stat("."), os.listdir("."), os.close(os.open("beside", os.O_CREAT)), time.sleep(0.005)
"""


def run(name, step):
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
    rounds[name] = i


# What takes a few short calls.
QUICK = ("attributes", "append0", "append1")

for name in ("many", "inside"):
    os.mkdir(path(name))
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
    "mapped": mapped(),
    "lists": lists,
    "locks0": locks,
    "locks1": locks,
    "large": large,
}
steps = {name: step for name, step in steps.items() if name not in without}
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
print("longest %.1f ms, rounds %s, bad %s" % (1000 * longest[0], rounds, bad))
sys.exit(bool(bad) or min(rounds.values()) == 0)
