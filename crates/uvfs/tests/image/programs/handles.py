"""handles.py ROOT PATH...: opens paths by their handles after the kernel has dropped what it has cached."""

import ctypes
import os
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD, ROOM = -100, 128
root = os.open(sys.argv[1], os.O_RDONLY)
handles = []
for path in sys.argv[2:]:
    handle = ctypes.create_string_buffer(struct.pack("Ii", ROOM, 0), 8 + ROOM)
    mount = ctypes.c_int()
    name = os.path.join(sys.argv[1], path).encode()
    if libc.name_to_handle_at(AT_FDCWD, name, handle, ctypes.byref(mount), 0):
        sys.exit(f"{path}: name_to_handle_at: {os.strerror(ctypes.get_errno())}")
    handles.append(handle)
with open("/proc/sys/vm/drop_caches", "w") as caches:
    caches.write("2")
for path, handle in zip(sys.argv[2:], handles):
    file = libc.open_by_handle_at(root, handle, os.O_RDONLY)
    if file < 0:
        sys.exit(f"{path}: open_by_handle_at: {os.strerror(ctypes.get_errno())}")
    what = os.fstat(file)
    where = os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), sys.argv[1])
    print(path, where, oct(what.st_mode), what.st_ino, what.st_size)
