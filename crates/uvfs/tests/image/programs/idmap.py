"""idmap.py FROM AT: mounts FROM at AT once more, with users and groups from 0 on shown from 100000 on."""

import ctypes
import os
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER, OPEN_TREE_CLONE, AT_EMPTY_PATH, MOVE_MOUNT_F_EMPTY_PATH = 0x10000000, 1, 0x1000, 4
MOUNT_ATTR_IDMAP = 0x00100000
# The same on every architecture that uvfs runs on.
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
AT_FDCWD = -100


def check(result, what):
    if result < 0:
        sys.exit(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


ready, ready_child = os.pipe()
done_child, done = os.pipe()
child = os.fork()
if child == 0:
    os.close(done)
    check(libc.unshare(CLONE_NEWUSER), "unshare")
    os.write(ready_child, b"x")
    os.read(done_child, 1)
    os._exit(0)
os.close(ready_child)
assert os.read(ready, 1) == b"x"
for name in ["uid_map", "gid_map"]:
    with open(f"/proc/{child}/{name}", "w") as ids:
        ids.write("0 100000 100000\n")
users = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
source, at = (path.encode() for path in sys.argv[1:])
tree = check(libc.syscall(OPEN_TREE, AT_FDCWD, source, OPEN_TREE_CLONE), "open_tree")
attributes = struct.pack("QQQQ", MOUNT_ATTR_IDMAP, 0, 0, users)
size = ctypes.c_size_t(len(attributes))
check(libc.syscall(MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attributes, size), "mount_setattr")
check(libc.syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, at, MOVE_MOUNT_F_EMPTY_PATH), "move_mount")
os.close(done)
os.waitpid(child, 0)
