//! Queue pairs in shared memory and the wait policy.
