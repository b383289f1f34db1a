//! Requests that were answered with an error: by kind and errno.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::{add, opcode_name};

/// Pairs of a kind and an errno that a queue counts; it counts more of them only as errors.
const PAIRS: usize = 128;

/// One queue's errors. There is one writer.
#[derive(Debug)]
pub(super) struct Failures {
    /// A pair and, below, how often it was. Free while zero: no errno is.
    pairs: [AtomicU64; PAIRS],
    counts: [AtomicU64; PAIRS],
}

impl Default for Failures {
    fn default() -> Self {
        Self {
            pairs: [const { AtomicU64::new(0) }; PAIRS],
            counts: [const { AtomicU64::new(0) }; PAIRS],
        }
    }
}

impl Failures {
    /// Counts an error; called by the queue's thread alone.
    pub(super) fn count(&self, opcode: u32, errno: Errno) {
        let pair = u64::from(opcode) << 32 | u64::from(errno.raw_os_error() as u32);
        let start = (pair ^ pair >> 27) as usize;
        for at in 0..PAIRS {
            let at = (start + at) % PAIRS;
            match self.pairs[at].load(Ordering::Relaxed) {
                0 => self.pairs[at].store(pair, Ordering::Relaxed),
                other if other != pair => continue,
                _ => {}
            }
            add(&self.counts[at], 1);
            return;
        }
    }

    fn counted(&self) -> impl Iterator<Item = (u64, u64)> {
        let pairs = self.pairs.iter().zip(&self.counts);
        pairs
            .map(|(pair, count)| (pair.load(Ordering::Relaxed), count.load(Ordering::Relaxed)))
            .filter(|(pair, count)| *pair != 0 && *count != 0)
    }
}

/// Requests of one kind that failed in one way.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Failure {
    /// The opcode's name, as in `LOOKUP`.
    pub op: String,
    /// The error's name, as in `ENOENT`.
    pub errno: String,
    /// How many there were.
    pub count: u64,
}

/// Sums up queues, the most frequent errors first.
pub(super) fn sum<'a>(queues: impl Iterator<Item = &'a Failures>) -> Vec<Failure> {
    let mut sums = std::collections::BTreeMap::new();
    for (pair, count) in queues.flat_map(Failures::counted) {
        *sums.entry(pair).or_insert(0) += count;
    }
    let failure = |(pair, count): (u64, u64)| Failure {
        op: opcode_name((pair >> 32) as u32),
        errno: errno_name(pair as u32 as i32),
        count,
    };
    let mut failures: Vec<_> = sums.into_iter().map(failure).collect();
    failures.sort_by_key(|failure| std::cmp::Reverse(failure.count));
    failures
}

/// The names of the errors that file systems give.
macro_rules! names {
    ($($short:ident $name:literal)*) => {
        fn errno_name(number: i32) -> String {
            match Errno::from_raw_os_error(number) {
                $(Errno::$short => $name.into(),)*
                _ => format!("errno {number}"),
            }
        }
    };
}

names! {
    PERM "EPERM" NOENT "ENOENT" INTR "EINTR" IO "EIO" NXIO "ENXIO" TOOBIG "E2BIG" NOEXEC "ENOEXEC" BADF "EBADF"
    AGAIN "EAGAIN" NOMEM "ENOMEM" ACCESS "EACCES" FAULT "EFAULT" NOTBLK "ENOTBLK" BUSY "EBUSY" EXIST "EEXIST"
    XDEV "EXDEV" NODEV "ENODEV" NOTDIR "ENOTDIR" ISDIR "EISDIR" INVAL "EINVAL" NFILE "ENFILE" MFILE "EMFILE"
    NOTTY "ENOTTY" TXTBSY "ETXTBSY" FBIG "EFBIG" NOSPC "ENOSPC" SPIPE "ESPIPE" ROFS "EROFS" MLINK "EMLINK"
    PIPE "EPIPE" DOM "EDOM" RANGE "ERANGE" DEADLK "EDEADLK" NAMETOOLONG "ENAMETOOLONG" NOLCK "ENOLCK" NOSYS "ENOSYS"
    NOTEMPTY "ENOTEMPTY" LOOP "ELOOP" NODATA "ENODATA" TIME "ETIME" NOLINK "ENOLINK" PROTO "EPROTO"
    BADMSG "EBADMSG" OVERFLOW "EOVERFLOW" ILSEQ "EILSEQ" OPNOTSUPP "EOPNOTSUPP" TIMEDOUT "ETIMEDOUT"
    CONNREFUSED "ECONNREFUSED" CONNABORTED "ECONNABORTED" CONNRESET "ECONNRESET" NOTCONN "ENOTCONN"
    HOSTDOWN "EHOSTDOWN" HOSTUNREACH "EHOSTUNREACH" ALREADY "EALREADY" INPROGRESS "EINPROGRESS" STALE "ESTALE"
    UCLEAN "EUCLEAN" REMOTEIO "EREMOTEIO" DQUOT "EDQUOT" CANCELED "ECANCELED" NOKEY "ENOKEY"
    KEYEXPIRED "EKEYEXPIRED" KEYREVOKED "EKEYREVOKED" OWNERDEAD "EOWNERDEAD"
}

#[cfg(test)]
mod tests {
    use super::*;
    use uvfs_proto::abi::Opcode;

    #[test]
    fn errors_are_summed_by_kind_and_errno() {
        let (a, b) = (Failures::default(), Failures::default());
        a.count(Opcode::Lookup as u32, Errno::ACCESS);
        b.count(Opcode::Lookup as u32, Errno::ACCESS);
        b.count(Opcode::Write as u32, Errno::NOSPC);
        b.count(Opcode::Write as u32, Errno::from_raw_os_error(999));
        let found = sum([&a, &b].into_iter());
        let has = |op: &str, errno: &str, count| {
            let (op, errno) = (op.into(), errno.into());
            found.contains(&Failure { op, errno, count })
        };
        assert_eq!((found.len(), found[0].count), (3, 2));
        assert!(has("LOOKUP", "EACCES", 2) && has("WRITE", "ENOSPC", 1));
        assert!(has("WRITE", "errno 999", 1), "{found:?}");
    }

    /// Once every counter is taken, further kinds of errors leave the counts as they are.
    #[test]
    fn more_pairs_than_there_is_room_for() {
        let failures = Failures::default();
        for opcode in 0..40 {
            for errno in 1..40 {
                failures.count(opcode, Errno::from_raw_os_error(errno));
            }
        }
        assert_eq!(failures.counted().count(), PAIRS);
        assert!(failures.counted().all(|(_, count)| count == 1));
    }
}
