//! A cache of metadata buffers over a block device.
