//! How files are opened.

/// How a file is opened; as [`std::fs::OpenOptions`].
///
/// ```
/// # use uvfs_client::{Client, Config, OpenOptions};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let fs = uvfs_passthrough::Passthrough::open(dir.path(), uvfs_passthrough::Options::default())?;
/// # let session = uvfs_server::Session::unmounted(fs, uvfs_server::SessionOptions::default())?;
/// # let limits = uvfs_server::ClientLimits::default();
/// # let (_serving, socket) = uvfs_server::in_process(&std::sync::Arc::new(session), limits)?;
/// # let client = Client::new(socket.into(), Config::default())?;
/// let file = client.open("log", OpenOptions::new().append(true).create(true))?;
/// assert_eq!(file.size(), 0);
/// assert!(client.open("log", OpenOptions::new().write(true).create_new(true)).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct OpenOptions {
    pub(crate) read: bool,
    pub(crate) write: bool,
    pub(crate) append: bool,
    pub(crate) truncate: bool,
    pub(crate) create: bool,
    pub(crate) create_new: bool,
    pub(crate) mode: u32,
    /// Of imported files: what is written is durable when the call returns (O_DSYNC, or the mount).
    pub(crate) synchronous: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl OpenOptions {
    /// Nothing set; permissions 0666 for new files.
    pub fn new() -> Self {
        Self {
            read: false,
            write: false,
            append: false,
            truncate: false,
            create: false,
            create_new: false,
            mode: 0o666,
            synchronous: false,
        }
    }

    option! {
        /// For reading.
        read: bool,
        /// For writing.
        write: bool,
        /// For writing, always at the end of the file.
        append: bool,
        /// Cut to nothing first.
        truncate: bool,
        /// Make it if it is not there.
        create: bool,
        /// Make it, and fail if it is there.
        create_new: bool,
        /// Permissions of a new file.
        mode: u32,
    }
}
