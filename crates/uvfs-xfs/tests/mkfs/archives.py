"""Archives of every kind, for a test that compares what GNU tar and uvfs make of them.

Usage: archives.py SOURCE OUT [GO]. SOURCE is an empty directory of a file system with attributes of every kind, OUT gets
the archives and a file `list`: of each its name, if it is to be refused a part of the reason, and the archive of which
GNU tar makes the same, where that is another one. GO is a program that writes more.
"""

import io
import os
import struct
import subprocess
import sys
import tarfile

source, out = sys.argv[1], sys.argv[2]
given_names = set()
listed = open(os.path.join(out, "list"), "w")


def given(name, refused="", like=""):
    """Notes an archive, and gives its path."""
    assert name not in given_names, name
    given_names.add(name)
    print(f"{name}\t{refused}\t{like or name}", file=listed)
    return os.path.join(out, name)


def at(name):
    return os.path.join(os.fsencode(source), os.fsencode(name))


def write(name, data=b"", mode=0o644):
    with open(at(name), "wb") as file:
        file.write(data)
    os.chmod(at(name), mode)


def attribute(name, key, value):
    os.setxattr(at(name), key, value, follow_symlinks=False)


def fill_source():
    for name in ["d", "d/below", "d/empty", "acl", "s" * 200, "s" * 200 + "/" + "t" * 200]:
        os.mkdir(at(name))
    os.chmod(at("d/below"), 0o2751)
    os.chmod(at("d/empty"), 0o1777)
    write("plain", b"contents")
    write("empty")
    write("setuid", b"x" * 5000, 0o4755)
    write("d/below/large", bytes(range(256)) * 3000, 0o600)
    for i in range(40):
        write(f"d/below/{i}", b"%d" % i * i)
    write("n" * 255, b"a name of the greatest length")
    write("s" * 200 + "/" + "t" * 200 + "/" + "u" * 200, b"a long path")
    write(b"latin-\xe4\xff", b"not UTF-8")
    write("new\nline", b"a newline")
    write("grün-日本", b"UTF-8")
    write(" spaces ", b"spaces")
    write("back\\slash", b"a backslash")
    os.symlink("plain", at("link"))
    os.symlink("l" * 900, at("long-link"))
    os.symlink("/nowhere", at("d/absolute"))
    os.symlink("../../plain", at("d/below/up"))
    os.symlink(b"latin-\xe4", at("latin-link"))
    os.link(at("plain"), at("z-hard"))
    os.link(at("n" * 255), at("m" * 255))
    os.link(at("link"), at("z-hard-link"))
    os.mkfifo(at("fifo"), 0o620)
    os.mknod(at("char"), 0o020666, os.makedev(1, 3))
    os.mknod(at("block"), 0o060640, os.makedev(259, 70000))
    for name, parts, size in [
        ("sparse", [(1 << 20, 5000)], 1 << 22),
        ("sparse-" + "x" * 150, [(i * 200000, 4096) for i in range(60)], 13 << 20),
        ("hole", [], 3 << 20),
        ("ends-with-data", [(9 << 20, 10)], (9 << 20) + 10),
    ]:
        write(name)
        with open(at(name), "r+b") as file:
            for offset, length in parts:
                file.seek(offset)
                file.write(b"data!" * (length // 5) + b"!" * (length % 5))
            file.truncate(size)
    os.chown(at("plain"), 1234, 99)
    os.chown(at("empty"), 3000000000, 4000000000)
    os.chown(at("link"), 70000, 2097152, follow_symlinks=False)
    os.chown(at("d/empty"), 2097151, 2097152)
    write("attrs", b"attributes")
    attribute("attrs", "user.plain", b"value")
    attribute("attrs", "user.binary", b"\n\0=%\n12 a=b\n\xff")
    attribute("attrs", "user.a=b%3D", b"escaped")
    attribute("attrs", "user.empty", b"")
    attribute("attrs", "user." + "l" * 250, b"long")
    attribute("attrs", "user.large", b"v" * 60000)
    attribute("attrs", "trusted.t", b"trusted")
    attribute("attrs", "security.selinux", b"system_u:object_r:etc_t:s0\0")
    attribute("attrs", "security.capability", struct.pack("<5I", 0x02000001, 0x2000, 0, 0, 0))
    attribute("d", "user.dir", b"of a directory")
    attribute("link", "trusted.link", b"of a link")
    attribute("fifo", "security.selinux", b"system_u:object_r:fifo_t:s0\0")
    write("acl/file", b"", 0o640)
    for arguments in [
        ["-m", "u:1234:rw,g:77:r,m::rx", "acl/file"],
        ["-m", "u:5:rwx,d:u:6:rw,d:g:7:x", "acl"],
        ["-d", "-m", "u::rwx,g::rx,o::-", "d/empty"],
    ]:
        subprocess.run(["setfacl", *arguments], cwd=source, check=True)
    times = [1500000000, 1.5, -1.25, -2000000000.75, 4100000000.123456789, 3, 0o77777777777 + 5, 9000000000.5]
    every = []
    for top, dirs, files in os.walk(os.fsencode(source), topdown=False):
        every += [os.path.join(top, name) for name in sorted(files) + sorted(dirs)]
    for i, path in enumerate(every + [os.fsencode(source)]):
        ns = int(times[i % len(times)] * 4) * 250000000 + i * 1000
        os.utime(path, ns=(ns, ns), follow_symlinks=False)


def run(program, name, *arguments, members=(".",), refused="", like=""):
    """An archive of the source. What a format can't hold, the programs leave out."""
    path = os.path.join(out, name)
    command = [program, *arguments, "-cf", path, "-C", source, *members]
    subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
    # They also refuse what a format can't do.
    if os.path.exists(path):
        given(name, refused, like)


METADATA = ["--acls", "--xattrs", "--selinux"]


def gnu():
    for form in ["v7", "oldgnu", "gnu", "ustar", "posix"]:
        run("tar", f"gnu-{form}", f"--format={form}")
        run("tar", f"gnu-{form}-sparse", f"--format={form}", "--sparse")
        run("tar", f"gnu-{form}-numeric", f"--format={form}", "--numeric-owner", "--blocking-factor=1")
        run("tar", f"gnu-{form}-incremental", f"--format={form}", "-g", "/dev/null")
        run("tar", f"gnu-{form}-label", f"--format={form}", "--label=a volume")
        run("tar", f"gnu-{form}-absolute", f"--format={form}", "-P", members=[os.path.join(source, "d")])
        run("tar", f"gnu-{form}-followed", f"--format={form}", "-h", "--exclude=*link*", "--exclude=absolute")
        run("tar", f"gnu-{form}-copies", f"--format={form}", "--hard-dereference")
        run("tar", f"gnu-{form}-renamed", f"--format={form}", "--transform=s,^[.],top/of/all,")
        run("tar", f"gnu-{form}-plain", f"--format={form}", members=["plain", "d", "link"])
        run("tar", f"gnu-{form}-twice", f"--format={form}", members=["z-hard", "plain", "d", "plain", "d"])
    for version in ["0.0", "0.1", "1.0"]:
        run("tar", f"gnu-sparse-{version}", "--format=posix", f"--sparse-version={version}", "--sparse")
        run("tar", f"gnu-sparse-{version}-all", "--format=posix", f"--sparse-version={version}", "--sparse", *METADATA)
    run("tar", "gnu-acls", "--format=posix", "--acls", refused="by name only")
    # GNU tar keeps lists for itself if it is to extract lists.
    run("tar", "gnu-xattrs", "--format=posix", "--xattrs", like="gnu-metadata")
    run("tar", "gnu-selinux", "--format=posix", "--selinux")
    run("tar", "gnu-metadata", "--format=posix", *METADATA)
    for option in [
        "globexthdr.name=/tmp/g,uid=77,gid=78",
        "mtime:=1234567890.5",
        "mtime=1234567890.5",
        "delete=mtime",
        "delete=SCHILY.*",
        "comment=a remark",
        "linkpath=elsewhere",
        "globexthdr.mtime=5,uid=4294967294",
    ]:
        name = "gnu-pax-" + "".join(c if c.isalnum() else "-" for c in option)
        run("tar", name, "--format=posix", f"--pax-option={option}", members=["plain", "link", "d"])
    # Several archives: appended to, and one behind the other.
    run("tar", "gnu-appended", "--format=gnu", members=["d", "plain"])
    subprocess.run(["tar", "-rf", os.path.join(out, "gnu-appended"), "-C", source, "plain", "attrs", "d"], check=True)
    run("tar", "gnu-one", "--format=gnu", members=["d"])
    one = open(os.path.join(out, "gnu-one"), "rb").read()
    open(given("gnu-concatenated"), "wb").write(one + one)
    # Volumes: the later ones begin within a file.
    for form in ["gnu", "posix"]:
        volumes = [os.path.join(out, f"volume-{form}-{i}") for i in range(40)]
        command = ["tar", f"--format={form}", "-M", "-L", "100"] + [f"--file={v}" for v in volumes]
        subprocess.run([*command, "-c", "-C", source, "d"], check=True)
        given(f"volume-{form}-1", "volume")
        given(f"volume-{form}-0", "unexpected end")


def bsd():
    for form in ["pax", "rpax", "ustar", "gnutar", "v7tar"]:
        how = f"--format={form}"
        run("bsdtar", f"bsd-{form}", how)
        run("bsdtar", f"bsd-{form}-metadata", how, "--acls", "--xattrs")
        run("bsdtar", f"bsd-{form}-bare", how, "--no-acls", "--no-xattrs", "--no-fflags")
        run("bsdtar", f"bsd-{form}-numeric", how, "--numeric-owner", "--uid", "50000", "--gid", "6")
        run("bsdtar", f"bsd-{form}-plain", how, members=["plain", "z-hard", "d", "link"])
        run("bsdtar", f"bsd-{form}-followed", how, "-L", "--exclude", "*link*", "--exclude", "absolute")
        run("bsdtar", f"bsd-{form}-renamed", how, "-s", ",^[.],top/of/all,")
        run("bsdtar", f"bsd-{form}-sparse", how, "--read-sparse")
    for headers in ["SCHILY", "LIBARCHIVE", "ALL"]:
        # GNU tar does not know the form of libarchive.
        run("bsdtar", f"bsd-{headers}", "--format=pax", f"--options=pax:xattrheader={headers}", "--acls", "--xattrs",
            like="bsd-SCHILY")
    run("bsdtar", "bsd-binary", "--format=pax", "--options=hdrcharset=BINARY")


def python():
    forms = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}

    def added(tar, name, kind=tarfile.REGTYPE, data=b"", **fields):
        member = tarfile.TarInfo(name)
        member.type, member.size = kind, len(data)
        for field, value in fields.items():
            setattr(member, field, value)
        try:
            tar.addfile(member, io.BytesIO(data))
        except ValueError:
            # This format has no room for it.
            pass

    for form, number in forms.items():
        with tarfile.open(given(f"python-{form}"), "w", format=number, errors="surrogateescape") as tar:
            for name in ["plain", "empty", "d", "link", "z-hard", "fifo", "char", "block", "acl", "latin-\udce4\udcff"]:
                try:
                    tar.add(os.path.join(source, name), arcname=name)
                except ValueError:
                    pass
        with tarfile.open(given(f"python-{form}-fields"), "w", format=number) as tar:
            for i, mtime in enumerate([0, 1, -1, -1.5, 1.5, 8589934591, 8589934592, 1e9 + 0.25, -100000]):
                added(tar, f"time-{i}", mtime=mtime)
            for i, uid in enumerate([0, 2097151, 2097152, 4294967294]):
                added(tar, f"owner-{i}", uid=uid, gid=uid)
            for i, mode in enumerate([0, 0o777, 0o7777, 0o4711]):
                added(tar, f"mode-{i}", mode=mode, data=b"m" * i)
            added(tar, "p" * 99 + "/" + "q" * 50, data=b"a prefix")
            added(tar, "r" * 100, data=b"100 bytes")
            added(tar, "s" * 101, data=b"101 bytes")
            added(tar, "t", tarfile.SYMTYPE, linkname="u" * 150)
            added(tar, "dir/", tarfile.DIRTYPE, mode=0o700)
            added(tar, "dir/dev", tarfile.CHRTYPE, devmajor=5, devminor=1)
            added(tar, "contiguous", tarfile.CONTTYPE, data=b"contiguous")
            added(tar, "ä" * 60, data=b"not ASCII")
    for name, headers in [
        ("comment", {"comment": "a remark"}),
        ("owner", {"uid": "4321", "gid": "1234"}),
        ("time", {"mtime": "1000000000.5"}),
        ("xattr", {"SCHILY.xattr.user.all": "every file"}),
    ]:
        path = given(f"python-global-{name}")
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers=headers) as tar:
            added(tar, "a", data=b"1")
            added(tar, "b", tarfile.DIRTYPE, uid=5)
            added(tar, "c", uid=3000000, mtime=7.5)


