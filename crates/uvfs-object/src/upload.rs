//! Requests that change the store, by OpenDAL.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::ErrorKind as IoErrorKind;
use std::os::unix::fs::FileExt;

use futures_util::StreamExt;
use opendal::options::{CopyOptions, WriteOptions};
use opendal::{Buffer, EntryMode, ErrorKind, Metadata};
use rustix::io::Errno;
use uvfs_server::fs::{Error, Result};

use crate::map::piece_log;
use crate::store::{Store, Version, failed};

/// Bytes of one part of an upload, at least. Smaller objects are put by one request.
pub(crate) const PART: u64 = 8 << 20;
/// Parts of one upload that are under way at a time.
pub(crate) const PARTS: usize = 4;
/// Parts of an object, at most: S3's limit is 10,000.
const MOST_PARTS: u64 = 9_000;
/// Bytes that are read from a file at a time to be compared.
const BLOCK: usize = 1 << 16;

/// Which conditions of puts the store keeps.
#[derive(Clone, Copy, Default)]
pub(crate) struct Conditions {
    if_match: bool,
    if_none_match: bool,
}

/// An object that was put.
pub(crate) struct Stored {
    pub(crate) version: Version,
    /// The checksums of its pieces, as a map has them.
    pub(crate) sums: Vec<u32>,
}

/// The user metadata of an object.
pub(crate) type Words = HashMap<String, String>;

impl Store {
    /// Puts what a file has as an object, in the place of the version `replaces`, or as a new object. `None` if the store
    /// has another version.
    ///
    /// # Errors
    /// EAGAIN when the file was made shorter meanwhile, and those of the store.
    pub(crate) async fn put(
        &self,
        key: &str,
        file: &File,
        replaces: Option<&Version>,
        metadata: Option<Words>,
    ) -> Result<Option<Stored>> {
        let size = file.metadata()?.len();
        let mut how = WriteOptions {
            user_metadata: metadata,
            ..WriteOptions::default()
        };
        if !self.condition(&mut how, replaces) && !self.has(key, replaces).await? {
            return Ok(None);
        }
        let mut pieces = Pieces::new(size);
        let put = match size <= PART {
            true => {
                let all = pieces.read(file, 0, size)?;
                let answer = self.uploads.write_options(key, all, how);
                self.uploaded(answer).await
            }
            false => {
                let parts = self.put_parts(key, file, &mut pieces, how, replaces);
                match parts.await? {
                    Some(put) => put,
                    None => return Ok(None),
                }
            }
        };
        let answer = match put {
            Ok(answer) => answer,
            Err(error) if error.kind() == ErrorKind::ConditionNotMatch => return Ok(None),
            Err(error) => return Err(failed(key, error)),
        };
        let version = self.version_of(key, &answer, size).await?;
        let sums = pieces.sums;
        Ok(Some(Stored { version, sums }))
    }

    /// Uploads a large file in parts, some of them at a time. Without all of them the store has no object. `None` if the store
    /// has another version by then.
    async fn put_parts(
        &self,
        key: &str,
        file: &File,
        pieces: &mut Pieces,
        mut how: WriteOptions,
        replaces: Option<&Version>,
    ) -> Result<Option<opendal::Result<Metadata>>> {
        let size = pieces.size;
        let part = size
            .div_ceil(MOST_PARTS)
            .next_multiple_of(1 << 20)
            .max(PART);
        how.chunk = usize::try_from(part).ok();
        how.concurrent = PARTS;
        let begin = self.uploads.writer_options(key, how);
        let mut writer = match self.uploaded(begin).await {
            Ok(writer) => writer,
            Err(error) => return Ok(Some(Err(error))),
        };
        let mut at = 0;
        let done = loop {
            if at == size {
                // Some stores keep the conditions of single requests alone, so the versions are compared once more. A store that
                // takes no parts shows this very file by now.
                let of_parts = self.uploads.info().capability().write_multi_min_size;
                let same = match of_parts {
                    Some(_) => self.has(key, replaces).await,
                    None => Ok(true),
                };
                match same {
                    Ok(true) => break Ok(Some(self.uploaded(writer.close()).await)),
                    Ok(false) => break Ok(None),
                    Err(error) => break Err(error),
                }
            }
            let len = part.min(size - at);
            let bytes = match pieces.read(file, at, len) {
                Ok(bytes) => bytes,
                Err(error) => break Err(error),
            };
            if let Err(error) = self.uploaded(writer.write(bytes)).await {
                break Ok(Some(Err(error)));
            }
            at += len;
        };
        if !matches!(done, Ok(Some(Ok(_)))) {
            // The parts that the store has by now cost money, and are no object.
            let _ = self.uploaded(writer.abort()).await;
        }
        done
    }

    /// Lets the store itself compare versions, if it can.
    fn condition(&self, how: &mut WriteOptions, replaces: Option<&Version>) -> bool {
        match replaces {
            None => {
                how.if_not_exists = self.puts.if_none_match;
                how.if_not_exists
            }
            Some(version) => {
                how.if_match = version.etag.clone().filter(|_| self.puts.if_match);
                how.if_match.is_some()
            }
        }
    }

    /// Whether the store has this version, or no object.
    async fn has(&self, key: &str, version: Option<&Version>) -> Result<bool> {
        let now = self.stat(key).await?.and_then(|facts| facts.version);
        Ok(match (now, version) {
            (None, None) => true,
            (Some(now), Some(version)) => now.is(version),
            _ => false,
        })
    }

