"""Exchanges the contents of two files, again and again, until that fails (XFS_IOC_EXCHANGE_RANGE).

Arguments: two files, and flags. Prints the error number that ended it, and how many exchanges there were before.
"""
import fcntl, os, struct, sys

EXCHANGE_RANGE = 1 << 30 | 40 << 16 | ord("X") << 8 | 129
done = 0
try:
    a, b = (os.open(path, os.O_RDWR) for path in sys.argv[1:3])
    while True:
        length = 0 if int(sys.argv[3]) & 1 else os.fstat(b).st_size
        call = struct.pack("iIQQQQ", a, 0, 0, 0, length, int(sys.argv[3]))
        fcntl.ioctl(b, EXCHANGE_RANGE, call)
        done += 1
except OSError as error:
    print(error.errno, done)
