//! A program's file system as uvfs serves it: how a handler is called, and the values that both sides know.

use std::ffi::{CStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, SystemTime};

use uvfs_proto::abi;
use uvfs_server::fs::{self, Context, Result};

use crate::buffers::Buffers;
use crate::calls::{Calls, Held};
use crate::reply::Reply;
use crate::slot::slot;
use crate::*;

/// A program's file system, as uvfs serves it.
pub(crate) struct Adapter<FS: Filesystem> {
    pub(crate) calls: Calls<FS>,
    pub(crate) held: Arc<Held<FS>>,
    pub(crate) device: Arc<OwnedFd>,
    /// Set before the first request.
    pub(crate) session: OnceLock<Arc<dyn fs::SessionHandle>>,
    /// The same, if the mount outlives this process.
    pub(crate) outlives: OnceLock<Arc<dyn fs::SessionHandle>>,
    pub(crate) buffers: Arc<Buffers>,
    acl: SessionACL,
    owner: u32,
    /// The error of the program's `init`.
    pub(crate) failed: Arc<Mutex<Option<io::Error>>>,
}

impl<FS: Filesystem> Adapter<FS> {
    pub(crate) fn new(
        held: Arc<Held<FS>>,
        device: Arc<OwnedFd>,
        acl: SessionACL,
        threads: usize,
    ) -> io::Result<Self> {
        let queues = std::thread::available_parallelism()?.get();
        Ok(Self {
            calls: Calls::new(held.clone(), threads, queues)?,
            held,
            device,
            session: OnceLock::new(),
            outlives: OnceLock::new(),
            buffers: Arc::default(),
            acl,
            owner: rustix::process::geteuid().as_raw(),
            failed: Arc::default(),
        })
    }

    /// Has the program choose from what the kernel offers.
    pub(crate) fn negotiate(&self, config: &mut fs::Config) -> Result<()> {
        // The transport needs these; the program chooses the others.
        let needed =
            fs::InitFlags::INIT_EXT | fs::InitFlags::ABORT_ERROR | fs::InitFlags::HAS_RESEND;
        let offered = InitFlags::from_bits_retain(config.offered.bits());
        let version = Version(abi::KERNEL_VERSION, config.minor);
        let mut wanted = KernelConfig::new(offered, config.max_readahead, version);
        let request = Request::of_none();
        let done = (self.held).with_mut(|fs| fs.init(&request, &mut wanted));
        if let Some(Err(error)) = done {
            let answer = errno(Errno::from_i32(error.raw_os_error().unwrap_or_default()));
            *uvfs_sys::lock(&self.failed) = Some(error);
            return Err(answer.into());
        }
        config.wanted = fs::InitFlags::from_bits_retain(wanted.requested.bits()) | needed;
        config.max_readahead = wanted.max_readahead;
        if let Some(most) = wanted.max_background {
            config.max_background = most;
        }
        config.congestion_threshold = wanted.congestion_below(config.max_background);
        // The kernel takes less than a page for a page.
        config.max_write = wanted.max_write.clamp(4096, config.max_write);
        config.time_gran = wanted.time_gran.as_nanos() as u32;
        config.max_stack_depth = wanted.max_stack_depth;
        Ok(())
    }

    /// Calls a handler and waits for its reply.
    pub(crate) async fn ask<R: Reply>(
        &self,
        cx: &Context,
        handler: impl FnOnce(&FS, &Request, R) + Send + 'static,
    ) -> Result<R::Answer> {
        let request = Request::new(cx, self.outlives.get().cloned());
        let (sender, answer) = slot(cx.unique);
        let reply = R::new(sender, &self.device);
        (self.calls).call(move |fs| handler(fs, &request, reply));
        Ok(answer.await.map_err(errno)?)
    }

    /// Calls a handler for a caller that may use the mount; others get EACCES. Requests that the kernel sends
    /// for no caller, such as to write back a page, go through [`Adapter::ask`].
    pub(crate) async fn ask_for<R: Reply>(
        &self,
        cx: &Context,
        handler: impl FnOnce(&FS, &Request, R) + Send + 'static,
    ) -> Result<R::Answer> {
        let allowed = match self.acl {
            SessionACL::All => true,
            SessionACL::RootAndOwner => cx.uid == self.owner || cx.uid == 0,
            SessionACL::Owner => cx.uid == self.owner,
        };
        if !allowed {
            return Err(fs::Errno::ACCESS.into());
        }
        self.ask(cx, handler).await
    }
}

/// An errno that the kernel takes.
pub(crate) fn errno(errno: Errno) -> fs::Errno {
    match errno.code() {
        // Numbers from 512 on are for the kernel itself.
        code @ 1..512 => fs::Errno::from_raw_os_error(code),
        _ => fs::Errno::IO,
    }
}

pub(crate) fn own(name: &CStr) -> OsString {
    OsString::from_vec(name.to_bytes().to_vec())
}

pub(crate) fn time(secs: i64, nanos: u32) -> SystemTime {
    let whole = Duration::from_secs(secs.unsigned_abs());
    let base = match secs {
        0.. => SystemTime::UNIX_EPOCH.checked_add(whole),
        _ => SystemTime::UNIX_EPOCH.checked_sub(whole),
    };
    let time = base.and_then(|base| base.checked_add(Duration::from_nanos(nanos.into())));
    time.unwrap_or(SystemTime::UNIX_EPOCH)
}

pub(crate) fn time_or_now(time_to_set: fs::SetTime) -> TimeOrNow {
    match time_to_set {
        fs::SetTime::Now => TimeOrNow::Now,
        fs::SetTime::At(secs, nanos) => TimeOrNow::SpecificTime(time(secs, nanos)),
    }
}

pub(crate) fn in_range(offsets: impl IntoIterator<Item = u64>) -> Result<()> {
    let all = (offsets.into_iter()).all(|offset| i64::try_from(offset).is_ok());
    if all {
        Ok(())
    } else {
        Err(fs::Errno::INVAL.into())
    }
}

#[cfg(test)]
mod tests {
    use uvfs_server::fs::timespec;

    use super::*;

    /// Times before 1970 stay as they are, and a wild time does not panic.
    #[test]
    fn times_before_the_epoch_survive() {
        for (secs, nanos) in [(0, 0), (5, 7), (-1, 0), (-2, 999_999_999), (-1, 1)] {
            assert_eq!(timespec(time(secs, nanos)), (secs, nanos));
        }
        // A number that is no time must not panic.
        time(i64::MIN, u32::MAX);
        time(i64::MAX, u32::MAX);
    }

    /// An errno of a file system that is reserved for the kernel becomes EIO.
    #[test]
    fn only_errors_that_programs_know_get_out() {
        assert_eq!(errno(Errno::ENOENT), fs::Errno::NOENT);
        assert_eq!(errno(Errno::from_i32(512)), fs::Errno::IO);
        assert_eq!(errno(Errno::from_i32(i32::MAX)), fs::Errno::IO);
        assert_eq!(own(c"\xff").as_encoded_bytes(), b"\xff");
    }
}
