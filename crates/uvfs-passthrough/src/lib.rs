//! A file system that passes every request to a directory of the host.
