//! Asynchronous I/O: a ring per thread, its executor, block devices and their engines.
