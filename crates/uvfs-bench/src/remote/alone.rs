//! OpenDAL alone, without a file system: what a mount reaches where the store is the limit.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::Path;

use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::runtime::Runtime;
use uvfs_cli::{Context, Result};
use uvfs_object::opendal::Operator;

use super::job::{self, NAMES, PIECE, RANDOM, READERS, RemoteWork, SMALL, STREAM};
use crate::measure::{Measured, Watch};

/// Bytes of a request for a part of a stream, and requests at a time: as a mount has it.
const PART: u64 = 4 << 20;
const PARTS: usize = 8;
/// Requests for small objects at a time, as a mount has it.
const FILES: usize = 64;

/// A store.
pub struct Alone {
    runtime: Runtime,
    operator: Operator,
    /// Of all keys, with a slash at its end.
    prefix: String,
}

impl Alone {
    /// The objects of a store below a name.
    pub fn open(uri: &str, name: &OsStr) -> Result<Self> {
        let context = || "the store".to_owned();
        Ok(Self {
            runtime: Runtime::new().context(context)?,
            operator: uvfs_object::operator(uri).context(context)?,
            prefix: format!("{}/", name.to_string_lossy()),
        })
    }

    fn key(&self, name: &str) -> String {
        [&*self.prefix, name].concat()
    }

    /// Puts the files of a directory into the store.
    pub fn put(&self, dir: &Path) -> Result<()> {
        let mut keys = vec![STREAM.to_owned(), RANDOM.to_owned()];
        for name in [NAMES, SMALL] {
            for entry in fs::read_dir(dir.join(name)).context(|| dir.display().to_string())? {
                let entry = entry.context(|| dir.display().to_string())?;
                keys.push(format!("{name}/{}", entry.file_name().to_string_lossy()));
            }
        }
        let put = |key: String| async move {
            let bytes = fs::read(dir.join(&key))?;
            let to = self.key(&key);
            let writer = self.operator.writer_with(&to).chunk(16 << 20);
            let mut writer = writer.concurrent(4).await?;
            writer.write(bytes).await?;
            writer.close().await?;
            io::Result::Ok(())
        };
        let all = stream::iter(keys).map(put).buffer_unordered(8);
        let done = self.runtime.block_on(all.try_collect::<()>());
        done.context(|| "putting objects into the store".into())
    }

    /// Does a work; `None` for one that reads again what was read.
    pub fn measure(&self, work: RemoteWork) -> Result<Option<Measured>> {
        let done = match work {
            RemoteWork::List => self.runtime.block_on(self.list()),
            RemoteWork::Small => self.runtime.block_on(self.small()),
            RemoteWork::Stream => self.runtime.block_on(self.stream()),
            RemoteWork::Random => self.runtime.block_on(self.random()),
            RemoteWork::SmallAgain | RemoteWork::StreamAgain => return Ok(None),
        };
        done.map(Some).context(|| "OpenDAL alone".into())
    }

    async fn list(&self) -> io::Result<Measured> {
        let watch = Watch::start();
        let listed = self.operator.list(&self.key(&format!("{NAMES}/"))).await?;
        Ok(watch.stop(listed.len() as f64))
    }

    async fn small(&self) -> io::Result<Measured> {
        let watch = Watch::start();
        let listed = self.operator.list(&self.key(&format!("{SMALL}/"))).await?;
        let read = |entry: uvfs_object::opendal::Entry| async move {
            self.operator.read(entry.path()).await.map(drop)
        };
        let files = listed
            .into_iter()
            .filter(|entry| !entry.path().ends_with('/'));
        let files: Vec<_> = files.collect();
        let count = files.len() as f64;
        let all = stream::iter(files).map(read).buffered(FILES);
        all.try_collect::<()>().await?;
        Ok(watch.stop(count))
    }

    /// Reads ranges of an object, `requests` of them at a time.
    async fn ranges(
        &self,
        key: &str,
        requests: usize,
        ranges: impl Iterator<Item = std::ops::Range<u64>>,
    ) -> io::Result<()> {
        let reader = self.operator.reader(&self.key(key)).await?;
        let read = |range| async {
            let mut bytes = reader.clone().into_stream(range).await?;
            while bytes.next().await.transpose()?.is_some() {}
            io::Result::Ok(())
        };
        let all = stream::iter(ranges).map(read).buffer_unordered(requests);
        all.try_collect().await
    }

    async fn stream(&self) -> io::Result<Measured> {
        let watch = Watch::start();
        let size = self
            .operator
            .stat(&self.key(STREAM))
            .await?
            .content_length();
        let parts = (0..size.div_ceil(PART)).map(|n| n * PART..size.min((n + 1) * PART));
        self.ranges(STREAM, PARTS, parts).await?;
        Ok(watch.stop(size as f64 / f64::from(1 << 20)))
    }

    async fn random(&self) -> io::Result<Measured> {
        let watch = Watch::start();
        let size = self
            .operator
            .stat(&self.key(RANDOM))
            .await?
            .content_length();
        let pieces = job::shuffled(size / PIECE as u64);
        let parts = pieces
            .iter()
            .map(|n| n * PIECE as u64..(n + 1) * PIECE as u64);
        self.ranges(RANDOM, READERS, parts).await?;
        Ok(watch.stop(pieces.len() as f64))
    }
}