def field(number, length):
    return b"%0*o\0" % (length - 1, number) if isinstance(number, int) else number.ljust(length, b"\0")


def header(name, kind=b"0", size=0, mode=0o644, uid=7, gid=8, mtime=1000000000, link=b"", magic=b"ustar\0" b"00",
           major=0, minor=0, prefix=b"", signed=False):
    block = (name.ljust(100, b"\0") + field(mode, 8) + field(uid, 8) + field(gid, 8) + field(size, 12)
             + field(mtime, 12) + b" " * 8 + kind + link.ljust(100, b"\0"))
    if magic:
        block += magic + bytes(64) + field(major, 8) + field(minor, 8) + prefix
    block = block.ljust(512, b"\0")
    total = sum(struct.unpack("512b" if signed else "512B", block))
    return block[:148] + (b"%06o\0 " % (total & 0o777777) if total >= 0 else b"-%05o\0 " % -total) + block[156:]


def body(data):
    return data + bytes(-len(data) % 512)


def file(name, data=b"", **fields):
    return header(name, size=len(data), **fields) + body(data)


def pax(*pairs, kind=b"x"):
    records = b""
    for key, value in pairs:
        length = len(key) + len(value) + 3
        length += len(str(length + len(str(length))))
        records += b"%d %s=%s\n" % (length, key, value)
    return file(b"headers", records, kind=kind)


