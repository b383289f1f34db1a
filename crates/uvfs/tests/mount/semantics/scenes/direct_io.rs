//! O_DIRECT, alone and beside other users of a file.

use super::*;

/// A page-aligned buffer.
#[repr(align(4096))]
struct Aligned([u8; 16384]);

pub fn direct(s: &mut Scene) {
    let file = s.file("file", vec![b'a'; 100_000]);
    let direct = match s.open("file", OFlags::RDWR | OFlags::DIRECT) {
        Ok(direct) => direct,
        Err(e) => return s.done("open", Err::<(), _>(e)),
    };
    let mut buffer = Box::new(Aligned([0; 16384]));
    s.note("read", io::pread(&direct, &mut buffer.0[..], 4096));
    s.value("right", buffer.0.iter().all(|b| *b == b'a'));
    s.note(
        "read at the end",
        io::pread(&direct, &mut buffer.0[..], 98304),
    );
    s.note(
        "read past the end",
        io::pread(&direct, &mut buffer.0[..], 1 << 20),
    );
    buffer.0.fill(b'b');
    s.note("write", io::pwrite(&direct, &buffer.0[..], 8192));
    let mut bytes = [0; 4];
    io::pread(&file, &mut bytes[..], 8190).unwrap();
    s.value("buffered read sees it", bytes.escape_ascii());
    io::pwrite(&file, b"cccc", 8190).unwrap();
    io::pread(&direct, &mut buffer.0[..4096], 8192).unwrap();
    s.value(
        "direct read sees the buffered write",
        buffer.0[..4].escape_ascii(),
    );
    buffer.0.fill(b'd');
    s.note(
        "write past the end",
        io::pwrite(&direct, &buffer.0[..], 102_400),
    );
    s.note("size", s.size("file"));
    let append = s
        .open("file", OFlags::WRONLY | OFlags::DIRECT | OFlags::APPEND)
        .unwrap();
    fs::ftruncate(&file, 8192).unwrap();
    s.note("append", io::write(&append, &buffer.0[..4096]));
    s.note("content", s.content("file"));
}

/// With O_DIRECT from the first open on.
pub fn direct_alone(s: &mut Scene) {
    use OFlags as O;
    let mut page = Box::new(Aligned([b'a'; 16384]));
    let new = O::RDWR | O::CREATE | O::EXCL | O::DIRECT;
    let file = match s.open("file", new) {
        Ok(file) => file,
        Err(e) => return s.done("open", Err::<(), _>(e)),
    };
    sizes_and_holes(s, &file, &mut page);

    let append = s.open("file", O::WRONLY | O::APPEND | O::DIRECT).unwrap();
    fs::ftruncate(&file, 8192).unwrap();
    page.0.fill(b'c');
    s.note("append", io::write(&append, &page.0[..4096]));
    s.note("append at", io::pwrite(&append, &page.0[..4096], 0));
    s.note("size", size(&file));
    let sync = O::RDWR | O::SYNC | O::DIRECT;
    let synced = s.open("file", sync).unwrap();
    s.note("synced write", io::pwrite(&synced, &page.0[..4096], 4096));
    s.note(
        "append refused",
        io::write(
            s.open("file", O::RDONLY | O::DIRECT).unwrap(),
            &page.0[..4096],
        ),
    );
    let vectored = [
        io::IoSlice::new(&page.0[..4096]),
        io::IoSlice::new(&page.0[4096..8192]),
    ];
    s.note("vectored", io::pwritev(&synced, &vectored, 16384));

    shared_mapping(s, &file, &mut page);

    s.done(
        "lock",
        fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive),
    );
    s.done(
        "flock",
        fs::flock(&file, FlockOperation::NonBlockingLockExclusive),
    );
    let other = s.open("file", O::RDWR).unwrap();
    s.done(
        "locked",
        fs::flock(&other, FlockOperation::NonBlockingLockShared),
    );
    renamed_and_unlinked(s, &file, &other, &mut page);
    drop((file, append, synced, other));
    s.note("names", s.names("."));

    unnamed(s, &page);
    let cut = s.open("named", O::RDWR | O::CREATE | O::TRUNC | O::DIRECT);
    s.note("cut", cut.as_ref().map_err(|e| *e).and_then(size));
}

fn size(file: &OwnedFd) -> io::Result<i64> {
    fs::fstat(file).map(|st| st.st_size)
}

