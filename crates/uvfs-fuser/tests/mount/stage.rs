//! The file system that the tests mount: files that answer at once, late, never, or with a panic.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, SystemTime};

use uvfs_fuser::*;

const FOREVER: Duration = Duration::from_secs(1 << 20);
/// Files of the root directory, with the inode numbers from 2 on.
pub const NAMES: [&str; 6] = ["text", "late", "dropped", "panics", "meet", "said"];
pub const TEXT: u64 = 2;
const LATE: u64 = 3;
const DROPPED: u64 = 4;
const PANICS: u64 = 5;
const MEET: u64 = 6;
const SAID: u64 = 7;
/// Entries of the directory `many`.
pub const MANY: u64 = 3000;
const DIR: u64 = 100;

#[derive(Default)]
pub struct State {
    pub text: String,
    /// Notes of handlers.
    said: Vec<String>,
    /// Handlers of `meet` that run, and the most that ever did.
    running: usize,
    most: usize,
    pub waiting: Option<PollNotifier>,
    pub ready: bool,
}

#[derive(Clone, Default)]
pub struct Stage(Arc<(Mutex<State>, Condvar)>);

impl Stage {
    pub fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.0.0.lock().unwrap())
    }

    fn content(&self, ino: u64) -> String {
        self.with(|state| match ino {
            TEXT => state.text.clone(),
            SAID => state.said.join("\n"),
            MEET => state.most.to_string(),
            _ => "here\n".into(),
        })
    }

    fn attr(&self, ino: u64) -> FileAttr {
        let directory = ino == 1 || ino == DIR;
        let time = SystemTime::UNIX_EPOCH - Duration::from_millis(1500);
        FileAttr {
            ino: INodeNo(ino),
            size: self.content(ino).len() as u64,
            blocks: 1,
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind: match directory {
                true => FileType::Directory,
                false => FileType::RegularFile,
            },
            perm: if directory { 0o755 } else { 0o644 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    /// Waits until four run at once, or for a while.
    fn meet(&self) {
        let (state, more) = &*self.0;
        let mut state = state.lock().unwrap();
        state.running += 1;
        state.most = state.most.max(state.running);
        more.notify_all();
        let time = Duration::from_millis(300);
        let met = more.wait_timeout_while(state, time, |state| state.most < 4);
        met.unwrap().0.running -= 1;
    }
}

impl Filesystem for Stage {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        assert!(config.kernel_abi() >= Version(7, 31));
        config
            .add_capabilities(InitFlags::FUSE_DO_READDIRPLUS)
            .map_err(|_| io::ErrorKind::Unsupported.into())
    }

    fn destroy(&mut self) {
        println!("destroyed");
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let at = NAMES.iter().position(|known| *known == name);
        let ino = match (parent, at) {
            (INodeNo::ROOT, Some(at)) => at as u64 + 2,
            (INodeNo::ROOT, None) if name == "many" => DIR,
            _ => return reply.error(Errno::ENOENT),
        };
        let attr = self.attr(ino);
        if ino != LATE {
            return reply.entry(&FOREVER, &attr, Generation(0));
        }
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            reply.entry(&FOREVER, &attr, Generation(0));
        });
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOREVER, &self.attr(ino.0));
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let text = format!("setattr {} {:o}", ino.0, mode.unwrap_or(0));
        self.with(|state| state.said.push(text));
        reply.attr(&FOREVER, &self.attr(ino.0));
    }

    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let flags = match ino.0 {
            TEXT => FopenFlags::FOPEN_KEEP_CACHE,
            _ => FopenFlags::FOPEN_DIRECT_IO,
        };
        reply.opened(FileHandle(ino.0 + 1000), flags);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        assert_eq!(fh.0, ino.0 + 1000);
        match ino.0 {
            DROPPED => return,
            PANICS => panic!("a panic that the test wants"),
            MEET => self.meet(),
            _ => {}
        }
        let content = self.content(ino.0);
        let from = content.len().min(offset as usize);
        let to = content.len().min(from + size as usize);
        if ino.0 != LATE {
            return reply.data(&content.as_bytes()[from..to]);
        }
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            reply.data(&content.as_bytes()[from..to]);
        });
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let data_as_text = String::from_utf8_lossy(data);
        let mode = flags.acc_mode();
        let text = format!("write {} {offset} {data_as_text} {mode:?}", ino.0);
        self.with(|state| state.said.push(text));
        reply.written(data.len() as u32);
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        flush: bool,
        reply: ReplyEmpty,
    ) {
        let text = format!(
            "release {} {:?} {lock_owner:?} {flush}",
            ino.0,
            flags.acc_mode()
        );
        self.with(|state| state.said.push(text));
        reply.ok();
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let most = if ino.0 == DIR { MANY } else { 0 };
        for at in offset..most {
            let name = format!("name-{at}");
            let kind = FileType::RegularFile;
            if reply.add(INodeNo(10_000 + at), at + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn readdirplus(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let most = if ino.0 == DIR { MANY } else { 0 };
        for at in offset..most {
            let attr = self.attr(10_000 + at);
            let name = format!("name-{at}");
            if reply.add(attr.ino, at + 1, name, &FOREVER, &attr, Generation(0)) {
                break;
            }
        }
        reply.ok();
    }

    fn getxattr(&self, _: &Request, _: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let value = name.as_bytes();
        match size as usize {
            0 => reply.size(value.len() as u32),
            size if size < value.len() => reply.error(Errno::ERANGE),
            _ => reply.data(value),
        }
    }

    fn poll(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        ph: PollNotifier,
        events: PollEvents,
        flags: PollFlags,
        reply: ReplyPoll,
    ) {
        let ready = self.with(|state| {
            if flags.contains(PollFlags::FUSE_POLL_SCHEDULE_NOTIFY) {
                state.waiting = Some(ph);
            }
            state.ready
        });
        reply.poll(match ready {
            true => events & PollEvents::POLLIN,
            false => PollEvents::empty(),
        });
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        in_data: &[u8],
        out_size: u32,
        reply: ReplyIoctl,
    ) {
        let mut data = in_data.to_vec();
        data.reverse();
        data.truncate(out_size as usize);
        reply.ioctl(7, &data);
    }
}
