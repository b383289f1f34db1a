//! Counts for the statistics of a mount.

use std::fmt::{self, Debug};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use futures_util::TryStreamExt;
use http::{Request, Response};
use opendal::raw::{Layer, Operation, Servicer};
use opendal::{Buffer, HttpBody, HttpTransport, HttpTransporter, OperationContext, Result};

/// Requests to a store, and reads that the cache answered.
#[derive(Default)]
pub(crate) struct Counters {
    /// HTTP requests, retries included: for what an object is, for listings, for contents, and for changes.
    stats: AtomicU64,
    lists: AtomicU64,
    reads: AtomicU64,
    writes: AtomicU64,
    copies: AtomicU64,
    deletes: AtomicU64,
    conflicts: AtomicU64,
    /// Bytes of contents that came.
    read: AtomicU64,
    retries: AtomicU64,
    failures: AtomicU64,
    hit: AtomicU64,
    missed: AtomicU64,
}

impl Counters {
    /// The counts of requests that an image has, by the names that `uvfs stats` shows.
    pub(crate) fn of_store(&self) -> [(&'static str, u64); 6] {
        [
            ("store_stat_requests", &self.stats),
            ("store_list_requests", &self.lists),
            ("store_read_requests", &self.reads),
            ("store_read_bytes", &self.read),
            ("store_retries", &self.retries),
            ("store_failures", &self.failures),
        ]
        .map(|(name, counter)| (name, counter.load(Relaxed)))
    }

    /// The same, changes, and the bytes that reads found in the cache and missed there.
    pub(crate) fn all(&self) -> Vec<(&'static str, u64)> {
        let others = [
            ("store_write_requests", &self.writes),
            ("store_copy_requests", &self.copies),
            ("store_delete_requests", &self.deletes),
            ("store_conflicts", &self.conflicts),
            ("cache_hit_bytes", &self.hit),
            ("cache_miss_bytes", &self.missed),
        ];
        let others = others.map(|(name, counter)| (name, counter.load(Relaxed)));
        [&self.of_store()[..], &others].concat()
    }

    /// A request is made again.
    pub(crate) fn retried(&self) {
        self.retries.fetch_add(1, Relaxed);
    }

    /// A file was put beside another version.
    pub(crate) fn conflict(&self) {
        self.conflicts.fetch_add(1, Relaxed);
    }

    /// A request failed for good.
    pub(crate) fn failed(&self) {
        self.failures.fetch_add(1, Relaxed);
    }

    /// A program reads `len` bytes, of which the cache had not `missing`.
    pub(crate) fn read(&self, len: u64, missing: u64) {
        self.hit.fetch_add(len - missing, Relaxed);
        self.missed.fetch_add(missing, Relaxed);
    }
}

/// Counts what goes over HTTP: below OpenDAL's retries, which hide attempts, and below its listings, which hide pages.
pub(crate) struct Counted(pub(crate) Arc<Counters>);

impl Debug for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Counted")
    }
}

impl Layer for Counted {
    fn apply_context(&self, _: Servicer, inner: OperationContext) -> OperationContext {
        let counting = Counting {
            transport: inner.http_transport().clone(),
            counters: self.0.clone(),
        };
        inner.with_http_transport(HttpTransporter::new(counting))
    }
}

struct Counting {
    transport: HttpTransporter,
    counters: Arc<Counters>,
}

impl HttpTransport for Counting {
    async fn fetch(&self, request: Request<Buffer>) -> Result<Response<HttpBody>> {
        let operation = request.extensions().get::<Operation>().copied();
        let requests = match operation {
            Some(Operation::Stat) => &self.counters.stats,
            Some(Operation::List) => &self.counters.lists,
            Some(Operation::Read) => &self.counters.reads,
            Some(Operation::Write | Operation::CreateDir) => &self.counters.writes,
            Some(Operation::Copy) => &self.counters.copies,
            Some(Operation::Delete) => &self.counters.deletes,
            // Of credentials.
            _ => return self.transport.fetch(request).await,
        };
        requests.fetch_add(1, Relaxed);
        let response = self.transport.fetch(request).await?;
        if operation != Some(Operation::Read) || !response.status().is_success() {
            return Ok(response);
        }
        let counters = self.counters.clone();
        let count = move |part: &Buffer| {
            counters.read.fetch_add(part.len() as u64, Relaxed);
        };
        Ok(response.map(|body| body.map_inner(|parts| Box::new(parts.inspect_ok(count)))))
    }
}