def raw(name, *parts, refused="", end=bytes(1024)):
    with open(given(f"raw-{name}", refused), "wb") as to:
        to.write(b"".join(parts) + end)


def old_sparse(name, parts, real, data, kind=b"S"):
    """A sparse member of old GNU tar."""
    each = [field(o, 12) + field(n, 12) for o, n in parts]
    more = len(each) > 4
    tail = bytes(41) + b"".join(each[:4]).ljust(96, b"\0") + (b"\1" if more else b"\0") + field(real, 12)
    head = header(name, kind, size=len(data), magic=b"ustar  \0", prefix=tail)
    rest = each[4:]
    while more:
        more = len(rest) > 21
        head += b"".join(rest[:21]).ljust(504, b"\0") + (b"\1" if more else b"\0") + bytes(7)
        rest = rest[21:]
    return head + body(data)


def by_hand():
    a = file(b"a", b"12345")
    d, e = header(b"d/", b"5", mode=0o755), header(b"e/", b"5", mode=0o700)
    for magic, form in [(b"", "v7"), (b"ustar\0" b"00", "ustar"), (b"ustar  \0", "gnu")]:
        for kind in [b"\0", b"0", b"7"]:
            raw(f"old-directory-{form}-{kind.hex()}", header(b"d/", kind, mode=0o755, magic=magic),
                file(b"d/x", b"1", magic=magic, kind=kind))
    raw("directory-of-a-size", header(b"d/", b"5", size=4096), a)
    raw("link-of-a-size", a, header(b"b", b"1", size=5, link=b"a"), file(b"c"))
    raw("pax-directory", pax((b"path", b"d/")), file(b"x"), pax((b"path", b"d/y")), a)
    raw("below-a-link", d, header(b"l", b"2", link=b"d"), file(b"l/x", b"1"), header(b"m", b"2", link=b"l"),
        file(b"m/y", b"2"), header(b"h", b"1", link=b"m/x"))
    raw("below-a-deep-link", file(b"d/e/f"), header(b"d/l", b"2", link=b"e"), file(b"d/l/x", b"1"))
    raw("below-a-dangling-link", header(b"l", b"2", link=b"d"), file(b"l/x"), refused="symbolic link to nothing")
    raw("below-a-file", a, file(b"a/x"), refused="no directory")
    raw("dots", file(b"../x"), refused="..")
    raw("inner-dots", file(b"d/../x"), refused="..")
    raw("odd-slashes", file(b"./d//x"), file(b"/y"), file(b".//z"), header(b"e///", b"5"), header(b"./f/.", b"5"))
    raw("root", header(b".", b"5", mode=0o711, uid=77), a)
    raw("root-slash", header(b"./", b"5", mode=0o1711), a)
    raw("volume-label", header(b"label", b"V", magic=b"ustar  \0"), a)
    raw("multi-volume", file(b"a", b"123", kind=b"M", magic=b"ustar  \0"), refused="volume")
    raw("dump-directory", file(b"d/", b"Yx\0\0", kind=b"D", mode=0o755, magic=b"ustar  \0"), file(b"d/x"))
    raw("unknown-type", file(b"a", b"1", kind=b"Z"), refused="'Z'")
    raw("names-type", file(b"a", b"1", kind=b"N"), refused="'N'")
    raw("solaris", file(b"h", b"13 path=name\n", kind=b"X"), a)
    # A member twice: each type over each other.
    kinds = {
        "file": file(b"n", b"new", mode=0o600), "directory": header(b"n/", b"5", mode=0o700),
        "link": header(b"n", b"2", link=b"other"), "hard": header(b"n", b"1", link=b"a"),
        "fifo": header(b"n", b"6"), "char": header(b"n", b"3", major=1, minor=3),
    }
    for old, first in kinds.items():
        for new, second in kinds.items():
            raw(f"{new}-over-{old}", a, first, second, file(b"z"))
    raw("over-a-directory", file(b"n/x"), file(b"n"), refused="not empty")
    raw("link-over-a-directory", file(b"n/x"), header(b"n", b"2", link=b"a"), refused="not empty")
    raw("directory-again", d, file(b"d/x"), header(b"d/", b"5", mode=0o500, uid=1), file(b"d/y"))
    raw("directory-over-a-link", d, file(b"d/x"), header(b"l", b"2", link=b"d"), header(b"l/", b"5"), file(b"l/y"))
    raw("file-over-a-hard-link", a, header(b"b", b"1", link=b"a"), file(b"a", b"other"))
    raw("hard-link-to-a-link", header(b"l", b"2", link=b"nowhere"), header(b"h", b"1", link=b"l"))
    raw("hard-link-to-itself", a, header(b"a", b"1", link=b"a"), file(b"b"))
    raw("hard-link-below-nothing", a, header(b"d/e/h", b"1", link=b"a"))
    raw("hard-link-to-nothing", header(b"h", b"1", link=b"a"), refused="nothing that came before")
    raw("hard-link-to-later", header(b"h", b"1", link=b"a"), a, refused="nothing that came before")
    raw("hard-link-with-slashes", file(b"d/x"), header(b"h", b"1", link=b"/d//x"), header(b"i", b"1", link=b"./d/./x"))
    # Numbers.
    big = lambda n, length: (b"\xff" if n < 0 else b"\x80") + (n & (1 << 8 * (length - 1)) - 1).to_bytes(length - 1, "big")
    raw("base-256", file(b"a", uid=big(3000000000, 8), gid=big(5, 8), mtime=big(8589934592, 12), mode=big(0o755, 8)))
    raw("base-256-size", header(b"a", size=big(5, 12)) + body(b"12345"), file(b"b"))
    raw("base-256-time", file(b"a", mtime=big(-5, 12)), file(b"b", mtime=big(-2 ** 31 - 5, 12)))
    raw("base-256-owner", file(b"a", uid=big(1 << 32, 8)), refused="owners")
    raw("negative-owner", file(b"a", uid=big(-2, 8)), refused="owners")
    raw("great-device", header(b"a", b"3", major=big(600, 8)), refused="device numbers")
    raw("spaces", file(b"a", uid=b"     12 ", gid=b" 7\0junk", mtime=b"         12 ", mode=b"   755 "))
    raw("no-terminator", file(b"a", uid=b"00000012", mtime=b"000000000012", mode=b"00000755"))
    raw("nul-first", file(b"a", uid=b"\0" b"000012", mode=b"\0" b"000600"))
    raw("no-device-numbers", header(b"a", b"3", major=b"", minor=b""))
    raw("empty-numbers", file(b"a", uid=b"", gid=b"", mtime=b"0"))
    raw("letters", file(b"a", uid=b"abc"), refused="the owner")
    raw("signed-checksum", file(b"\xe4\xf6\xfc", b"x", signed=True))
    raw("wrong-checksum", a, b"x" + file(b"b")[1:], refused="checksum")
    raw("prefix", file(b"x", b"1", prefix=b"p/" * 70 + b"p"))
    raw("old-gnu-times", file(b"a", magic=b"ustar  \0", prefix=field(5, 12) + field(6, 12)))
    raw("full-fields", file(b"n" * 100, b"1"), header(b"l", b"2", link=b"t" * 100))
    # Extended headers.
    for key, value, refused in [
        (b"path", b"other/name", ""), (b"path", b"\xe4\xff", ""), (b"path", b"", "path"), (b"size", b"3", ""),
        (b"uid", b"4294967294", ""), (b"uid", b"4294967296", "owners"), (b"uid", b"-1", "owners"), (b"gid", b"x", "gid"),
        (b"mtime", b"-5", ""), (b"mtime", b"-0.5", ""), (b"mtime", b"5.", ""), (b"mtime", b"1.000000001", ""),
        (b"mtime", b"1.0000000019", ""), (b"mtime", b"-1.0000000011", ""), (b"mtime", b"1e5", "mtime"),
        (b"mtime", b"-99999999999", ""), (b"mtime", b"99999999999", ""), (b"mtime", b"", "mtime"), (b"atime", b"5.5", ""),
        (b"ctime", b"5.5", ""), (b"comment", b"\n\n=", ""), (b"VENDOR.key", b"x", ""), (b"hdrcharset", b"BINARY", ""),
        (b"uname", b"nobody", ""), (b"charset", b"ISO-IR", ""), (b"GNU.volume.offset", b"5", "volume"),
        (b"SCHILY.xattr.user.x", b"1 2=\n\0\xff", ""), (b"SCHILY.xattr.user.a%3Db%25%20%3d", b"x", ""),
        (b"SCHILY.xattr.user.x", b"v" * 65537, "65536"), (b"SCHILY.xattr.user." + b"n" * 256, b"x", "255"),
        (b"SCHILY.xattr.user.", b"x", ""), (b"SCHILY.xattr.btrfs.x", b"x", ""), (b"SCHILY.xattr.user.x", b"v" * 65536, ""),
        (b"LIBARCHIVE.xattr.user.x", b"?", "base64"), (b"SCHILY.acl.ace", b"everyone@:r::allow", "NFSv4"),
        (b"SCHILY.acl.access", b"user::rwx,user:9:r--,group::r--,mask::rw-,other::--x", ""),
        (b"SCHILY.acl.access", b"user::rwx\nuser:root:r--\ngroup::r--\nmask::rw-\nother::--x\n", ""),
        (b"SCHILY.acl.access", b"user::rw-\nuser:9:rw-\t#effective:r--\ngroup::r--\nmask::r--\nother::r--\n", ""),
        (b"SCHILY.acl.access", b"user::r--,group::-wx,other::--x", ""), (b"SCHILY.acl.access", b"", ""),
        (b"SCHILY.acl.access", b"user::rwx,user:no such user:r--,group::r--,mask::r--,other::---", "by name only"),
        (b"SCHILY.acl.access", b"user::rwx,group::r--", "access control list"),
        (b"SCHILY.acl.default", b"user::rwx,group::r--,other::---", ""),
        (b"RHT.security.selinux", b"system_u:object_r:etc_t:s0", ""),
    ]:
        plain = "".join(chr(c) if chr(c).isalnum() else "-" for c in key[:40] + b"=" + value[:60])
        for kind in [b"x", b"g"]:
            what = [file(b"a", b"123"), header(b"b/", b"5")]
            if key in (b"path", b"size"):
                what = what[:1]
            name = ("" if kind == b"x" else "global-") + plain + (str(len(value)) if len(value) > 60 else "")
            # GNU tar takes attributes from a member's own headers only.
            ignored = kind == b"g" and key.startswith(b"SCHILY.xattr.")
            raw(name, pax((key, value), kind=kind), *what, refused="" if ignored else refused)
    raw("own-over-global", pax((b"uid", b"5"), (b"mtime", b"5"), kind=b"g"), pax((b"uid", b"6")), a, file(b"b"))
    raw("two-globals", pax((b"uid", b"5"), kind=b"g"), pax((b"gid", b"6"), kind=b"g"), a, file(b"b"))
    raw("the-last-counts", pax((b"uid", b"5"), (b"uid", b"6"), (b"path", b"x"), (b"path", b"y")), a)
    raw("two-headers", pax((b"uid", b"5")), pax((b"gid", b"6")), a)
    raw("long-name", file(b"L", b"n" * 200 + b"\0", kind=b"L", magic=b"ustar  \0"), a)
    raw("long-name-and-path", file(b"L", b"n" * 200 + b"\0", kind=b"L"), pax((b"path", b"x")), a)
    raw("path-and-long-name", pax((b"path", b"x"), (b"size", b"3")), file(b"L", b"n" * 200 + b"\0", kind=b"L"),
        header(b"a", size=3) + body(b"123"), file(b"b"))
    # Only the whole name tells a directory.
    raw("cut-off-at-a-slash", file(b"L", b"n" * 99 + b"/file\0", kind=b"L", magic=b"ustar  \0"),
        file(b"n" * 99 + b"/", b"1", kind=b"\0", magic=b"ustar  \0"))
    raw("long-link", file(b"K", b"n" * 1023 + b"\0", kind=b"K"), header(b"l", b"2"))
    raw("too-long-link", file(b"K", b"n" * 1024 + b"\0", kind=b"K"), header(b"l", b"2"), refused="1023")
    raw("too-long-name", file(b"L", b"n" * 256 + b"\0", kind=b"L"), a, refused="long name")
    raw("no-target", header(b"l", b"2"), refused="symbolic links")
    raw("malformed", file(b"x", b"9 a=b\n", kind=b"x"), a, refused="malformed")
    raw("size-override", pax((b"size", b"5")), header(b"a", size=0) + body(b"12345"), file(b"b"))
    raw("cut-off", file(b"a", b"1" * 2000)[:1500], refused="unexpected end", end=b"")
    raw("trailing-junk", a, end=bytes(1024) + b"junk" * 200)
    raw("one-block-of-zeros", a, end=bytes(512))
    raw("nothing")
    # Holes.
    five = [(i * 10000, 512) for i in range(5)]
    many = [(i * 10000, 512) for i in range(70)]
    raw("old-sparse", old_sparse(b"a", five[:3] + [(30000, 0)], 30000, b"x" * 1536), file(b"b"))
    raw("old-sparse-extended", old_sparse(b"a", five + [(50000, 0)], 50000, b"x" * 2560), file(b"b"))
    raw("old-sparse-extended-twice", old_sparse(b"a", many + [(700000, 0)], 700000, b"y" * 512 * 70), file(b"b"))
    raw("old-sparse-hole", old_sparse(b"a", [(30000, 0)], 30000, b""), file(b"b"))
    raw("old-sparse-empty", old_sparse(b"a", [], 0, b""), file(b"b"))
    raw("old-sparse-senseless", old_sparse(b"a", [(0, 5), (3, 5)], 9, b"x" * 10), refused="holes")
    s = lambda *pairs: pax(*((b"GNU.sparse." + k, v) for k, v in pairs))
    twice = b"x" * 512 + b"y" * 512
    raw("sparse-0.0", s((b"size", b"3000"), (b"numblocks", b"3"), (b"offset", b"0"), (b"numbytes", b"512"),
                        (b"offset", b"2000"), (b"numbytes", b"512"), (b"offset", b"3000"), (b"numbytes", b"0")),
        file(b"a", twice), file(b"b"))
    raw("sparse-0.1", s((b"name", b"real"), (b"size", b"3000"), (b"numblocks", b"3"), (b"map", b"0,512,2000,512,3000,0")),
        file(b"a", twice), file(b"b"))
    one = s((b"major", b"1"), (b"minor", b"0"), (b"name", b"real"), (b"realsize", b"3000"))
    raw("sparse-1.0", one, file(b"a", body(b"3\n0\n512\n2000\n512\n3000\n0\n") + twice), file(b"b"))
    raw("sparse-1.0-of-a-size", pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.name", b"real"),
                                    (b"GNU.sparse.realsize", b"3000"), (b"size", b"1536")),
        header(b"a", size=0) + body(b"3\n0\n512\n2000\n512\n3000\n0\n") + twice, file(b"b"))
    raw("sparse-1.0-padding", one, file(b"a", body(b"2\n0\n5\n3000\n0\n") + b"hello"), file(b"b"))
    raw("sparse-senseless", s((b"name", b"real"), (b"size", b"10"), (b"map", b"0,500")), file(b"a", b"x" * 500),
        refused="holes")
    reported(a, s, twice)


