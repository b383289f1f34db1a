//! Acting as the caller.
//!
//! The kernel of the mount checks what a caller may do (`default_permissions`), by attributes that it has cached. A
//! program of the host may change or replace the file between that check and the server's call. So a call that
//! changes a name or attributes runs with the caller's file-system ids, and without the capabilities that override
//! permissions: the host checks again, at the moment of the change ([`Creds::as_caller`]).
//!
//! A request names one group of its caller. The first attempt is made with that group alone. If the host refuses it,
//! a second one is made with the groups and capabilities that /proc/PID/status tells. Where /proc doesn't show the
//! caller (another pid namespace), the server's own rights decide, as the kernel's check has to do there.
//!
//! A securebit keeps the server's other capabilities from being dropped as the id changes.
//!
//! Calls that take space for a caller on a file system that keeps blocks for root run as the caller, too: it gives
//! those blocks to each process with root's file-system user id.

use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::pin::pin;
use std::sync::Once;

use rustix::fs::{Access, Gid, OFlags};
use rustix::io::Errno;
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, capabilities, set_capabilities,
    set_thread_groups,
};
use std::os::fd::BorrowedFd;
use uvfs_io::runtime;
use uvfs_server::fs::{Context, Mode};

use crate::sys::{self, Result};

/// The user and group whom a file system keeps nothing for.
const NOBODY: u32 = 65534;

/// Capabilities by which a call passes the host's checks of permissions and owners.
const OVERRIDES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER);

/// The kernel opens a file to execute it (include/linux/fs.h).
pub(crate) const FMODE_EXEC: u32 = 0x20;

/// The credentials that a thread was made ready with.
#[derive(Clone, Copy)]
struct Thread {
    /// The server's capabilities, if the thread has no supplementary groups: then it can act as a caller.
    acts: Option<CapabilitySets>,
    /// It has a umask of its own.
    own_umask: bool,
    /// Its umask, if set here.
    umask: Option<Mode>,
}

thread_local! {
    static THREAD: Cell<Option<Thread>> = const { Cell::new(None) };
}

fn thread() -> Thread {
    THREAD.with(|cell| {
        if let Some(thread) = cell.get() {
            return thread;
        }
        let own_umask = match sys::unshare_fs() {
            Ok(()) => true,
            Err(errno) => {
                static WARN: Once = Once::new();
                WARN.call_once(|| {
                    tracing::warn!(%errno, "no umask per thread; default ACLs are cut by it");
                });
                false
            }
        };
        if let Ok(bits) = rustix::thread::capabilities_secure_bits() {
            // Without it a caller's files are made without the server's capabilities, which is
            // stricter than the kernel's own check, not laxer.
            let _ = rustix::thread::set_capabilities_secure_bits(
                bits | CapabilitiesSecureBits::NO_SETUID_FIXUP,
            );
        }
        // The server's own groups would be the callers' as well.
        let alone = rustix::process::geteuid().is_root() && set_thread_groups(&[]).is_ok();
        let thread = Thread {
            acts: alone.then(|| capabilities(None).ok()).flatten(),
            own_umask,
            umask: None,
        };
        cell.set(Some(thread));
        thread
    })
}

