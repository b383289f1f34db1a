//! A file's bytes: reads, writes, truncation, holes, copies, mappings.

use super::*;
use crate::harness::wait_for;

pub fn fallocate(s: &mut Scene) {
    let block = 65536;
    let all = FallocateFlags::empty();
    let keep = FallocateFlags::KEEP_SIZE;
    for (name, flags, offset, length) in [
        ("plain", all, 0, 3 * block),
        ("keep size", keep, block, 5 * block),
        ("punch", FallocateFlags::PUNCH_HOLE | keep, 1000, block),
        (
            "punch past the end",
            FallocateFlags::PUNCH_HOLE | keep,
            block,
            9 * block,
        ),
        ("punch without keep", FallocateFlags::PUNCH_HOLE, 0, block),
        ("zero", FallocateFlags::ZERO_RANGE, 500, 3 * block),
        (
            "zero keep",
            FallocateFlags::ZERO_RANGE | keep,
            500,
            3 * block,
        ),
        ("collapse", FallocateFlags::COLLAPSE_RANGE, 0, block),
        ("insert", FallocateFlags::INSERT_RANGE, 0, block),
        ("unshare", FallocateFlags::UNSHARE_RANGE, 0, block),
        ("nothing", all, 0, 0),
    ] {
        let file = s.file(name, vec![b'a'; 2 * block as usize]);
        s.done(name, fs::fallocate(&file, flags, offset, length));
        s.note(&format!("{name} size"), s.size(name));
        s.note(&format!("{name} content"), read_all(&file));
    }
    let file = s.file("large", "");
    s.done("more than there is", fs::fallocate(&file, all, 0, 1 << 40));
    // The space that a file system may have allocated for it would be missing in the other scenes.
    drop(file);
    fs::unlink(s.at("large")).unwrap();
    let file = s.open("plain", OFlags::RDONLY).unwrap();
    s.done("read-only", fs::fallocate(&file, all, 0, block));
    let file = s.file("space", "");
    // The last close of a FUSE file returns before its space is free.
    wait_for("the space of the large file", || {
        fs::fallocate(&file, all, 0, 16 * block) != Err(Errno::NOSPC)
    });
    fs::fsync(&file).unwrap();
    let blocks = fs::stat(s.at("space")).map(|st| st.st_blocks * 512 >= 16 * block as i64);
    s.note("has its blocks", blocks);
    fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | keep, 0, 16 * block).unwrap();
    fs::fsync(&file).unwrap();
    s.note(
        "gave them back",
        fs::stat(s.at("space")).map(|st| st.st_blocks * 512 < block as i64),
    );
}

pub fn holes(s: &mut Scene) {
    const M: u64 = 1 << 20;
    let file = s.file("file", "");
    fs::ftruncate(&file, 8 * M).unwrap();
    io::pwrite(&file, &[1; 65536], 2 * M).unwrap();
    io::pwrite(&file, &[1; 65536], 5 * M).unwrap();
    fs::fsync(&file).unwrap();
    for offset in [
        0,
        M,
        2 * M,
        2 * M + 1,
        2 * M + 65536,
        5 * M,
        6 * M,
        8 * M - 1,
        8 * M,
        9 * M,
    ] {
        s.note(
            &format!("data from {offset}"),
            fs::seek(&file, SeekFrom::Data(offset)),
        );
        s.note(
            &format!("hole from {offset}"),
            fs::seek(&file, SeekFrom::Hole(offset)),
        );
    }
    s.note("end", fs::seek(&file, SeekFrom::End(-1)));
    s.note(
        "before the start",
        fs::seek(&file, SeekFrom::End(-(9 * M as i64))),
    );
    s.note("position stays", fs::seek(&file, SeekFrom::Current(0)));
    let empty = s.file("empty", "");
    s.note("data of empty", fs::seek(&empty, SeekFrom::Data(0)));
    s.note("hole of empty", fs::seek(&empty, SeekFrom::Hole(0)));
    fs::ftruncate(&empty, M).unwrap();
    s.note("data of hole", fs::seek(&empty, SeekFrom::Data(0)));
    s.note(
        "blocks",
        fs::stat(s.at("file")).map(|st| (st.st_blocks * 512) as u64 <= 512 << 10),
    );
}

