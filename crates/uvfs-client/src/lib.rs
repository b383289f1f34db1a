//! Files over a shared-memory queue pair, with a page cache.