    /// The version that an answer tells, or for stores without ETags what the store says of the object then.
    async fn version_of(&self, key: &str, answer: &Metadata, size: u64) -> Result<Version> {
        if answer.etag().is_some() {
            return Ok(Version {
                size,
                ..Version::new(answer)
            });
        }
        let now = self.stat(key).await?.and_then(|facts| facts.version);
        let gone = || Error::new(Errno::STALE, format!("object {key:?} is gone already"));
        now.ok_or_else(gone)
    }

    /// Whether a version has the contents of a file.
    pub(crate) async fn equals(&self, key: &str, version: &Version, file: &File) -> Result<bool> {
        if file.metadata()?.len() != version.size {
            return Ok(false);
        }
        let mut stream = self.fetch(key, version, 0..version.size).await?;
        let (mut at, mut block) = (0, vec![0; BLOCK]);
        while let Some(buffer) = self.next(key, &mut stream).await? {
            for bytes in buffer {
                for part in bytes.chunks(BLOCK) {
                    let mine = &mut block[..part.len()];
                    if file.read_exact_at(mine, at).is_err() || mine != part {
                        return Ok(false);
                    }
                    at += part.len() as u64;
                }
            }
        }
        Ok(at == version.size)
    }

    /// Copies an object, and gives the copy's version.
    pub(crate) async fn copy(&self, from: &str, to: &str, size: u64) -> Result<Version> {
        let copy = (self.uploads).copy_options(from, to, CopyOptions::default());
        match self.uploaded(copy).await {
            Ok(answer) => self.version_of(to, &answer, size).await,
            Err(error) => Err(failed(from, error)),
        }
    }

    /// Removes an object, or the marker of a directory.
    pub(crate) async fn remove(&self, key: &str) -> Result<()> {
        match self.within(self.operator.delete(key)).await {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(key, error)),
            _ => Ok(()),
        }
    }

    /// Puts the marker of a directory.
    pub(crate) async fn make_directory(&self, key: &str) -> Result<()> {
        let made = self.within(self.operator.create_dir(key)).await;
        made.map_err(|error| failed(key, error))
    }

    /// Whether a directory has a marker.
    pub(crate) async fn is_marked(&self, key: &str) -> Result<bool> {
        Ok(self.stat(key).await?.is_some())
    }

    /// The keys of all objects and markers below a directory.
    pub(crate) async fn below(&self, directory: &str) -> Result<Vec<(String, u64)>> {
        let error = |error| failed(directory, error);
        let list = self.operator.lister_with(directory).recursive(true);
        let mut list = self.within(list).await.map_err(error)?;
        let mut found = Vec::new();
        loop {
            let next = async { list.next().await.transpose() };
            let Some(entry) = self.within(next).await.map_err(error)? else {
                return Ok(found);
            };
            let size = match entry.metadata().mode() {
                EntryMode::DIR => 0,
                _ => entry.metadata().content_length(),
            };
            found.push((entry.path().to_owned(), size));
        }
    }

    /// Tries by an object of its own which conditions of puts the store keeps, and whether it may be written at all.
    pub(crate) async fn probe(&self) -> Result<Conditions> {
        let random = RandomState::new().build_hasher().finish();
        let key = format!(".uvfs-{random:016x}");
        let put = async |etag: Option<&str>| {
            let how = WriteOptions {
                if_not_exists: etag.is_none(),
                if_match: etag.map(str::to_owned),
                ..WriteOptions::default()
            };
            let put = self.uploads.write_options(&key, Buffer::new(), how);
            self.uploaded(put).await
        };
        let can = self.uploads.info().capability();
        let refused = |answer: opendal::Result<Metadata>| match answer {
            Err(error) if error.kind() == ErrorKind::ConditionNotMatch => Ok(true),
            Err(error) => Err(failed(&key, error)),
            Ok(_) => Ok(false),
        };
        let (mut kept, mut ignored) = (Conditions::default(), Vec::new());
        if can.write_with_if_not_exists {
            put(None).await.map_err(|error| failed(&key, error))?;
            kept.if_none_match = refused(put(None).await)?;
            if !kept.if_none_match {
                ignored.push("If-None-Match");
            }
        }
        if can.write_with_if_match {
            kept.if_match = refused(put(Some("\"another\"")).await)?;
            if !kept.if_match {
                ignored.push("If-Match");
            }
        }
        if !ignored.is_empty() {
            let conditions = ignored.join(" and ");
            tracing::warn!(
                "the store ignores {conditions}: versions are compared before each put, which another writer can overtake"
            );
        }
        self.remove(&key).await?;
        Ok(kept)
    }
}

/// The checksums of a file that is read once from its beginning.
struct Pieces {
    size: u64,
    log: u32,
    at: u64,
    sum: u32,
    sums: Vec<u32>,
}

impl Pieces {
    fn new(size: u64) -> Self {
        Self {
            size,
            log: piece_log(size),
            at: 0,
            sum: 0,
            sums: Vec::new(),
        }
    }

    /// Reads the next bytes of the file.
    fn read(&mut self, file: &File, at: u64, len: u64) -> Result<Buffer> {
        debug_assert_eq!(at, self.at);
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, at)
            .map_err(|error| match error.kind() {
                IoErrorKind::UnexpectedEof => Error::from(Errno::AGAIN),
                _ => error.into(),
            })?;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let end = ((self.at >> self.log) + 1) << self.log;
            let end = end.min(self.size);
            let (piece, others) = rest.split_at(rest.len().min((end - self.at) as usize));
            self.sum = crc32c::crc32c_append(self.sum, piece);
            self.at += piece.len() as u64;
            rest = others;
            if self.at == end {
                self.sums.push(std::mem::take(&mut self.sum));
            }
        }
        Ok(Buffer::from(bytes))
    }
}
