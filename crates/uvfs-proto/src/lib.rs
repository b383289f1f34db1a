//! The FUSE wire format: requests, replies and notifications.
