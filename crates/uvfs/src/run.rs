//! `uvfs run`: a program whose file I/O on uvfs mounts goes over shared memory.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::ValueHint;
use uvfs_cli::{Context, Error, Result, duration, size, warn};

const LIBRARY: &str = "libuvfs_preload.so";

const EXAMPLES: &str = "\
Examples:
  uvfs run --report -- dd if=/dev/zero of=/mnt/large bs=4k count=100000
  uvfs run --report -- fio --filename=/mnt/file --rw=write --bs=4k --size=1G --name=job

The program and its children run as always. A process that writes fast to files on a uvfs mount, or
reads the same file again and again, attaches to the mount's server, and its reads and writes of those
files no longer go through the kernel. Other processes and files stay with the kernel, where they are
as fast as without this command. So does whatever can't be served (other file systems, mmap, io_uring,
a mount with -o writeback, a server that ends and doesn't come back in time). Static programs,
those of musl, and those with the set-user-id bit run as without this command.

A directory that root mounts gains nothing: the kernel itself reads and writes the files that programs use much (uvfs
mount -o passthrough). Mounts by other users, and file systems that have no files of the host, do.

Environment:
  UVFS_PRELOAD   the library, when libuvfs_preload.so is neither beside the command nor in ../lib

Exit status: the program's; 126 it can't be run, 127 it is not there, 1 other failures, 2 wrong usage.";

/// Run a program over shared memory.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Shared memory of each process (default 64M)
    #[arg(long, value_parser = size, value_name = "SIZE")]
    cache: Option<u64>,
    /// How long calls wait for a server that went to come back (default 5s)
    #[arg(long, value_parser = duration, value_name = "TIME")]
    reconnect: Option<Duration>,
    /// How long a server may answer nothing before it counts as one that went (default 30s)
    #[arg(long, value_parser = duration, value_name = "TIME")]
    timeout: Option<Duration>,
    /// Serve every file from its first call on, also where that does not pay
    #[arg(long)]
    eager: bool,
    /// Say on standard error, at the end of each process, what was served and why the rest was not
    #[arg(long)]
    report: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND", value_hint = ValueHint::CommandWithArguments)]
    command: Vec<OsString>,
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let library = library()?;
    let (program, rest) = args.command.split_first().expect("clap wants one");
    let found = find(program);
    let unsuited = found.as_deref().and_then(unsuited);
    if let Some(why) = unsuited {
        warn(format!(
            "{}: {why}; it runs as without uvfs run",
            program.display()
        ));
    }
    let mut preload = OsString::from(nameable(library)?);
    if let Some(more) = std::env::var_os("LD_PRELOAD").filter(|more| !more.is_empty()) {
        // First, so that what another library does with a file ends here.
        preload = [more, preload].join(&OsString::from(":"));
    }
    // Found already; else it fails, as execvp(3) says.
    let mut command = Command::new(found.as_deref().unwrap_or(Path::new(program)));
    command.arg0(program).args(rest);
    if unsuited != Some(OTHER_LIBRARY) {
        command.env("LD_PRELOAD", preload);
    }
    if let Some(bytes) = args.cache {
        command.env("UVFS_RUN_CACHE", bytes.to_string());
    }
    if let Some(bound) = args.reconnect {
        command.env("UVFS_RUN_RECONNECT", bound.as_secs_f64().to_string());
    }
    if let Some(bound) = args.timeout {
        command.env("UVFS_RUN_TIMEOUT", bound.as_secs_f64().to_string());
    }
    match args.report {
        true => command.env("UVFS_RUN_REPORT", "1"),
        false => command.env_remove("UVFS_RUN_REPORT"),
    };
    match args.eager {
        true => command.env("UVFS_RUN_EAGER", "1"),
        false => command.env_remove("UVFS_RUN_EAGER"),
    };
    // Its runtime wants to come before all other libraries, and works behind this one.
    let mut options = std::env::var_os("ASAN_OPTIONS").unwrap_or_default();
    if !options.is_empty() {
        options.push(":");
    }
    options.push("verify_asan_link_order=0");
    command.env("ASAN_OPTIONS", options);
    let error = command.exec();
    let code = match error.kind() {
        std::io::ErrorKind::NotFound => 127,
        _ => 126,
    };
    Err(Error::new(format!("{}: {error}", program.display())).with_code(code))
}

/// Where the library is.
pub fn library() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("UVFS_PRELOAD") {
        return PathBuf::from(&path)
            .canonicalize()
            .context(|| path.display().to_string());
    }
    let exe = std::env::current_exe().context(|| "this command's own path".into())?;
    let dir = exe.parent().unwrap_or(Path::new("/"));
    // Cargo always updates the one in `deps`, and the one beside the command only where it was asked for the package.
    ["deps", "", "../lib", "../lib/uvfs"]
        .map(|place| dir.join(place).join(LIBRARY))
        .into_iter()
        .find_map(|path| path.canonicalize().ok())
        .ok_or_else(|| {
            Error::new(format!(
                "{LIBRARY} is neither in {} nor in ../lib of it (UVFS_PRELOAD says where it is)",
                dir.display()
            ))
        })
}

