//! Requests to the store, by OpenDAL.

use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::StreamExt;
use opendal::layers::{RetryEvent, RetryLayer, TimeoutLayer};
use opendal::{
    BufferStream, EntryMode, ErrorKind, IntoOperatorUri, Metadata, Operator, OperatorUri,
};
use rustix::io::Errno;
use tokio::runtime::Handle;
use tokio::sync::{RwLock, Semaphore, SemaphorePermit};
use uvfs_server::fs::{Error, Result};

use crate::counters::{Counted, Counters};
use crate::posix::Posix;
use crate::upload::{Conditions, PART, PARTS};
use crate::{Options, Writes};

/// The longest name of a file in bytes, as in most file systems.
pub(crate) const NAME_MAX: usize = 255;
/// Where a directory of the host has what is put until it is whole. Listings don't show it.
pub(crate) const PUTS: &str = ".uvfs-puts/";
/// OpenDAL's option for that directory, in which a name has nine bytes more.
const ATOMIC: &str = "atomic_write_dir";
const PUT_NAME_MAX: usize = NAME_MAX - 9;
/// No put takes so long: a file there that was last written before is left of a killed server's.
const CUT_OFF: Duration = Duration::from_secs(24 * 60 * 60);
/// Attempts after the first one.
const RETRIES: usize = 4;
/// How much longer than another request an upload may take: what is under way at a time, by a line of 256 KiB/s.
const UPLOAD: Duration = Duration::from_secs((PARTS as u64 * PART) >> 18);
/// Objects of an answer that only shows whether there are any.
const ANY: usize = 2;

/// A version of an object. An ETag is opaque: two are the same or they are not.
#[derive(Clone, Debug, Default)]
pub(crate) struct Version {
    pub(crate) etag: Option<String>,
    /// Seconds and nanoseconds since 1970.
    pub(crate) modified: Option<(u64, u32)>,
    pub(crate) size: u64,
}

impl Version {
    pub(crate) fn new(meta: &Metadata) -> Self {
        let modified = meta.last_modified().map(SystemTime::from);
        let modified = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        // Some stores leave out the quotes in listings.
        let etag = meta.etag().map(|etag| match etag.ends_with('"') {
            true => etag.to_owned(),
            false => format!("\"{etag}\""),
        });
        // HTTP gives the time of a single object in seconds, and listings may have it more precisely. It has to be one time
        // to programs that compare it.
        let nanos = |time: Duration| match etag {
            Some(_) => 0,
            None => time.subsec_nanos(),
        };
        Self {
            modified: modified.map(|time| (time.as_secs(), nanos(time))),
            etag,
            size: meta.content_length(),
        }
    }

    /// Whether both describe the same contents. An object that is put again with the same contents has another time, so the
    /// time counts only where there is no ETag.
    pub(crate) fn is(&self, other: &Self) -> bool {
        let same = match (&self.etag, &other.etag) {
            (Some(one), Some(two)) => one == two,
            _ => self.modified == other.modified,
        };
        same && self.size == other.size
    }
}

/// What the store says of a file or directory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Facts {
    /// `None` for a directory.
    pub(crate) version: Option<Version>,
    pub(crate) posix: Posix,
}

impl From<Option<Version>> for Facts {
    fn from(version: Option<Version>) -> Self {
        Self {
            version,
            posix: Posix::default(),
        }
    }
}

/// An entry of a listing.
#[derive(Clone)]
pub(crate) struct Listed {
    /// The last component of the key.
    pub(crate) name: String,
    /// `None` for a directory.
    pub(crate) version: Option<Version>,
}

