//! The same awkward file system served by fuser and by uvfs-fuser: programs have to see the same. Needs root and
//! /dev/fuse. Each server is another process, this test program again.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use uvfs_testing::{Need, has};

/// An ioctl that reads 8 bytes, and is answered with 16.
const TOO_LONG: u64 = 2 << 30 | 8 << 16 | 0x7701;
/// The same with 4.
const SHORT: u64 = 2 << 30 | 8 << 16 | 0x7702;

/// A module with the file system and its server, written for one of the two crates.
macro_rules! written_for {
    ($name:ident) => {
        mod $name {
            use std::ffi::OsStr;
            use std::io::Write;
            use std::time::{Duration, SystemTime};

            use $name::*;

            pub struct Awkward;

            fn attr(ino: INodeNo) -> FileAttr {
                let root = ino == INodeNo::ROOT;
                FileAttr {
                    ino,
                    size: 100,
                    blocks: 1,
                    atime: SystemTime::UNIX_EPOCH,
                    mtime: SystemTime::UNIX_EPOCH,
                    ctime: SystemTime::UNIX_EPOCH,
                    crtime: SystemTime::UNIX_EPOCH,
                    kind: if root {
                        FileType::Directory
                    } else {
                        FileType::RegularFile
                    },
                    perm: 0o755,
                    nlink: 1,
                    uid: 0,
                    gid: 0,
                    rdev: 0,
                    blksize: 4096,
                    flags: 0,
                }
            }

            const TTL: Duration = Duration::from_secs(1);

            impl Filesystem for Awkward {
                fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
                    for bits in [1 << 62, 1 << 62 | 1, 1] {
                        let asked = InitFlags::from_bits_retain(bits);
                        println!("capabilities {:?}", config.add_capabilities(asked));
                    }
                    Ok(())
                }

                fn destroy(&mut self) {
                    println!("destroyed");
                }

                fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
                    match name.to_str() {
                        Some("a") => reply.entry(&TTL, &attr(INodeNo(2)), Generation(0)),
                        Some("b") => reply.entry(&TTL, &attr(INodeNo(3)), Generation(0)),
                        _ => reply.error(Errno::ENOENT),
                    }
                }

                fn getattr(
                    &self,
                    _: &Request,
                    ino: INodeNo,
                    _: Option<FileHandle>,
                    reply: ReplyAttr,
                ) {
                    reply.attr(&TTL, &attr(ino));
                }

                fn copy_file_range(
                    &self,
                    _: &Request,
                    _: INodeNo,
                    _: FileHandle,
                    _: u64,
                    _: INodeNo,
                    _: FileHandle,
                    _: u64,
                    _: u64,
                    _: CopyFileRangeFlags,
                    reply: ReplyWrite,
                ) {
                    println!("copy");
                    reply.error(Errno::ENOSYS);
                }

                fn ioctl(
                    &self,
                    _: &Request,
                    _: INodeNo,
                    _: FileHandle,
                    _: IoctlFlags,
                    cmd: u32,
                    _: &[u8],
                    _: u32,
                    reply: ReplyIoctl,
                ) {
                    let len = if u64::from(cmd) == super::TOO_LONG {
                        16
                    } else {
                        4
                    };
                    reply.ioctl(5, &b"0123456789abcdef"[..len]);
                }
            }

            /// Serves until a line comes, and unmounts.
            pub fn serve(at: &str) {
                let mut config = Config::default();
                if std::env::var_os("UVFS_BESIDE_GUARDED").is_some() {
                    config.acl = SessionACL::All;
                    config.mount_options.push(MountOption::AutoUnmount);
                }
                let session = spawn_mount(Awkward, at, &config).unwrap();
                println!("\nready");
                std::io::stdin().read_line(&mut String::new()).unwrap();
                println!(
                    "{:?}",
                    session
                        .umount_and_join()
                        .map_err(|error| error.raw_os_error())
                );
                std::io::stdout().flush().unwrap();
            }
        }
    };
}