pub fn copy_range(s: &mut Scene) {
    let from = s.file(
        "from",
        (0..300_000u32).map(|n| (n % 251) as u8).collect::<Vec<_>>(),
    );
    let to = s.file("to", "");
    let (mut a, mut b) = (1000, 5);
    // A kernel may copy less than asked for.
    let mut copied = 0;
    while copied < 250_000 {
        match fs::copy_file_range(&from, Some(&mut a), &to, Some(&mut b), 250_000 - copied) {
            Ok(n) if n > 0 => copied += n,
            other => return s.note("copy", other),
        }
    }
    s.value("copied", format!("{copied} {a} {b}"));
    s.note("content", s.content("to"));
    s.note(
        "at the end",
        fs::copy_file_range(&from, Some(&mut 300_000), &to, None, 10),
    );
    let overlap = fs::copy_file_range(&from, Some(&mut 0), &from, Some(&mut 10), 100);
    s.note("overlap", overlap);
    let apart = fs::copy_file_range(&from, Some(&mut 0), &from, Some(&mut 200_000), 100);
    s.note("same file", apart);
    s.note("content of it", s.content("from"));
    let append = s.open("to", OFlags::WRONLY | OFlags::APPEND).unwrap();
    s.note(
        "to append",
        fs::copy_file_range(&from, Some(&mut 0), &append, None, 10),
    );
    let read_only = s.open("to", OFlags::RDONLY).unwrap();
    s.note(
        "to read-only",
        fs::copy_file_range(&from, Some(&mut 0), &read_only, None, 10),
    );
    let dir = s.open(".", OFlags::RDONLY).unwrap();
    s.note(
        "from directory",
        fs::copy_file_range(&dir, None, &to, None, 10),
    );
    let std_copy = std::fs::copy(s.at("from"), s.at("copy"));
    s.value("whole", std_copy.is_ok());
    s.note("whole content", s.content("copy"));
}

pub fn sync(s: &mut Scene) {
    let file = s.file("file", "content");
    s.done("fsync", fs::fsync(&file));
    s.done("fdatasync", fs::fdatasync(&file));
    let dir = s.open(".", OFlags::RDONLY).unwrap();
    s.done("directory", fs::fsync(&dir));
    s.done("directory's data", fs::fdatasync(&dir));
    s.done(
        "read-only",
        fs::fsync(s.open("file", OFlags::RDONLY).unwrap()),
    );
    s.done("path", fs::fsync(s.open("file", OFlags::PATH).unwrap()));
    s.done("file system", fs::syncfs(&file));
    fs::unlink(s.at("file")).unwrap();
    write_all(&file, b"more");
    s.done("unlinked", fs::fsync(&file));
    // SAFETY: the descriptor is open.
    let ranged =
        unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
    s.value("range", ranged);
}

