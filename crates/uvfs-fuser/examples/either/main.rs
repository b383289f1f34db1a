//! A file system in memory, written against fuser's interface:
//!
//! `cargo run --release -p uvfs-fuser --example either -- MOUNTPOINT [--threads N] [--fuser]`
//!
//! `umount MOUNTPOINT` ends it. uvfs serves it, or with `--fuser` fuser's own session: one line below is all
//! that differs.

#[path = "."]
mod with_uvfs {
    use uvfs_fuser as serving;

    #[path = "fs.rs"]
    pub mod fs;
}

// The same file twice: it implements the trait of each.
#[allow(clippy::duplicate_mod)]
#[path = "."]
mod with_fuser {
    use fuser as serving;

    #[path = "fs.rs"]
    pub mod fs;
}

fn main() -> std::io::Result<()> {
    let (mut mountpoint, mut threads, mut by_fuser) = (None, None, false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--threads" => threads = args.next().and_then(|number| number.parse().ok()),
            "--fuser" => by_fuser = true,
            _ => mountpoint = Some(arg.into()),
        }
    }
    let Some(mountpoint) = mountpoint else {
        eprintln!("usage: either MOUNTPOINT [--threads N] [--fuser]");
        std::process::exit(2);
    };
    let mountpoint: std::path::PathBuf = mountpoint;
    match by_fuser {
        false => with_uvfs::fs::serve(&mountpoint, threads),
        true => with_fuser::fs::serve(&mountpoint, threads),
    }
}
