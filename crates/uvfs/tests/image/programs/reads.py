"""Programs that read an image, while the server of its mount is replaced.

reads.py DIRECTORY SECONDS: exits with 0 if no call failed, and all was as at the beginning.
"""

import errno
import hashlib
import mmap
import os
import random
import stat
import sys
import threading
import time
import traceback

top = sys.argv[1]
end = time.monotonic() + float(sys.argv[2])
bad, rounds = [], {}


def contents(path):
    """Without what the kernel has cached of it."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    digest = hashlib.md5()
    while data := os.read(fd, 1 << 17):
        digest.update(data)
    os.close(fd)
    return digest.hexdigest()


def facts(path):
    found = os.lstat(path)
    all = [found.st_ino, found.st_mode, found.st_nlink, found.st_size, found.st_blocks, found.st_mtime_ns]
    names = sorted(os.listxattr(path, follow_symlinks=False))
    all += [(name, os.getxattr(path, name, follow_symlinks=False)) for name in names]
    if stat.S_ISREG(found.st_mode):
        all.append(contents(path))
    if stat.S_ISLNK(found.st_mode):
        all.append(os.readlink(path))
    return all


def tree():
    found = {}
    for at, directories, files in os.walk(top):
        for name in directories + files:
            path = os.path.join(at, name)
            found[path] = facts(path)
    return found


def walks(_):
    assert tree() == before


def listed():
    names = []
    with os.scandir(os.path.join(top, "many")) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) % 40 == 0:
                time.sleep(0.01)
    return names


def lists(_):
    """A listing goes on where it was."""
    assert listed() == listing


def missing(i):
    try:
        os.lstat(os.path.join(top, "missing-%d" % i))
    except OSError as error:
        assert error.errno == errno.ENOENT
        return
    assert False


def reads(flags):
    """Through one descriptor, all the time."""
    fd = os.open(os.path.join(top, "a/data"), os.O_RDONLY | flags)
    memory = mmap.mmap(-1, 4096)

    def step(_):
        at = random.randrange(len(data) // 4096) * 4096
        assert os.preadv(fd, [memory], at) == 4096
        assert memory[:] == data[at : at + 4096]

    return step


def mapped():
    fd = os.open(os.path.join(top, "a/data"), os.O_RDONLY)

    def step(_):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
            assert memory[:] == data

    return step


def run(name, step):
    i = 0
    try:
        while time.monotonic() < end:
            step(i)
            i += 1
    except BaseException:
        traceback.print_exc()
        bad.append(name)
    rounds[name] = i


with open(os.path.join(top, "a/data"), "rb") as file:
    data = file.read()
before, listing = tree(), listed()
steps = {
    "walks": walks,
    "lists": lists,
    "missing": missing,
    "reads": reads(0),
    "direct": reads(os.O_DIRECT),
    "mapped": mapped(),
}
threads = [threading.Thread(target=run, args=one) for one in steps.items()]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("%d files, rounds %s, bad %s" % (len(before), rounds, bad))
sys.exit(bool(bad) or min(rounds.values()) == 0)