def reported(a, s, twice):
    """Of reports about other programs that read archives."""
    big = lambda n: b"\x80" + n.to_bytes(11, "big")
    # libarchive 2548, 2643: contents that no part of the map has, and fewer than the map has.
    of = lambda parts, *more: s((b"name", b"real"), (b"size", b"3000"), (b"numblocks", b"%d" % (parts.count(b",") + 1 >> 1)), (b"map", parts))
    raw("report-more-than-the-map-0.1", of(b"0,512,3000,0"), file(b"a", twice), file(b"b"))
    raw("report-more-than-the-map-1.0", s((b"major", b"1"), (b"minor", b"0"), (b"name", b"real"), (b"realsize", b"3000")),
        file(b"a", body(b"2\n0\n512\n3000\n0\n") + twice), file(b"b"))
    raw("report-more-than-the-map-old", old_sparse(b"a", [(0, 512), (30000, 0)], 30000, twice), file(b"b"))
    raw("report-less-than-the-map", of(b"0,512,1000,1024"), file(b"a", twice), file(b"b"), refused="less of it")
    # libarchive 2557: the size of the contents and that of the file, in any order.
    for i, pairs in enumerate([[(b"size", b"512"), (b"GNU.sparse.size", b"3000")], [(b"GNU.sparse.size", b"3000"), (b"size", b"512")]]):
        more = [(b"numblocks", b"2"), (b"name", b"real"), (b"map", b"100,512,3000,0")]
        raw(f"report-two-sizes-{i}", pax(*pairs, *((b"GNU.sparse." + k, v) for k, v in more)),
            header(b"a", size=7) + body(b"x" * 512), file(b"b"))
    raw("report-star-sizes", pax((b"SCHILY.realsize", b"9"), (b"SCHILY.dev", b"5"), (b"SCHILY.ino", b"6"), (b"SCHILY.nlink", b"2"),
                                 (b"SCHILY.filetype", b"regular")), a, file(b"b"))
    # libarchive 485, 2263: headers with no member behind them.
    raw("report-stray-pax", a, pax((b"path", b"x")))
    raw("report-stray-long-name", a, file(b"L", b"n" * 200 + b"\0", kind=b"L", magic=b"ustar  \0"))
    raw("report-stray-global", a, pax((b"comment", b"x"), kind=b"g"))
    # Go 28843: zeros behind the records, and no records.
    records = b"9 uid=55\n"
    raw("report-zeros-behind-records", file(b"x", records + bytes(30), kind=b"x"), a)
    raw("report-global-zeros", file(b"pax_global_header", records + bytes(30), kind=b"g"), a)
    raw("report-no-records", file(b"x", b"", kind=b"x"), file(b"g", b"", kind=b"g"), a)
    # node-tar GHSA: a size between a header and its member.
    raw("report-size-and-long-link", pax((b"size", b"5")), file(b"K", b"t" * 150 + b"\0", kind=b"K"), header(b"l", b"2"), a)
    # Sizes of what has no contents.
    for name, kind in [("directory", b"5"), ("link", b"2"), ("fifo", b"6"), ("char", b"3"), ("hard", b"1")]:
        raw(f"report-pax-size-of-a-{name}", file(b"t"), pax((b"size", b"512")), header(b"n", kind, link=b"t"), file(b"c", b"12"))
    # Owners of which one means none to chown(2).
    raw("report-owner-of-all-ones", pax((b"uid", b"4294967295")), a, refused="owners")
    raw("report-group-of-all-ones", pax((b"gid", b"4294967295")), a, refused="owners")
    raw("report-base-256-owner-of-all-ones", file(b"a", uid=b"\x80\0\0\0\xff\xff\xff\xff"), refused="owners")
    # Modes with the type in them, as V7 had it, and bits beyond.
    raw("report-mode-with-type", file(b"a", mode=0o100644), header(b"d/", b"5", mode=0o40755), file(b"b", mode=0o7777777))
    # squashfs-tools-ng 22: names of nothing, and slashes behind names.
    raw("report-only-slashes", header(b"/", b"5"), header(b"//", b"5"), header(b"./.", b"5"), a)
    raw("report-slash-behind-a-link", header(b"l/", b"2", link=b"t"), a)
    raw("report-slash-behind-a-fifo", header(b"f/", b"6"), a)
    raw("report-slash-behind-a-hard-link", a, header(b"h/", b"1", link=b"a"))
    raw("report-slash-behind-a-target", a, header(b"h", b"1", link=b"a/"), refused="nothing that came before")
    raw("report-hard-link-to-a-directory", header(b"d/", b"5"), header(b"h", b"1", link=b"d"), refused="nothing that came before")
    # NUL in what the kernel ends at one.
    raw("report-nul-in-a-path", pax((b"path", b"x\0y")), a)
    raw("report-nul-in-a-target", pax((b"linkpath", b"x\0y")), header(b"l", b"2"), a)
    raw("report-nul-in-a-key", pax((b"SCHILY.xattr.user.a\0b", b"v")), a, refused="malformed")
    raw("report-nul-in-an-escaped-key", pax((b"LIBARCHIVE.xattr.user.a%00b", b"dg==")), a, refused="without NUL")
    raw("report-newlines", pax((b"path", b"a\nb\n"), (b"linkpath", b"\n"), (b"SCHILY.xattr.user.\n", b"\n")), header(b"l", b"0"))
    raw("report-large-size", header(b"a", size=big(3)) + body(b"123"), file(b"b"))
    raw("report-time-of-a-hard-link", a, header(b"h", b"1", link=b"a", mtime=5, mode=0o600, uid=99), file(b"b"))
    raw("report-deleted-record", pax((b"uid", b"5"), kind=b"g"), pax((b"uid", b"")), a, refused="uid")
    # erofs-utils 32, and a directory between two of the same name.
    raw("report-three-times", file(b"n", b"1"), file(b"n", b"22"), header(b"h", b"1", link=b"n"), file(b"n", b"333"))