/// A path of the library that LD_PRELOAD can hold, where colons and spaces separate: its own, or that of a
/// symbolic link in a directory of this user's.
fn nameable(library: PathBuf) -> Result<PathBuf> {
    let separates = |path: &Path| {
        let bytes = path.as_os_str().as_encoded_bytes();
        bytes.iter().any(|byte| b": \t\n".contains(byte))
    };
    if !separates(&library) {
        return Ok(library);
    }
    let user = rustix::process::geteuid().as_raw();
    let dir = std::env::temp_dir().join(format!("uvfs-run-{user}"));
    if separates(&dir) {
        return Err(Error::new(format!(
            "{}: LD_PRELOAD can't hold a path with a colon or a space, nor can {} (set TMPDIR)",
            library.display(),
            dir.display()
        )));
    }
    let context = || dir.display().to_string();
    match std::fs::DirBuilder::new().mode(0o700).create(&dir) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(error).context(context);
        }
        _ => {}
    }
    let found = dir.symlink_metadata().context(context)?;
    if !found.is_dir() || found.uid() != user || found.mode() & 0o022 != 0 {
        return Err(Error::new(format!(
            "{}: not a directory that only this user can write to",
            dir.display()
        )));
    }
    let inode = library.metadata().context(context)?;
    let link = dir.join(format!("{:x}-{:x}.so", inode.dev(), inode.ino()));
    if std::fs::read_link(&link).ok().as_deref() != Some(&*library) {
        // Put in place at once: another command may use it.
        let new = dir.join(format!("new-{}", std::process::id()));
        let _ = std::fs::remove_file(&new);
        std::os::unix::fs::symlink(&library, &new).context(context)?;
        std::fs::rename(&new, &link).context(context)?;
    }
    Ok(link)
}

/// The file that a command's name means, as execvp(3) finds it.
pub fn find(program: &OsString) -> Option<PathBuf> {
    let path = Path::new(program);
    if path.components().count() > 1 {
        return Some(path.to_owned());
    }
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|dir| dir.join(path))
        .find(|path| {
            let found = path.metadata();
            found.is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
        })
}

/// A reason of [`unsuited`]. The program's dynamic linker would not start it with a library that needs glibc.
const OTHER_LIBRARY: &str = "is of another C library";

/// Why the dynamic linker would not load the library, as far as the file tells.
fn unsuited(path: &Path) -> Option<&'static str> {
    let mode = path.metadata().ok()?.permissions().mode();
    if mode & 0o6000 != 0 && !rustix::process::geteuid().is_root() {
        return Some("runs as another user");
    }
    let mut head = [0; 4096];
    let mut file = std::fs::File::open(path).ok()?;
    let len = file.read(&mut head).ok()?;
    match interpreter(&head[..len])? {
        b"" => Some("is statically linked"),
        // A name that ld.so(8) never has.
        other if other.windows(7).any(|at| at == b"ld-musl") => Some(OTHER_LIBRARY),
        _ => None,
    }
}

/// The interpreter that an ELF file of this machine's kind names, empty for none; nothing for other files.
fn interpreter(head: &[u8]) -> Option<&[u8]> {
    const PT_INTERP: u32 = 3;
    let word = |at: usize, len: usize| {
        let mut bytes = [0; 8];
        bytes[..len].copy_from_slice(head.get(at..at.checked_add(len)?)?);
        Some(u64::from_le_bytes(bytes))
    };
    // ELFCLASS64, little endian (elf(5)).
    if head.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (from, size, count) = (word(32, 8)? as usize, word(54, 2)? as usize, word(56, 2)?);
    for index in 0..count as usize {
        let header = from.checked_add(index * size)?;
        if word(header, 4)? as u32 == PT_INTERP {
            let (at, len) = (
                word(header + 8, 8)? as usize,
                word(header + 32, 8)? as usize,
            );
            return head.get(at..at.checked_add(len)?);
        }
    }
    Some(b"")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A static program, which `uvfs run` can't serve, is recognised.
    #[test]
    fn static_programs_are_told_from_others() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let found = interpreter(&own[..4096]).unwrap();
        assert!(found.windows(8).any(|at| at == b"ld-linux"), "{found:?}");
        let mut other = own[..4096].to_vec();
        other[56..58].copy_from_slice(&[0, 0]);
        assert_eq!(interpreter(&other), Some(&b""[..]));
        assert_eq!(interpreter(b"#!/bin/sh\n"), None);
        for len in 0..200 {
            let _ = interpreter(&own[..len]);
        }
    }
}