/// A store below a prefix. Keys are relative to it; directories end in `/`.
#[derive(Clone)]
pub(crate) struct Store {
    pub(crate) operator: Operator,
    /// See [`Store::name`].
    name: Arc<str>,
    /// The same without OpenDAL's simulation of directories, which lists where it is asked for a marker. Where markers
    /// count.
    markers: Option<Operator>,
    /// User metadata counts.
    pub(crate) metadata: bool,
    /// The same with time for uploads.
    pub(crate) uploads: Operator,
    pub(crate) puts: Conditions,
    pub(crate) counters: Arc<Counters>,
    conditions: bool,
    /// The longest key in bytes.
    key_max: usize,
    /// [`PUTS`] of a directory of the host that is written.
    pub(crate) puts_in: Option<Arc<Path>>,
    /// The longest wait for one answer, or for the next bytes of one.
    timeout: Duration,
    /// Held while requests of an earlier server of the mount may be under way.
    earlier: Arc<RwLock<()>>,
    /// When the store answered last.
    answered: Arc<Mutex<Instant>>,
}

/// Removes what servers that were killed have left of their puts.
fn remove_cut_off(puts: &Path) {
    for entry in std::fs::read_dir(puts).into_iter().flatten().flatten() {
        let written = entry.metadata().and_then(|metadata| metadata.modified());
        let age = written.ok().and_then(|written| written.elapsed().ok());
        if age.is_some_and(|age| age > CUT_OFF) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// The store's own message of an error. OpenDAL's text begins with what OpenDAL was doing, and what the store answered.
fn words(error: &opendal::Error) -> String {
    let text = error.to_string();
    let (before, why) = text.split_once(" => ").unwrap_or(("", &text));
    let quoted: Vec<_> = why.split('"').collect();
    match quoted[..] {
        ["S3Error { code: ", code, ", message: ", message, ..] => format!("{code}: {message}"),
        // An answer to HEAD has no text.
        [""] => match before
            .split_once("status: ")
            .and_then(|(_, rest)| rest.split_once(','))
        {
            Some((status, _)) => format!("HTTP status {status}"),
            None => error.kind().to_string(),
        },
        _ => why.to_owned(),
    }
}

/// An error of the store, with the object's name for the log.
pub(crate) fn failed(key: &str, error: opendal::Error) -> Error {
    let errno = match error.kind() {
        ErrorKind::NotFound => return Errno::NOENT.into(),
        // The object is shorter than it was, or another.
        ErrorKind::ConditionNotMatch | ErrorKind::RangeNotSatisfied => Errno::STALE,
        ErrorKind::PermissionDenied => Errno::ACCESS,
        ErrorKind::Unsupported => Errno::OPNOTSUPP,
        _ => Errno::IO,
    };
    let why = words(&error);
    match key {
        // All of them.
        "" => Error::new(errno, why),
        _ => Error::new(errno, format!("object {key:?}: {why}")),
    }
}

/// The store of a URI as OpenDAL alone has it, without the deadlines and retries of a mount: for comparisons.
///
/// # Errors
/// A URI that names no store.
pub fn operator(uri: impl IntoOperatorUri) -> io::Result<Operator> {
    #[cfg(feature = "https")]
    {
        // Another part of the program may have chosen one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        opendal_http_transport_reqwest::install_default();
    }
    opendal::init_default_registry();
    Operator::from_uri(uri).map_err(io::Error::other)
}

/// Names the service of a store: the URI's authority, its options for endpoint and account, and for S3 the endpoint of the
/// environment. Credentials are left out, because a store is the same with others.
fn service_of(uri: &OperatorUri, environment: impl Fn(&str) -> Option<String>) -> String {
    let names_service = |option: &str| {
        let words = ["endpoint", "account_name", "name_node"];
        words.iter().any(|word| option.contains(word))
    };
    let options = uri.options().iter();
    let options = options.filter(|(option, _)| names_service(option));
    let mut parts: Vec<_> = options
        .map(|(option, value)| format!("{option}={value}"))
        .collect();
    parts.sort();
    parts.extend(uri.authority().map(str::to_owned));
    if uri.scheme() == "s3" {
        // OpenDAL takes the first of these.
        let endpoints = ["AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_S3_ENDPOINT"];
        parts.extend(endpoints.into_iter().find_map(environment));
    }
    parts.join(" ")
}

impl Store {
    /// Connects to the store of a URI such as `s3://bucket/prefix?region=eu-west-1`. Whether it answers is seen with the
    /// first request.
    pub(crate) fn open(uri: &str, options: &Options) -> io::Result<Self> {
        let parsed = |options| OperatorUri::new(uri, options).map_err(io::Error::other);
        let mut uri = parsed(None)?;
        let mut puts_in = None;
        if uri.scheme() == "fs" && options.writes != Writes::No {
            let root = uri.option("root").or(uri.root()).unwrap_or_default();
            let path = format!("/{}/{PUTS}", root.trim_matches('/'));
            remove_cut_off(Path::new(&path));
            puts_in = Some(Arc::from(Path::new(&path)));
            uri = parsed(Some((ATOMIC.to_owned(), path)))?;
        }
        let operator = operator(&uri)?;
        let attempt = (options.timeout / 2).max(Duration::from_millis(100));
        let counters = Arc::new(Counters::default());
        let counted = counters.clone();
        let pauses = RetryLayer::new()
            .with_notify(move |_: RetryEvent<'_>| counted.retried())
            .with_jitter()
            .with_min_delay(Duration::from_millis(100))
            .with_max_delay((options.timeout / 4).max(Duration::from_millis(100)))
            .with_max_times(RETRIES);
        let patient = |operator: Operator, attempt| {
            let late = TimeoutLayer::new().with_timeout(attempt);
            operator
                .layer(late.with_io_timeout(attempt))
                .layer(pauses.clone())
                .layer(Counted(counters.clone()))
        };
        let (base, service) = (operator.base_context(), operator.base_service());
        let bare = || {
            let bare = Operator::from_parts(base.clone(), service.clone());
            patient(bare, attempt)
        };
        let markers = (options.metadata || options.writes != Writes::No).then(bare);
        let uploads = patient(operator.clone(), attempt + UPLOAD);
        let operator = patient(operator, attempt);
        let info = operator.info();
        let conditions = info.capability().read_with_if_match;
        // S3, GCS and Azure have this limit, the root included; directories have that of a path.
        let key_max = match info.scheme() {
            "fs" => usize::MAX,
            _ => 1024_usize.saturating_sub(info.root().trim_start_matches('/').len()),
        };
        let address = service_of(&uri, |name| std::env::var(name).ok());
        let (bucket, root) = (info.name(), info.root());
        let name = format!("{} {bucket} {address} {root}", info.scheme()).into();
        Ok(Self {
            operator,
            name,
            markers,
            metadata: options.metadata,
            uploads,
            puts: Conditions::default(),
            counters,
            conditions,
            key_max,
            puts_in,
            timeout: options.timeout,
            earlier: Arc::default(),
            answered: Arc::new(Mutex::new(Instant::now())),
        })
    }

    /// Whether an object may have this key.
    pub(crate) fn takes(&self, key: &str) -> bool {
        let name = key.trim_end_matches('/').rsplit('/').next();
        let fits = |name: &str| self.puts_in.is_none() || name.len() <= PUT_NAME_MAX;
        key.len() <= self.key_max && name.is_some_and(fits)
    }

    /// Removes [`PUTS`] once nothing is put any more, unless something is in it.
    pub(crate) fn end(&self) {
        if let Some(puts) = &self.puts_in {
            let _ = std::fs::remove_dir(puts);
        }
    }

    /// A name that tells this store from others, also from a bucket of the same name at another service.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Has no change reach the store before the requests of an earlier server have ended, whose connections these are: a put that
    /// arrived after a later change of the same object would undo it. No request comes on them any more, so the store closes
    /// each when it has done what came before.
    pub(crate) fn let_end(&self, connections: Vec<TcpStream>, runtime: &Handle) {
        let earlier = runtime.block_on(self.earlier.clone().write_owned());
        let timeout = self.timeout;
        runtime.spawn_blocking(move || {
            if !are_closed(&connections, Instant::now() + timeout) {
                tracing::warn!(
                    "a request of the server before has not ended within {timeout:?}: it may undo a later one"
                );
            }
            drop(earlier);
        });
    }

    /// Waits for what [`Store::let_end`] waits for.
    pub(crate) async fn earlier_ended(&self) {
        drop(self.earlier.read().await);
    }

    /// Waits for an answer, retries included, for no longer than [`Store::timeout`].
    pub(crate) async fn within<T>(
        &self,
        answer: impl IntoFuture<Output = opendal::Result<T>>,
    ) -> opendal::Result<T> {
        self.within_time(self.timeout, answer).await
    }

    /// The same for an upload, which may take longer.
    pub(crate) async fn uploaded<T>(
        &self,
        answer: impl IntoFuture<Output = opendal::Result<T>>,
    ) -> opendal::Result<T> {
        self.within_time(self.timeout + UPLOAD, answer).await
    }

    async fn within_time<T>(
        &self,
        timeout: Duration,
        answer: impl IntoFuture<Output = opendal::Result<T>>,
    ) -> opendal::Result<T> {
        let answer = tokio::time::timeout(timeout, answer.into_future());
        let answer = answer.await.map_err(|_| self.late()).flatten();
        match &answer {
            Ok(_) => *uvfs_sys::lock(&self.answered) = Instant::now(),
            Err(error) if is_failure(error.kind()) => self.counters.failed(),
            Err(_) => {}
        }
        answer
    }

    fn late(&self) -> opendal::Error {
        let why = format!("no answer within {:?}", self.timeout);
        opendal::Error::new(ErrorKind::Unexpected, why)
    }

    /// Waits until another request may be under way. A request that waited behind others for as long as the store
    /// answered none of them fails with them.
    pub(crate) async fn permit<'a>(
        &self,
        key: &str,
        permits: &'a Semaphore,
    ) -> Result<Option<SemaphorePermit<'a>>> {
        let begun = Instant::now();
        let permit = permits.acquire().await;
        let silent = uvfs_sys::lock(&self.answered).elapsed();
        match begun.elapsed().min(silent) < self.timeout {
            true => Ok(permit.ok()),
            false => Err(failed(key, self.late())),
        }
    }

    /// What the store has for a key; `None` for nothing, and for an object whose key is a directory's or the other way
    /// round.
    pub(crate) async fn stat(&self, key: &str) -> Result<Option<Facts>> {
        let is_directory = is_directory(key);
        let bare = self.markers.as_ref().filter(|_| is_directory);
        let operator = bare.unwrap_or(&self.operator);
        match self.within(operator.stat(key)).await {
            Ok(meta) if is_directory != (meta.mode() == EntryMode::DIR) => Ok(None),
            Ok(meta) => {
                let posix = match meta.user_metadata().filter(|_| self.metadata) {
                    Some(user) => Posix::new(|name| user.get(name)),
                    None => Posix::default(),
                };
                let version = (!is_directory).then(|| Version::new(&meta));
                Ok(Some(Facts { version, posix }))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            // A path through an object, on stores that have directories.
            Err(error) if error.kind() == ErrorKind::NotADirectory => Ok(None),
            Err(error) => Err(failed(key, error)),
        }
    }

    /// The same for a key that a listing has. A directory is there without a marker, too.
    pub(crate) async fn facts(&self, key: &str) -> Result<Option<Facts>> {
        match is_directory(key) {
            false => self.stat(key).await,
            true if !self.metadata => Ok(Some(Facts::default())),
            true => Ok(Some(self.stat(key).await?.unwrap_or_default())),
        }
    }

    /// Whether there are objects below a directory, or its marker.
    pub(crate) async fn holds(&self, directory: &str) -> Result<bool> {
        let listing = self.operator.lister_with(directory).limit(ANY);
        let first = async {
            let mut listing = listing.await?;
            while let Some(entry) = listing.next().await.transpose()? {
                if is_below(entry.path(), directory) {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        match self.within(first).await {
            Ok(any) => Ok(any),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) if error.kind() == ErrorKind::NotADirectory => Ok(false),
            Err(error) => Err(failed(directory, error)),
        }
    }

    /// What is in a directory, in the store's order; `None` if that is more than `most` names.
    pub(crate) async fn list(&self, directory: &str, most: usize) -> Result<Option<Vec<Listed>>> {
        let error = |error| failed(directory, error);
        let list = self.within(self.operator.lister(directory)).await;
        let mut list = list.map_err(error)?;
        let (mut found, mut hidden) = (Vec::<Listed>::new(), 0_u64);
        loop {
            let next = async { list.next().await.transpose() };
            let Some(entry) = self.within(next).await.map_err(error)? else {
                return Ok(Some(found));
            };
            let path = entry.path();
            // The directory itself, if it has a marker.
            if path == directory || path == PUTS || !is_below(path, directory) {
                continue;
            }
            let below = &path[directory.len()..];
            let is_directory = entry.metadata().mode() == EntryMode::DIR;
            let name = below.strip_suffix('/').unwrap_or(below);
            if !is_name(name) || !is_reached(path) {
                if hidden == 0 {
                    tracing::warn!(key = path, "no path leads to this object: it is not shown");
                }
                hidden += 1;
                continue;
            }
            // Some stores have a directory in more than one page of a listing. Others break a long listing off and don't say
            // how it goes on, and OpenDAL would begin it again for ever.
            let same =
                |listed: &Listed| listed.name == name && listed.version.is_none() == is_directory;
            match found.last() {
                Some(last) if same(last) => continue,
                Some(_) if same(&found[0]) => {
                    let why = format!("the store's listing of {directory:?} begins again");
                    return Err(Error::new(Errno::IO, why));
                }
                _ => {}
            }
            let version = (!is_directory).then(|| Version::new(entry.metadata()));
            let name = name.to_owned();
            found.push(Listed { name, version });
            if found.len() > most {
                return Ok(None);
            }
        }
    }

    /// Begins to read a range of one version.
    pub(crate) async fn fetch(
        &self,
        key: &str,
        version: &Version,
        range: Range<u64>,
    ) -> Result<BufferStream> {
        let error = |error| unread(key, error);
        let mut reader = self.operator.reader_with(key);
        if let Some(etag) = &version.etag
            && self.conditions
        {
            reader = reader.if_match(etag);
        }
        let begin = async { reader.await?.into_stream(range).await };
        let mut stream = self.within(begin).await.map_err(error)?;
        match self.within(stream.metadata()).await {
            // Some stores ignore the condition.
            Ok(meta) => match meta.etag().zip(version.etag.as_deref()) {
                Some((one, two)) if one != two => return Err(changed(key)),
                _ => {}
            },
            Err(error) if error.kind() == ErrorKind::Unsupported => {}
            Err(e) => return Err(error(e)),
        }
        Ok(stream)
    }

    /// Reads a range of one version into memory.
    pub(crate) async fn read(
        &self,
        key: &str,
        version: &Version,
        range: Range<u64>,
    ) -> Result<Vec<u8>> {
        let most = (range.end - range.start) as usize;
        let mut bytes = Vec::with_capacity(most);
        let mut stream = self.fetch(key, version, range).await?;
        while let Some(buffer) = self.next(key, &mut stream).await? {
            for part in buffer {
                let room = most - bytes.len();
                bytes.extend_from_slice(&part[..part.len().min(room)]);
            }
        }
        self.still(key, version).await?;
        Ok(bytes)
    }

    /// Whether requests for this version fail once the store has another.
    pub(crate) fn is_conditional(&self, version: &Version) -> bool {
        self.conditions && version.etag.is_some()
    }

    /// Checks after a read that its version was there all the time, where no condition of the request says so.
    pub(crate) async fn still(&self, key: &str, version: &Version) -> Result<()> {
        if self.is_conditional(version) {
            return Ok(());
        }
        match self.stat(key).await? {
            Some(now) if now.version.as_ref().is_some_and(|now| now.is(version)) => Ok(()),
            _ => Err(changed(key)),
        }
    }

    /// The next bytes of a stream.
    pub(crate) async fn next(
        &self,
        key: &str,
        stream: &mut BufferStream,
    ) -> Result<Option<opendal::Buffer>> {
        let next = async { stream.next().await.transpose() };
        let next = self.within(next).await;
        next.map_err(|error| unread(key, error))
    }
}

/// Ends what is sent on connections. Whether the other side has closed all of them by then.
fn are_closed(connections: &[TcpStream], deadline: Instant) -> bool {
    let ends = |connection: &TcpStream| {
        connection.shutdown(Shutdown::Write)?;
        connection.set_nonblocking(false)
    };
    let ending: Vec<_> = connections.iter().filter(|one| ends(one).is_ok()).collect();
    let mut answer = [0; 4 << 10];
    ending.into_iter().all(|mut connection| {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            // No time at all is an error.
            if connection.set_read_timeout(Some(left)).is_err() {
                return false;
            }
            match connection.read(&mut answer) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
            }
        }
    })
}

/// Whether the store failed, and did not answer with what it has.
fn is_failure(kind: ErrorKind) -> bool {
    !matches!(
        kind,
        ErrorKind::NotFound
            | ErrorKind::NotADirectory
            | ErrorKind::ConditionNotMatch
            | ErrorKind::RangeNotSatisfied
            | ErrorKind::Unsupported
    )
}

/// An error of a request for the contents of a version. Programs do not expect ENOENT of an open file.
fn unread(key: &str, error: opendal::Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound => changed(key),
        // The object is shorter by now. For some services OpenDAL has no kind for it.
        _ if error.to_string().contains("status: 416") => changed(key),
        _ => failed(key, error),
    }
}

/// The version that is read is gone, or another has taken its place.
fn changed(key: &str) -> Error {
    let why = format!("object {key:?} has changed in the store, or is gone");
    Error::new(Errno::STALE, why).level(tracing::Level::INFO)
}

/// Whether a listing of a directory has this path for what is in it, or for its marker. WebDAV lists a file as if it were in
/// itself, and OpenDAL the root as `/`.
pub(crate) fn is_below(path: &str, directory: &str) -> bool {
    path.starts_with(directory) && path != "/"
}

/// Whether a key is one of a directory; the root's is empty.
pub(crate) fn is_directory(key: &str) -> bool {
    key.is_empty() || key.ends_with('/')
}

/// Whether OpenDAL leaves this key as it is. It cuts off white space at both ends, and would ask for another object.
pub(crate) fn is_reached(key: &str) -> bool {
    key.trim() == key
}

/// Whether lookups lead to a file of this key.
pub(crate) fn has_path(key: &str) -> bool {
    let mut ends = key.match_indices('/').map(|(slash, _)| slash);
    key.split('/').all(is_name) && is_reached(key) && ends.all(|end| is_reached(&key[..end]))
}

/// Whether a path can name it.
pub(crate) fn is_name(name: &str) -> bool {
    let plain = !name.is_empty() && name != "." && name != "..";
    plain && name.len() <= NAME_MAX && !name.contains(['/', '\0'])
}

#[cfg(test)]
mod tests {
    use super::{OperatorUri, service_of};

    /// Buckets of one name at two services share neither a cache nor clients. Other credentials see the same store.
    #[test]
    fn stores_of_one_name_are_told_apart() {
        let nothing = |_: &str| None;
        let parsed = |uri: &str| OperatorUri::new(uri, []).unwrap();
        let of = |uri: &str| service_of(&parsed(uri), nothing);
        let here = of("s3://bucket/p?region=r&endpoint=http://127.0.0.1:1&access_key_id=k");
        let there = of("s3://bucket/p?region=r&endpoint=http://127.0.0.1:2&access_key_id=k");
        assert_ne!(here, there);
        let anew = of("s3://bucket/p/?endpoint=http://127.0.0.1:1&access_key_id=other");
        assert_eq!(here, anew);
        assert!(!here.contains("access_key"), "{here}");
        assert_ne!(of("webdav://one/p"), of("webdav://two/p"));
        assert_eq!(of("webdav://user:secret@one/p"), of("webdav://one/p"));
        let set = |endpoint: &'static str| {
            let environment =
                move |name: &str| (name == "AWS_ENDPOINT").then(|| endpoint.to_owned());
            service_of(&parsed("s3://bucket"), environment)
        };
        assert_ne!(set("http://one"), set("http://two"));
        assert_ne!(set("http://one"), of("s3://bucket"));
    }
}