pub fn mmap(s: &mut Scene) {
    const LENGTH: usize = 3 * 4096;
    let file = s.file("file", vec![b'a'; LENGTH - 100]);
    let map = |file: &OwnedFd, protection, flags| {
        // SAFETY: a new mapping at an address of the kernel's choice.
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), LENGTH, protection, flags, file, 0) }
    };
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let shared = match map(&file, both, MapFlags::SHARED) {
        Ok(pointer) => pointer.cast::<u8>(),
        Err(e) => return s.done("map", Err::<(), _>(e)),
    };
    // SAFETY: the mapping is LENGTH bytes, and the file reaches into its last page.
    let get = |offset: usize| unsafe { shared.add(offset).read_volatile() };
    // SAFETY: as above.
    let put = |offset: usize, byte: u8| unsafe { shared.add(offset).write_volatile(byte) };
    s.value("read", get(5000));
    s.value("past the end", get(LENGTH - 1));
    io::pwrite(&file, b"written", 5000).unwrap();
    s.value("written by the file", get(5000));
    put(100, b'M');
    let mut byte = [0];
    io::pread(&file, &mut byte[..], 100).unwrap();
    s.value("read by the file", byte[0]);
    // SAFETY: the range is mapped.
    let sync = unsafe { rustix::mm::msync(shared.cast(), LENGTH, rustix::mm::MsyncFlags::SYNC) };
    s.done("sync", sync);
    put(200, b'N');
    let other = s.open("file", OFlags::RDONLY).unwrap();
    io::pread(&other, &mut byte[..], 200).unwrap();
    s.value("read by another descriptor", byte[0]);
    s.value(
        "read-only, shared, writable",
        match map(&other, both, MapFlags::SHARED) {
            Ok(_) => "mapped".to_owned(),
            Err(e) => e.to_string(),
        },
    );
    let private = map(&other, both, MapFlags::PRIVATE).unwrap().cast::<u8>();
    // SAFETY: the mapping is LENGTH bytes, backed by the file.
    unsafe { private.write_volatile(b'P') };
    io::pread(&other, &mut byte[..], 0).unwrap();
    s.value("private stays private", byte[0]);
    put(300, b'O');
    drop((file, other));
    // SAFETY: mapped above and not used again.
    unsafe {
        rustix::mm::munmap(shared.cast(), LENGTH).unwrap();
        rustix::mm::munmap(private.cast(), LENGTH).unwrap();
    }
    s.note("after unmapping", s.content("file"));
    s.note("size", s.size("file"));
}

pub fn truncate(s: &mut Scene) {
    let file = s.file("file", vec![b'a'; 10_000]);
    for size in [5_000, 20_000, 4096, 4097, 0, 1, 1 << 30, 100] {
        s.done(&format!("to {size}"), fs::ftruncate(&file, size));
        s.note(&format!("size {size}"), s.size("file"));
        if size < 100_000 {
            s.note(&format!("content {size}"), read_all(&file));
        }
    }
    // The part that is cut off does not come back.
    io::pwrite(&file, &[b'z'; 8192], 0).unwrap();
    fs::ftruncate(&file, 10).unwrap();
    fs::ftruncate(&file, 8192).unwrap();
    s.note("grown again", read_all(&file));
    s.done("negative", fs::ftruncate(&file, u64::MAX));
    s.done("huge", fs::ftruncate(&file, (1 << 62) + 1));
    let read_only = s.open("file", OFlags::RDONLY).unwrap();
    s.done("read-only", fs::ftruncate(&read_only, 0));
    let dir = s.open(".", OFlags::RDONLY).unwrap();
    s.done("directory", fs::ftruncate(&dir, 0));
    let name = std::ffi::CString::new(s.at("file").into_os_string().into_vec()).unwrap();
    // SAFETY: the name ends with NUL.
    let by_path = unsafe { libc::truncate(name.as_ptr(), 77) };
    s.value("by path", by_path);
    s.note("by path size", s.size("file"));
    s.note("seen by the descriptor", fs::seek(&file, SeekFrom::End(0)));
}