/// A direct file grows, is cut, and gets holes.
fn sizes_and_holes(s: &mut Scene, file: &OwnedFd, page: &mut Aligned) {
    s.note("write", io::write(file, &page.0[..8192]));
    s.note("size", size(file));
    s.note("size by name", s.size("file"));
    s.note("position", fs::seek(file, SeekFrom::Current(0)));
    s.note("end", fs::seek(file, SeekFrom::End(0)));
    s.note("data", fs::seek(file, SeekFrom::Data(4096)));
    s.note("hole", fs::seek(file, SeekFrom::Hole(0)));
    s.note("read at the end", io::read(file, &mut page.0[..]));
    page.0.fill(b'b');
    s.note("write far", io::pwrite(file, &page.0[..4096], 65536));
    s.note("size", size(file));
    s.note("blocks", fs::fstat(file).map(|st| st.st_blocks));
    s.done("truncate", fs::ftruncate(file, 5000));
    s.note("size", size(file));
    s.note("short read", io::pread(file, &mut page.0[..8192], 4096));
    s.value("of it", page.0[..2].escape_ascii());
    s.done(
        "fallocate",
        fs::fallocate(file, FallocateFlags::empty(), 0, 20_000),
    );
    s.note("size", size(file));
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    s.done("punch", fs::fallocate(file, hole, 0, 4096));
    s.note("read the hole", io::pread(file, &mut page.0[..4096], 0));
    s.value("zeros", page.0[..4096].iter().all(|b| *b == 0));
    s.done("sync", fs::fsync(file).and(fs::fdatasync(file)));
}

/// A direct file is written under another name and without one; `other` is a buffered open of it.
fn renamed_and_unlinked(s: &mut Scene, file: &OwnedFd, other: &OwnedFd, page: &mut Aligned) {
    s.done("rename", fs::rename(s.at("file"), s.at("renamed")));
    page.0.fill(b'e');
    s.note("write renamed", io::pwrite(file, &page.0[..4096], 0));
    s.note("content", s.content("renamed"));
    fs::unlink(s.at("renamed")).unwrap();
    page.0.fill(b'f');
    s.note("write unlinked", io::pwrite(file, &page.0[..4096], 20480));
    s.note(
        "links and size",
        fs::fstat(file).map(|st| (st.st_nlink, st.st_size)),
    );
    s.note("read unlinked", read_all(other));
}

/// A shared mapping and direct calls see each other's bytes.
fn shared_mapping(s: &mut Scene, file: &OwnedFd, page: &mut Aligned) {
    // SAFETY: a new mapping.
    let map = |file: &OwnedFd, how| unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            8192,
            ProtFlags::READ | ProtFlags::WRITE,
            how,
            file,
            0,
        )
    };
    let shared = map(file, MapFlags::SHARED).unwrap().cast::<u8>();
    // SAFETY: the mapping has 8192 bytes, backed by the file.
    unsafe { shared.add(100).write_volatile(b'm') };
    s.note("content with a mapping", s.content("file"));
    page.0.fill(b'd');
    io::pwrite(file, &page.0[..4096], 4096).unwrap();
    // SAFETY: as above.
    s.value("the mapping sees", unsafe {
        shared.add(5000).read_volatile()
    });
    // SAFETY: mapped above and not used again.
    unsafe { rustix::mm::munmap(shared.cast(), 8192).unwrap() };
}

/// A direct file that gets its name late.
fn unnamed(s: &mut Scene, page: &Aligned) {
    use OFlags as O;
    let made = fs::open(&s.dir, O::TMPFILE | O::RDWR | O::DIRECT, Mode::from(0o644));
    if let Ok(unnamed) = made {
        s.note("write unnamed", io::write(&unnamed, &page.0[..4096]));
        let name = format!("/proc/self/fd/{}", unnamed.as_raw_fd());
        let link = fs::linkat(CWD, name, CWD, s.at("named"), AtFlags::SYMLINK_FOLLOW);
        s.done("link unnamed", link);
        s.note("content of it", s.content("named"));
    }
}

