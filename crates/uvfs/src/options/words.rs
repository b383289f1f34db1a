//! The words of libfuse, of file systems that use it, and of mount(8), which uvfs takes, or for which it names another.

use std::borrow::Cow;

/// The meaning of a foreign word here.
#[derive(Clone, Copy, Debug)]
pub enum Foreign {
    /// Always so, or of no effect that a program could see.
    Always,
    /// The same as this word.
    Is(&'static str),
    /// Not offered; what to do.
    Not(&'static str),
}

use Foreign::{Always, Is, Not};

/// A table of words with their meaning.
macro_rules! words {
    ($($word:ident $meaning:expr;)*) => {
        &[$((stringify!($word), $meaning)),*]
    };
}

/// By name; a value that may follow is not looked at.
const FOREIGN: &[(&str, Foreign)] = words! {
    ac_attr_timeout Always;
    allow_root Not("use allow_other, and a mount point in a directory that only you may enter");
    async_dio Always;
    async_read Always;
    atomic_o_trunc Always;
    auto_inval_data Always;
    big_writes Always;
    bind Not("uvfs mount always shows the source elsewhere; leave it out");
    blkdev Not("an image is given as the source; leave it out");
    blksize Not("an image has its own block size; leave it out");
    clone_fd Always;
    congestion_threshold Not("write it to /sys/fs/fuse/connections/N/congestion_threshold");
    context Not("the files have the SELinux contexts of the source");
    debug Not("use UVFS_LOG=debug uvfs mount --foreground");
    defcontext Not("the files have the SELinux contexts of the source");
    dmask Not("modes are the source's, but object stores have file_mode and dir_mode");
    drop_privileges Not("a root server of a directory drops what it does not need; else mount as that user");
    fd Not("the server opens /dev/fuse; leave it out");
    fmask Not("modes are the source's, but object stores have file_mode and dir_mode");
    fscontext Not("the files have the SELinux contexts of the source");
    group_id Not("the server fills it in; leave it out");
    hard_remove Always;
    intr Always;
    intr_signal Not("a server in uvfs is interrupted without signals; leave it out");
    io_uring Is("transport=auto");
    io_uring_q_depth Not("the queues have a fixed depth; leave it out");
    large_read Always;
    loop Not("an image is served without a loop device; leave it out");
    mand Not("FUSE has no mandatory locks; leave it out");
    max_background Not("write it to /sys/fs/fuse/connections/N/max_background");
    max_idle_threads Not("there is one thread for each core; bind the server to fewer (taskset)");
    max_threads Not("there is one thread for each core; bind the server to fewer (taskset)");
    modules Not("there are no modules: serve the directory that you want as the source");
    no_async_dio Not("direct I/O is asynchronous; leave it out");
    no_auto_inval_data Not("use cache=always");
    no_remote_flock Always;
    no_remote_lock Always;
    no_remote_posix_lock Always;
    no_splice_move Always;
    no_splice_read Always;
    no_splice_write Always;
    no_writeback_cache Always;
    noauto_cache Not("use cache=never, or kernel_cache");
    noforget Always;
    norecovery Not("the log of an image is replayed in memory, and the image not written; leave it out");
    readdir_ino Always;
    readdirplus Not("the server decides; leave it out");
    remember Always;
    rootcontext Not("the files have the SELinux contexts of the source");
    rootmode Not("the server fills it in; leave it out");
    setuid Not("mount as that user (su USER -c 'uvfs mount ...', or User= in a unit)");
    splice_move Always;
    splice_read Always;
    splice_write Always;
    sync_read Not("reads are asynchronous; leave it out");
    umask Not("modes are the source's, but object stores have file_mode and dir_mode");
    use_ino Always;
    user_id Not("the server fills it in; leave it out");
    writeback_cache Is("writeback");
};

/// The meaning of a foreign word, if it is one.
pub fn foreign(name: &str) -> Option<Foreign> {
    let found = FOREIGN.binary_search_by_key(&name, |(word, _)| word);
    found.ok().map(|at| FOREIGN[at].1)
}

/// The known word that is nearest to a misspelt one.
pub fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_ascii_lowercase();
    let near = known.map(|name| (strsim::damerau_levenshtein(&word, name), name));
    let (distance, name) = near.min()?;
    // Short words are all near to each other.
    (distance <= 1 + word.len() / 5).then_some(name)
}

/// The names of all foreign words.
pub fn names() -> impl Iterator<Item = &'static str> {
    FOREIGN.iter().map(|(name, _)| *name)
}

/// The table of words that mean nothing new, for the help.
pub fn help() -> String {
    let list = |wanted: fn(&Foreign) -> bool| {
        let words = FOREIGN.iter().filter(|(_, what)| wanted(what));
        words.map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
    };
    let same = FOREIGN.iter().filter_map(|(name, what)| match what {
        Is(other) => Some(Cow::from(format!("{name} is {other}"))),
        _ => None,
    });
    format!(
        "Words of libfuse:\n  {}\n      taken: uvfs always does this. {}\n  {}\n      refused, with what to use",
        list(|what| matches!(what, Always)),
        same.collect::<Vec<_>>().join(", "),
        list(|what| matches!(what, Not(_))),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted() {
        assert!(FOREIGN.is_sorted_by(|a, b| a.0 < b.0));
        assert!(matches!(foreign("use_ino"), Some(Always)));
        assert!(foreign("no_such_word").is_none());
    }

    #[test]
    fn a_misspelt_word_is_recognized() {
        let known = ["allow_other", "ro", "writeback", "attr_timeout"];
        let nearest = |word| nearest(word, known.into_iter());
        assert_eq!(nearest("alow_other"), Some("allow_other"));
        assert_eq!(nearest("allow-other"), Some("allow_other"));
        assert_eq!(nearest("ALLOW_OTHER"), Some("allow_other"));
        assert_eq!(nearest("wirteback"), Some("writeback"));
        assert_eq!(nearest("attr_timout"), Some("attr_timeout"));
        assert_eq!(nearest("pigeon"), None);
    }
}
