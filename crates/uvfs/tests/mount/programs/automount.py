"""Plays systemd's part for a mount point with x-systemd.automount.

Mounts autofs on a directory, has another process look at a file there, mounts with uvfs from its own process
group when the kernel asks for it, and prints what the other process read.

    automount.py UVFS SOURCE MOUNTPOINT
"""

import ctypes
import fcntl
import os
import struct
import subprocess
import sys

READY, FAIL = 0x9360, 0x9361  # AUTOFS_IOC_READY, AUTOFS_IOC_FAIL (linux/auto_fs.h)
PACKET = 304  # struct autofs_v5_packet

uvfs, source, at = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
requests, pipe = os.pipe()
options = f"fd={pipe},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct"
if libc.mount(b"automount", at.encode(), b"autofs", 0, options.encode()):
    sys.exit("mounting autofs: " + os.strerror(ctypes.get_errno()))
try:
    os.close(pipe)
    root = os.open(at, os.O_RDONLY | os.O_DIRECTORY)
    reader = subprocess.Popen(
        ["timeout", "60", "cat", at + "/file"], stdout=subprocess.PIPE, start_new_session=True
    )
    # Its wait_queue_token follows two integers.
    (token,) = struct.unpack_from("=I", os.read(requests, PACKET), 8)
    done = FAIL
    try:
        if subprocess.run([uvfs, "mount", source, at], timeout=30).returncode == 0:
            done = READY
    finally:
        fcntl.ioctl(root, done, token)
    print(reader.communicate()[0].decode(), end="")
    subprocess.run([uvfs, "umount", at])
    os.close(root)
finally:
    subprocess.run(["umount", "--lazy", at])