pub fn read_and_write(s: &mut Scene) {
    let file = s.file("file", "");
    let mut expected = vec![0u8; 3 << 20];
    let mut state = 1u32;
    for _ in 0..300 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let offset = (state >> 8) as usize % (2 << 20);
        let length = (state >> 4) as usize % 40_000;
        let bytes = vec![(state >> 24) as u8; length];
        assert_eq!(io::pwrite(&file, &bytes, offset as u64), Ok(length));
        expected[offset..offset + length].copy_from_slice(&bytes);
    }
    let got = std::fs::read(s.at("file")).unwrap();
    s.value("random writes", expected.starts_with(&got));
    s.value("size", got.len());
    s.note(
        "read at the end",
        io::pread(&file, &mut [0; 10][..], got.len() as u64),
    );
    s.note("read far", io::pread(&file, &mut [0; 10][..], 1 << 40));
    s.note(
        "write at the limit",
        io::pwrite(&file, b"x", i64::MAX as u64),
    );
    s.note("write nothing", io::write(&file, b""));
    let slices = [b"one".as_slice(), b" two", b" three"].map(std::io::IoSlice::new);
    s.note("vector", io::pwritev(&file, &slices, 0));
    let (mut a, mut b) = ([0; 3], [0; 100]);
    let mut into = [
        std::io::IoSliceMut::new(&mut a),
        std::io::IoSliceMut::new(&mut b),
    ];
    s.note("read vector", io::preadv(&file, &mut into, 0));
    s.value(
        "is",
        format!("{} {}", a.escape_ascii(), b[..10].escape_ascii()),
    );
    let large = vec![b'L'; 5 << 20];
    let big = s.file("big", "");
    s.note("large write", io::write(&big, &large));
    let mut back = vec![0; 5 << 20];
    s.note("large read", io::pread(&big, &mut back[..], 0));
    s.value("large content", back == large);
    let pipe = rustix::pipe::pipe().unwrap();
    s.note(
        "splice out",
        rustix::pipe::splice(
            big.as_fd(),
            Some(&mut 0),
            pipe.1.as_fd(),
            None,
            4096,
            rustix::pipe::SpliceFlags::empty(),
        ),
    );
    s.note(
        "splice in",
        rustix::pipe::splice(
            pipe.0.as_fd(),
            None,
            file.as_fd(),
            Some(&mut 50),
            4096,
            rustix::pipe::SpliceFlags::empty(),
        ),
    );
    let mut byte = [0];
    io::pread(&file, &mut byte[..], 4000).unwrap();
    s.value("spliced", byte[0]);
}

/// Where data and holes are, while pages are dirty that nothing has written back yet.
pub fn seek(s: &mut Scene) {
    const LENGTH: usize = 512 << 10;
    const PAGE: usize = 4096;
    let file = s.file("file", "");
    fs::ftruncate(&file, LENGTH as u64).unwrap();
    let both = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let map = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            LENGTH,
            both,
            MapFlags::SHARED,
            &file,
            0,
        )
    };
    let map = map.unwrap().cast::<u8>();
    // SAFETY: the bytes are mapped, and the file has them.
    let store = |page: usize| unsafe { map.add(page * PAGE + 7).write_volatile(b'm') };
    let other = s.open("file", OFlags::RDONLY).unwrap();
    let mut note = |step: &str, file: &OwnedFd, at: usize| {
        let data = fs::seek(file, SeekFrom::Data(at as u64));
        s.note(&format!("{step}, data from {at}"), data);
        let hole = fs::seek(file, SeekFrom::Hole(at as u64));
        s.note(&format!("{step}, hole from {at}"), hole);
    };
    note("nothing written", &file, 0);
    store(20);
    for at in [0, 20 * PAGE, 21 * PAGE] {
        note("stored", &file, at);
    }
    // Behind data, and between.
    store(21);
    store(40);
    note("stored again", &file, 20 * PAGE);
    note("stored again", &file, 30 * PAGE);
    io::pwrite(&file, &[b'w'; PAGE], 60 * PAGE as u64).unwrap();
    note("written", &file, 50 * PAGE);
    note("written", &file, 60 * PAGE);
    io::pwrite(&file, b"beyond", LENGTH as u64 + 10_000).unwrap();
    for at in [LENGTH, LENGTH + 2 * PAGE, LENGTH + 10_005, LENGTH + 10_006] {
        note("longer", &file, at);
    }
    store(100);
    note("by another descriptor", &other, 90 * PAGE);
    store(110);
    // SAFETY: mapped above and not used again.
    unsafe { rustix::mm::munmap(map.cast(), LENGTH).unwrap() };
    note("unmapped", &other, 105 * PAGE);
    let cp = std::process::Command::new("cp")
        .args([s.at("file"), s.at("copy")])
        .status();
    s.value("cp", cp.is_ok_and(|status| status.success()));
    s.note("copy", s.content("copy"));
}