written_for!(fuser);
written_for!(uvfs_fuser);

/// Does nothing, unless this program is started as the server.
#[test]
fn serves() {
    let Ok(at) = std::env::var("UVFS_BESIDE_AT") else {
        return;
    };
    match std::env::var("UVFS_BESIDE_BY").as_deref() {
        Ok("fuser") => fuser::serve(&at),
        _ => uvfs_fuser::serve(&at),
    }
}

struct Server {
    at: PathBuf,
    process: Child,
    output: BufReader<ChildStdout>,
    said: String,
    _dir: tempfile::TempDir,
}

impl Server {
    fn new(by: &str, guarded: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().canonicalize().unwrap().join("mount");
        fs::create_dir(&at).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["serves", "--exact", "--nocapture"]);
        if guarded {
            command.env("UVFS_BESIDE_GUARDED", "");
        }
        let mut process = command
            .env("UVFS_BESIDE_AT", &at)
            .env("UVFS_BESIDE_BY", by)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut server = Self {
            at,
            process,
            output,
            said: String::new(),
            _dir: dir,
        };
        let mut line = String::new();
        while line.trim_end() != "ready" {
            server.said.push_str(&line);
            line.clear();
            assert!(server.output.read_line(&mut line).unwrap() > 0, "no mount");
        }
        server
    }

    /// Has it unmount; all that it has said.
    fn end(mut self, meanwhile: impl FnOnce()) -> String {
        drop(self.process.stdin.take());
        meanwhile();
        self.output.read_to_string(&mut self.said).unwrap();
        assert!(self.process.wait().unwrap().success());
        let heard = self.said.lines().filter(|line| {
            ["capab", "copy", "destr", "Ok", "Err"]
                .iter()
                .any(|word| line.starts_with(word))
        });
        heard.collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn ioctl(file: &File, command: u64) -> String {
    let mut data = [0u8; 8];
    // SAFETY: the command has room for 8 bytes, which `data` has, and only this file system knows it.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), command as _, &mut data) };
    let error = std::io::Error::last_os_error().raw_os_error();
    match result {
        -1 => format!("{error:?}"),
        _ => format!("{result} {data:?}"),
    }
}

fn calls(by: &str) -> String {
    let server = Server::new(by, false);
    let mut outcomes = Vec::new();
    let (one, other) = (File::open(server.at.join("a")), server.at.join("b"));
    let (one, other) = (
        one.unwrap(),
        File::options().write(true).open(other).unwrap(),
    );
    outcomes.push(ioctl(&one, TOO_LONG));
    outcomes.push(ioctl(&one, SHORT));
    for _ in 0..3 {
        let copied = rustix::fs::copy_file_range(&one, None, &other, None, 10);
        outcomes.push(format!("{copied:?}"));
    }
    drop((one, other));
    format!("{outcomes:?} {}", server.end(|| {}))
}

/// Callers of awkward handlers get the same as with fuser, and a copy that copies nothing is asked for once.
#[test]
fn awkward_handlers() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let (expected, got) = (calls("fuser"), calls("uvfs"));
    assert_eq!(got, expected);
    assert_eq!(got.matches("copy").count(), 1, "{got}");
    assert!(got.contains("Some(5)") && got.contains("Ok(())"), "{got}");
}

/// A session with AutoUnmount that is in use is unmounted, and answers Ok. fuser leaves that to fusermount3, of
/// which some versions leave the mount there.
#[test]
fn unmounting_a_guarded_mount_in_use() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let server = Server::new("uvfs", true);
    let at = server.at.clone();
    let user = File::open(&at).unwrap();
    let said = server.end(move || {
        let gone = || uvfs_server::mount::mounted(&at).unwrap().is_none();
        for _ in 0..2000 {
            if gone() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(gone(), "still mounted");
        drop(user);
    });
    assert!(said.ends_with("destroyed\nOk(())"), "{said}");
}
