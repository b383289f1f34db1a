# The same in Python, in an event loop over libuv: os's calls are the C library's; those around it are syscall(2), and
# the loop's own. Arguments: UV_USE_IO_URING's value, a place, an operation, a directory.
import asyncio, ctypes, errno, os, sys
import uvloop

operation, where = sys.argv[3:5]
os.chdir(where)
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
NUMBERS = dict(close=3, dup2=33, dup3=292, close_range=436, lseek=8, read=0, write=1, openat=257, mmap=9)


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def step(what, call):
    try:
        say(what, call())
    except OSError as e:
        say(what, errno.errorcode[e.errno])


def around(name, *args):
    done = libc.syscall(*(ctypes.c_long(x) if isinstance(x, int) else x for x in (NUMBERS[name], *args)))
    say("around", name, done if name != "mmap" else "", errno.errorcode[ctypes.get_errno()] if done == -1 else "")
    return done


def use(name, fd):
    say("--", name, fd)
    step("at", lambda: os.lseek(fd, 0, os.SEEK_CUR))
    step("write", lambda: os.write(fd, b"<used>"))
    step("read", lambda: os.read(fd, 5))
    step("pread", lambda: os.pread(fd, 8, 3))
    step("pwrite", lambda: os.pwrite(fd, b"+", 30))
    step("size", lambda: os.fstat(fd).st_size)
    step("same", lambda: [f for f in "ABC" if os.path.exists(f) and os.path.samestat(os.stat(f), os.fstat(fd))])


async def main():
    a, b = (os.open(name, os.O_RDWR | os.O_CREAT) for name in "AB")
    for i in range(40):
        os.write(a, b"%0100d" % i)
        if i < 12:
            os.write(b, b"%010d" % i)
    os.lseek(a, 350, os.SEEK_SET)
    os.read(a, 10)
    text = ctypes.create_string_buffer(12)
    loop = asyncio.get_running_loop()

    def work():
        if operation in ("close", "reopen"):
            around("close", a)
            if operation == "reopen":
                say(around("openat", -100, b"B", os.O_RDWR) == a)
        elif operation == "open":
            use("again", around("openat", -100, b"A", os.O_RDWR))
        elif operation == "dup2":
            around("dup2", b, a)
        elif operation == "dup3":
            around("dup3", b, a, os.O_CLOEXEC)
        elif operation == "close_range":
            around("close_range", a, b, 0)
        elif operation == "lseek":
            around("lseek", a, 7, 0)
        elif operation == "read":
            around("read", a, text, 11)
            say(text.value)
        elif operation == "write":
            around("write", a, b"around!", 7)
        elif operation == "mmap":
            at = around("mmap", 0, 4096, 3, 1, a, 0)
            say(ctypes.string_at(at + 340, 20))
            ctypes.memmove(at + 20, b"MAPPED", 6)

    await loop.run_in_executor(None, work)
    if operation in ("fork", "exec"):
        child = await asyncio.create_subprocess_exec("sh", "-c", "echo child; head -c 5 | cat", stdin=b, stdout=a)
        say(await child.wait())
    use("A", a)
    use("B", b)
    c = os.open("C", os.O_RDWR | os.O_CREAT)
    use("C", c)
    step("close", lambda: os.close(b))
    use("B", b)
    for name in "ABC":
        say(name, open(name, "rb").read())
    say("to its end")


uvloop.run(main())