def compressed():
    whole = open(os.path.join(out, "gnu-sparse-1.0-all"), "rb").read()
    # Also where one frame ends within a member.
    parts = [whole[:70001], b"", whole[70001:]]

    def by(program, *options):
        return lambda data: subprocess.run([program, *options], input=data, stdout=subprocess.PIPE, check=True).stdout

    for name, compress in {
        "gzip": by("gzip", "-nc"), "gzip-9": by("gzip", "-9nc"),
        "bzip2": by("bzip2", "-c"), "bzip2-1": by("bzip2", "-1c"),
        "zstd": by("zstd", "-qc"), "zstd-fast": by("zstd", "-qc", "--fast=5"), "zstd-22": by("zstd", "-qc", "-22", "--ultra"),
        "zstd-long": by("zstd", "-qc", "--long=27"), "zstd-without-checksum": by("zstd", "-qc", "--no-check"),
        "xz": by("xz", "-c"), "xz-9": by("xz", "-9ec"), "xz-0": by("xz", "-0c"), "xz-blocks": by("xz", "-T2", "--block-size=100000", "-c"),
        "xz-x86": by("xz", "--x86", "--lzma2=preset=1", "-c"), "xz-sha256": by("xz", "--check=sha256", "-c"),
        "xz-delta": by("xz", "--check=crc32", "--delta=dist=4", "--lzma2", "-c"),
    }.items():
        program = name.split("-")[0]
        frames = [compress(part) for part in parts]
        all_at_once = compress(whole)
        damaged = bytearray(all_at_once)
        damaged[len(damaged) // 2] ^= 0x10
        # What is decompressed before the checksum may be refused as an archive. Every message has a space.
        any_reason = " "
        for kind, data, refused in [
            ("", all_at_once, ""), ("-frames", b"".join(frames), ""), ("-padded", all_at_once + bytes(5000), ""),
            ("-cut-off", all_at_once[: len(all_at_once) // 3], program), ("-damaged", bytes(damaged), any_reason),
            ("-and-junk", all_at_once + b"junk", program),
        ]:
            # Only a damaged checksum tells, or nothing.
            if kind != "-damaged" or "without" not in name:
                with open(given(f"compressed-{name}{kind}", refused, "gnu-sparse-1.0-all"), "wb") as to:
                    to.write(data)
    skipped = struct.pack("<II", 0x184D2A53, 5) + b"12345"
    zstd = by("zstd", "-qc")
    for name, data in [
        ("zstd-skipped", skipped + zstd(whole) + skipped), ("zstd-known", zstd(whole)),
        ("zstd-stream", by("zstd", "-qc", "--stream-size=%d" % len(whole))(whole)),
    ]:
        open(given(f"compressed-{name}", "", "gnu-sparse-1.0-all"), "wb").write(data)
    open(given("compressed-zstd-31", "--long"), "wb").write(by("zstd", "-qc", "--long=31")(whole))
    open(given("compressed-lz4", "lz4"), "wb").write(b"\x04\x22\x4d\x18" + bytes(600))
    # Names that look like compressions.
    for magic in [b"BZh9", b"\x1f\x8b\x08", b"\xfd7zXZ", b"LZIP"]:
        raw("named-" + magic.hex(), file(magic + b" a name"))


def go(program):
    for name in subprocess.run([program, out], check=True, capture_output=True, text=True).stdout.split():
        given(name)


fill_source()
for program in sys.argv[3:]:
    go(program)
gnu()
bsd()
python()
by_hand()
compressed()
listed.close()