/// Files that are opened while a direct one is open, and after.
pub fn direct_and_others(s: &mut Scene) {
    use OFlags as O;
    let mut page = Box::new(Aligned([0; 16384]));
    s.file("file", vec![b'a'; 50_000]);
    s.note("cached", s.content("file"));
    let Ok(direct) = s.open("file", O::RDWR | O::DIRECT) else {
        return;
    };
    page.0.fill(b'b');
    s.note("direct write", io::pwrite(&direct, &page.0[..8192], 4096));
    s.note("content", s.content("file"));
    let other = s.open("file", O::RDWR).unwrap();
    s.note("unaligned", io::pwrite(&other, b"other", 4090));
    s.note("direct read", io::pread(&direct, &mut page.0[..4096], 0));
    s.value("of it", page.0[4088..4096].escape_ascii());
    s.done("truncate by name", cut_to(&s.at("file"), 30_000));
    s.note(
        "direct at the end",
        io::pread(&direct, &mut page.0[..], 28_672),
    );
    s.done(
        "create again",
        s.open("file", O::RDWR | O::CREATE | O::TRUNC),
    );
    s.note("size", fs::fstat(&direct).map(|st| st.st_size));
    s.note("other writes", io::pwrite(&other, b"after", 0));
    drop(direct);
    s.note("after the last direct one", s.content("file"));
    s.note("other reads", read_all(&other));
    // The data that was cached meanwhile is not the data that is there.
    page.0.fill(b'c');
    let again = s.open("file", O::WRONLY | O::DIRECT).unwrap();
    s.note("direct again", io::pwrite(&again, &page.0[..4096], 0));
    drop(again);
    s.note("content", s.content("file"));
    drop(other);
    for round in 0..5u8 {
        page.0.fill(round);
        let direct = s.open("file", O::WRONLY | O::DIRECT).unwrap();
        io::pwrite(&direct, &page.0[..4096], u64::from(round) * 4096).unwrap();
        drop(direct);
        s.note("content", s.content("file"));
    }
    // The flag comes and goes.
    let file = s.open("file", O::RDWR | O::DIRECT).unwrap();
    let flags = fs::fcntl_getfl(&file).unwrap();
    s.done("not direct", fs::fcntl_setfl(&file, flags - O::DIRECT));
    s.note("unaligned", io::pwrite(&file, b"unaligned", 3));
    s.done("direct", fs::fcntl_setfl(&file, flags));
    s.note("read", io::pread(&file, &mut page.0[..4096], 0));
    s.value("of it", page.0[..12].escape_ascii());
}

fn cut_to(path: &Path, size: u64) -> io::Result<()> {
    fs::ftruncate(fs::open(path, OFlags::WRONLY, Mode::empty())?, size)
}

/// The writer decides what is left of a file's mode.
pub fn direct_owners(s: &mut Scene) {
    use OFlags as O;
    let page = Box::new(Aligned([b'x'; 16384]));
    s.file("file", vec![b'a'; 8192]);
    let write = |path: &Path| {
        let file = fs::open(path, O::WRONLY | O::DIRECT, Mode::empty())?;
        io::pwrite(&file, &page.0[..4096], 0)
    };
    let path = s.at("file");
    for mode in [0o6777, 0o4777, 0o2767, 0o0777] {
        s.chmod("file", mode).unwrap();
        s.note("written by root", write(&path));
        s.note("mode", s.who("file"));
        s.chmod("file", mode).unwrap();
        s.note("written by another", as_nobody(|| write(&path)));
        s.note("mode", s.who("file"));
    }
    // Set while it is open.
    let open = |path: &Path| fs::open(path, O::WRONLY | O::DIRECT, Mode::empty());
    let file = as_nobody(|| open(&path)).unwrap();
    s.chmod("file", 0o6777).unwrap();
    s.note("mode", s.who("file"));
    s.note(
        "written by another",
        as_nobody(|| io::pwrite(&file, &page.0[..4096], 0)),
    );
    s.note("mode", s.who("file"));
    s.chmod("file", 0o600).unwrap();
    s.note("refused", as_nobody(|| open(&path)).map(drop));
    s.note(
        "allowed",
        as_nobody(|| io::pwrite(&file, &page.0[..4096], 4096)),
    );
    // Capabilities go with any write.
    let capability = [1, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let set = fs::setxattr(
        &path,
        "security.capability",
        &capability,
        XattrFlags::empty(),
    );
    s.done("capability", set);
    s.note("written", io::pwrite(&file, &page.0[..4096], 0));
    s.note(
        "left",
        fs::getxattr(&path, "security.capability", &mut [0; 64][..]),
    );
}
