"""Reads a file through a mapping and by calls, while the host changes it.

hot.py SOURCE MOUNT SECONDS: the file `hot` of 4 MiB is in the source.
"""

import mmap
import os
import random
import sys
import threading
import time

source, mount = sys.argv[1:3]
end = time.monotonic() + float(sys.argv[3])


def place():
    return random.randrange(1000) * 4096


def changes():
    fd = os.open(source + "/hot", os.O_RDWR)
    while time.monotonic() < end:
        os.pwrite(fd, os.urandom(64), place())
        time.sleep(0.0003)


def reads():
    fd = os.open(mount + "/hot", os.O_RDONLY)
    memory = mmap.mmap(fd, 4 << 20, prot=mmap.PROT_READ)
    while time.monotonic() < end:
        memory[place()]
        assert len(os.pread(fd, 4096, place())) == 4096


threads = [threading.Thread(target=run) for run in (changes, changes, reads, reads, reads)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
