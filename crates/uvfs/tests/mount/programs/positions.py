# Positions, appends, sizes and mappings: each call gives what the kernel gives.
import os, sys, fcntl, mmap, subprocess
def check(a, b):
    if a != b: raise SystemExit(f"{a!r} is not {b!r} in line {sys._getframe(1).f_lineno}")
data = bytes(range(256)) * 400
fd = os.open("file", os.O_RDWR | os.O_CREAT, 0o644)
check(os.write(fd, data), len(data))
check(os.lseek(fd, 0, os.SEEK_CUR), len(data))
os.lseek(fd, 10, os.SEEK_SET)
# dup: one position.
other = os.dup(fd)
check(os.read(fd, 5), data[10:15]); check(os.read(other, 5), data[15:20])
check(os.lseek(fd, 0, os.SEEK_CUR), 20)
third = os.dup2(other, 100)
check(os.read(third, 4), data[20:24]); os.close(other)
check(os.read(fd, 4), data[24:28])
fourth = fcntl.fcntl(fd, fcntl.F_DUPFD, 50)
check(os.read(fourth, 4), data[28:32])
# dup before the first use.
a = os.open("file", os.O_RDONLY); b = os.dup(a)
check(os.read(b, 3), data[:3]); check(os.read(a, 3), data[3:6]); os.close(a); check(os.read(b, 3), data[6:9])
# fork: still one, both ways.
r, w = os.pipe()
pid = os.fork()
if pid == 0:
    ok = os.read(fd, 8) == data[32:40] and os.pread(fd, 5, 1000) == data[1000:1005]
    os.write(w, b"y" if ok else b"n"); os._exit(0)
os.waitpid(pid, 0)
check(os.read(r, 1), b"y")
check(os.read(fd, 8), data[40:48])
# A child's write is the parent's to see, and a child writes through a session of its own.
pid = os.fork()
if pid == 0:
    mine = os.open("child", os.O_RDWR | os.O_CREAT)
    for i in range(100): os.write(mine, b"%03d\n" % i)
    os.pwrite(fd, b"child was here", 5000); os._exit(0)
os.waitpid(pid, 0)
check(os.pread(fd, 14, 5000), b"child was here")
check(open("child", "rb").read(), b"".join(b"%03d\n" % i for i in range(100)))
# Another program goes on where we are.
one = os.open("file", os.O_RDONLY); os.read(one, 256)
out = subprocess.run(["head", "-c", "16"], stdin=one, stdout=subprocess.PIPE).stdout
check(out, data[256:272])
# Appending: to the end, whichever descriptor made it longer.
log = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
plain = os.open("log", os.O_RDWR)
for i in range(10):
    os.write(log, b"append\n"); os.lseek(plain, 0, os.SEEK_END); os.write(plain, b"plain\n")
check(os.path.getsize("log"), 130); os.pwrite(log, b"x", 0)
check(open("log", "rb").read(), b"append\nplain\n" * 10 + b"x")
fcntl.fcntl(plain, fcntl.F_SETFL, os.O_APPEND)
os.lseek(plain, 0, os.SEEK_SET); os.write(plain, b"end")
check(os.path.getsize("log"), 134)
# Sizes, holes, vectors, and what is refused.
f = os.open("sparse", os.O_RDWR | os.O_CREAT)
os.pwrite(f, b"far", 1 << 20); check(os.fstat(f).st_size, (1 << 20) + 3)
os.ftruncate(f, 100); check(os.stat("sparse").st_size, 100)
check(os.pwritev(f, [b"ab", b"cd"], 98), 4); check(os.lseek(f, 0, os.SEEK_END), 102)
buffers = [bytearray(3), bytearray(50)]; check(os.preadv(f, buffers, 97), 5)
check(bytes(buffers[0]), b"\0ab")
os.posix_fallocate(f, 0, 5000); check(os.fstat(f).st_size, 5000)
ro = os.open("sparse", os.O_RDONLY)
for call in (lambda: os.write(ro, b"x"), lambda: os.pwrite(ro, b"x", 0), lambda: os.ftruncate(ro, 0),
             lambda: os.pread(f, 1, -1), lambda: os.lseek(f, -1, os.SEEK_SET)):
    try: call()
    except OSError as e: print(e.errno)
    else: raise SystemExit("not refused")
os.fsync(f); os.fdatasync(f)
# A shared mapping and read(2) are one file.
m = mmap.mmap(f, 5000); m[10:14] = b"mmap"; check(os.pread(f, 4, 10), b"mmap")
os.pwrite(f, b"back", 20); check(m[20:24], b"back"); m.close()
# Numbers of descriptors are used again.
for i in range(300):
    n = os.open("file", os.O_RDONLY); os.lseek(n, i, 0); check(os.read(n, 1), data[i:i+1]); os.close(n)
    r2, w2 = os.pipe(); os.write(w2, b"p"); check(os.read(r2, 1), b"p"); os.close(r2); os.close(w2)
os.closerange(3, 1000)
g = os.open("after", os.O_RDWR | os.O_CREAT); os.write(g, b"after"); check(os.pread(g, 9, 0), b"after")
print("done")
