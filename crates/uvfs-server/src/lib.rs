//! Serving a file system: the FileSystem trait, sessions and transports.