/// Whether this process may do what administrators may (CAP_SYS_ADMIN).
pub(crate) fn is_administrator() -> bool {
    capabilities(None).is_ok_and(|now| now.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// Calls `work` without CAP_FSETID, whose holders' writes leave set-user-id and set-group-id as they
/// are. The kernel writes to a backing file with the capabilities of the thread that registered it.
pub(crate) fn without_fsetid<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let before = capabilities(None)?;
    if !before.effective.contains(CapabilitySet::FSETID) {
        return work();
    }
    let mut less = before;
    less.effective -= CapabilitySet::FSETID;
    set_capabilities(None, less)?;
    let done = work();
    set_capabilities(None, before).expect("what is permitted can be had again");
    done
}

/// Whether the caller is in this group, or may keep set-group-id of a file of any (CAP_FSETID). A request
/// tells one group; the others, and what root may do, are in /proc, if the caller has an id there.
pub(crate) fn in_group_or_capable(cx: &Context, gid: u32) -> bool {
    cx.gid == gid
        || cx.group == Some(gid)
        || match Status::of(cx) {
            Some(status) => status.keeps_set_id() || status.groups.contains(&Gid::from_raw(gid)),
            None => cx.uid == 0,
        }
}

/// Whether what the caller writes leaves set-user-id and set-group-id (CAP_FSETID), for requests that don't
/// tell. Only root's: others have no capability where the server is.
pub(crate) fn keeps_set_id(cx: &Context) -> bool {
    cx.uid == 0 && Status::of(cx).is_none_or(|status| status.keeps_set_id())
}

/// The credentials of a caller, from /proc.
struct Status {
    uid: u32,
    groups: Vec<Gid>,
    /// In the caller's own user namespace.
    capabilities: CapabilitySet,
}

impl Status {
    /// `None` where it is not to be seen. The file takes no lock that its thread could hold while it waits for
    /// the answer.
    fn of(cx: &Context) -> Option<Self> {
        if cx.pid == 0 {
            return None;
        }
        let text = std::fs::read_to_string(format!("/proc/{}/status", cx.pid)).ok()?;
        Self::parse(&text, cx.uid)
    }

    /// Of a thread that acts as this user.
    fn parse(text: &str, uid: u32) -> Option<Self> {
        let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
        let fsuid = value("Uid:")?.split_whitespace().nth(3)?;
        if fsuid.parse() != Ok(uid) {
            return None;
        }
        let groups = value("Groups:")?.split_whitespace();
        let capabilities = u64::from_str_radix(value("CapEff:")?.trim(), 16).ok()?;
        Some(Self {
            uid,
            groups: (groups.filter_map(|gid| gid.parse().ok()))
                .map(Gid::from_raw)
                .collect(),
            capabilities: CapabilitySet::from_bits_retain(capabilities),
        })
    }

    /// Root's CAP_FSETID. Others have no capability where the server is.
    fn keeps_set_id(&self) -> bool {
        self.uid == 0 && self.capabilities.contains(CapabilitySet::FSETID)
    }

    /// The checks that the caller may override. In a user namespace that it made itself a caller has every capability,
    /// and the host gives it none: there its ids are mapped in another way than the server's.
    fn overrides(&self, cx: &Context) -> CapabilitySet {
        let overrides = self.capabilities & OVERRIDES;
        if overrides.is_empty() {
            return overrides;
        }
        let map = |process: &str| std::fs::read(format!("/proc/{process}/uid_map")).ok();
        match (map(&cx.pid.to_string()), map("thread-self")) {
            (Some(theirs), Some(ours)) if theirs == ours => overrides,
            _ => CapabilitySet::empty(),
        }
    }
}

/// Whom the server runs as.
#[derive(Clone, Copy)]
pub(crate) struct Creds {
    uid: u32,
    gid: u32,
    /// The kernel checks what callers may do, so the host has to check it, too.
    checks: bool,
}

impl Creds {
    /// `checks`: the kernel checks what callers may do.
    pub(crate) fn new(checks: bool) -> Self {
        let (uid, gid) = (
            rustix::process::geteuid().as_raw(),
            rustix::process::getegid().as_raw(),
        );
        Self { uid, gid, checks }
    }

    /// Whether the server may do what this caller may not.
    pub(crate) fn exceeds(&self, cx: &Context) -> bool {
        self.is_root() && self.checks && cx.uid != self.uid
    }

    /// Calls `work` as the caller: the host refuses what the caller may not do. `umask` is only for what makes a file.
    pub(crate) fn as_caller<T>(
        &self,
        cx: &Context,
        umask: Option<Mode>,
        work: impl Fn(&Caller) -> Result<T>,
    ) -> Result<T> {
        let become_caller = || match umask {
            Some(umask) => self.caller(cx, umask),
            None => self.caller_without_umask(cx),
        };
        let Some(server) = (self.exceeds(cx).then(|| thread().acts)).flatten() else {
            let mut caller = become_caller()?;
            caller.unchecked = self.exceeds(cx);
            return work(&caller);
        };
        let attempt = |groups: &[Gid], overrides| {
            let caller = become_caller()?;
            let _rights = Rights::limit(server, groups, overrides)?;
            work(&caller)
        };
        match attempt(&[], CapabilitySet::empty()) {
            Err(Errno::ACCESS | Errno::PERM) => {}
            done => return done,
        }
        match Status::of(cx) {
            Some(status) => attempt(&status.groups, status.overrides(cx)),
            // The kernel of the mount has checked by the caller's groups. Whose a file is the host can tell by the user.
            None => {
                let mut caller = become_caller()?;
                caller.unchecked = true;
                let _rights = Rights::limit(server, &[], OVERRIDES - CapabilitySet::FOWNER)?;
                work(&caller)
            }
        }
    }

    /// Whether the caller may open the file that `fd` is open to, with these flags. `unseen` is the answer where the
    /// host can't tell.
    pub(crate) fn may_open(
        &self,
        cx: &Context,
        fd: BorrowedFd<'_>,
        asked: OFlags,
        unseen: bool,
    ) -> bool {
        let access = match asked & OFlags::ACCMODE {
            _ if asked.bits() & FMODE_EXEC != 0 => Access::EXEC_OK,
            OFlags::RDONLY => Access::READ_OK,
            OFlags::WRONLY => Access::WRITE_OK,
            _ => Access::READ_OK | Access::WRITE_OK,
        };
        let check = |caller: &Caller| match caller.unchecked {
            true if unseen => Ok(()),
            true => Err(Errno::ACCESS),
            false => sys::access(fd, access),
        };
        if !self.exceeds(cx) {
            return true;
        }
        // Kernels before 5.8 can't tell.
        !matches!(
            self.as_caller(cx, None, check),
            Err(Errno::ACCESS | Errno::PERM)
        )
    }

    /// Whether the server is root, whom no permission of the host keeps out, and who may make files of other users.
    pub(crate) fn is_root(&self) -> bool {
        self.uid == 0
    }

    /// Makes this thread one of the caller until the guard goes. There is no `await` in between,
    /// as the guard is of this thread alone.
    pub(crate) fn caller(&self, cx: &Context, umask: Mode) -> Result<Caller> {
        let umask = umask & (Mode::RWXU | Mode::RWXG | Mode::RWXO);
        let mut thread = thread();
        if thread.umask != Some(umask) {
            let set = if thread.own_umask {
                umask
            } else {
                Mode::empty()
            };
            rustix::process::umask(set);
            thread.umask = Some(umask);
            THREAD.set(Some(thread));
        }
        let mask = if thread.own_umask {
            Mode::empty()
        } else {
            umask
        };
        let mut caller = Caller {
            uid: None,
            gid: None,
            mask,
            unchecked: false,
            thread: PhantomData,
        };
        if !self.is_root() {
            return Ok(caller);
        }
        if cx.uid == u32::MAX || cx.gid == u32::MAX {
            // The caller has no id here.
            return Err(Errno::OVERFLOW);
        }
        if cx.gid != self.gid {
            sys::setfsgid(cx.gid);
            caller.gid = Some(self.gid);
            // Errors are only seen by asking again; an id may have no meaning in a user namespace.
            if sys::setfsgid(u32::MAX) != cx.gid {
                return Err(Errno::OVERFLOW);
            }
        }
        if cx.uid != self.uid {
            sys::setfsuid(cx.uid);
            caller.uid = Some(self.uid);
            if sys::setfsuid(u32::MAX) != cx.uid {
                return Err(Errno::OVERFLOW);
            }
        }
        Ok(caller)
    }

    /// The user who takes the space for a caller's data, where that is not the server. `from_cache`: the kernel's page
    /// cache writes, and does not tell for which caller.
    pub(crate) fn spender(
        &self,
        cx: &Context,
        reserves: bool,
        from_cache: bool,
    ) -> Option<Spender> {
        if !reserves || !self.is_root() {
            return None;
        }
        let cx = match from_cache && cx.pid == 0 {
            true => nobody(cx),
            false => *cx,
        };
        (cx.uid != 0).then_some(Spender { creds: *self, cx })
    }

    /// The user `nobody`, for writes without a request.
    pub(crate) fn nobody(&self, reserves: bool) -> Option<Spender> {
        self.spender(&Context::default(), reserves, true)
    }

    /// The umask does not matter, the owner does.
    pub(crate) fn caller_without_umask(&self, cx: &Context) -> Result<Caller> {
        let umask = thread().umask.unwrap_or(Mode::WGRP | Mode::WOTH);
        self.caller(cx, umask)
    }
}

fn nobody(cx: &Context) -> Context {
    Context {
        uid: NOBODY,
        gid: NOBODY,
        ..*cx
    }
}

/// A caller who takes space of the host's file system, but not what that keeps for root. In a user namespace that
/// lacks the caller's id nothing is kept for the server's root.
#[derive(Clone, Copy)]
pub(crate) struct Spender {
    creds: Creds,
    cx: Context,
}

impl Spender {
    /// Makes this thread one of the caller until the guard goes.
    pub(crate) fn here(&self) -> Option<Caller> {
        self.creds.caller_without_umask(&self.cx).ok()
    }

    /// The credentials for the ring: those of the user `nobody`, for all callers.
    fn personality(&self) -> Option<u16> {
        runtime::personality().or_else(|| {
            let _nobody = (self.creds.caller_without_umask(&nobody(&self.cx))).ok()?;
            runtime::register_personality().ok()
        })
    }

    /// Runs `work` as the caller, in this thread and on the ring, and gives its result.
    pub(crate) async fn spends<T>(self, work: impl Future<Output = T>) -> T {
        let personality = self.personality().unwrap_or(0);
        let mut work = pin!(work);
        std::future::poll_fn(|cx| {
            let _caller = self.here();
            runtime::with_personality(personality, || work.as_mut().poll(cx))
        })
        .await
    }
}

/// While it lives, this thread makes files of the caller.
pub(crate) struct Caller {
    /// The former ids, to set back.
    uid: Option<u32>,
    gid: Option<u32>,
    /// The umask where it can't be the thread's.
    mask: Mode,
    /// The caller may do less than the host allows now.
    pub(crate) unchecked: bool,
    /// Stays on its thread.
    thread: PhantomData<*const ()>,
}

impl Caller {
    /// The mode to ask the host for.
    pub(crate) fn mode(&self, mode: Mode) -> Mode {
        mode - self.mask
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if let Some(uid) = self.uid {
            sys::setfsuid(uid);
        }
        if let Some(gid) = self.gid {
            sys::setfsgid(gid);
        }
    }
}

/// While it lives, this thread has the caller's groups, and of [`OVERRIDES`] only what the caller has.
struct Rights {
    server: CapabilitySets,
    groups: bool,
    /// Stays on its thread.
    thread: PhantomData<*const ()>,
}

impl Rights {
    fn limit(server: CapabilitySets, groups: &[Gid], overrides: CapabilitySet) -> Result<Self> {
        let rights = Self {
            server,
            groups: !groups.is_empty(),
            thread: PhantomData,
        };
        if rights.groups {
            set_thread_groups(groups)?;
        }
        let mut less = server;
        less.effective -= OVERRIDES - overrides;
        set_capabilities(None, less)?;
        Ok(rights)
    }
}

impl Drop for Rights {
    fn drop(&mut self) {
        set_capabilities(None, self.server).expect("what is permitted can be had again");
        if self.groups {
            set_thread_groups(&[]).expect("a thread that could set its groups can clear them");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A caller has its own groups and capabilities, not those of another process.
    #[test]
    fn a_callers_groups_and_capabilities_are_read() {
        let text = "Name:\tx\nUid:\t1\t2\t3\t7\nGroups:\t5 3000 \nCapEff:\t0000000000000010\n";
        let status = Status::parse(text, 7).unwrap();
        assert!(!status.keeps_set_id());
        assert_eq!(status.groups, [5, 3000].map(Gid::from_raw));
        let root = text.replace("\t7", "\t0");
        assert!(Status::parse(&root, 0).unwrap().keeps_set_id());
        let without = root.replace("10\n", "00\n");
        assert!(!Status::parse(&without, 0).unwrap().keeps_set_id());
        // Another thread has the number now.
        assert!(Status::parse(text, 0).is_none());
        assert!(Status::parse("Uid:\t1\n", 1).is_none());
    }
}
