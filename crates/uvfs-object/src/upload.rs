//! Requests that change the store, by OpenDAL.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::ErrorKind as IoErrorKind;
use std::os::unix::fs::FileExt;

use futures_util::StreamExt;
use opendal::options::{CopyOptions, DeleteOptions, WriteOptions};
use opendal::raw::oio::Write;
use opendal::raw::{OpWrite, Service};
use opendal::{Buffer, EntryMode, ErrorKind, Metadata, Writer};
use rustix::fs::FileType;
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use tokio::sync::OwnedSemaphorePermit;
use uvfs_server::fs::{Error, Result};

use crate::map::piece_log;
use crate::posix::Posix;
use crate::store::{PUTS, Store, Version, failed, is_below};

/// Bytes of one part of an upload, at least. Smaller objects are put by one request.
pub(crate) const PART: u64 = 8 << 20;
/// Parts of one upload that are in memory at a time.
pub(crate) const PARTS: usize = 4;
/// Parts of an object, at most: S3's limit is 10,000.
const MOST_PARTS: u64 = 9_000;
/// Bytes of the smallest piece, and bytes that are read from a file at a time to be compared.
const BLOCK: usize = 1 << 16;

/// Which conditions the store keeps: of puts, and of removals.
#[derive(Clone, Copy, Default)]
pub(crate) struct Conditions {
    if_match: bool,
    if_none_match: bool,
    remove_if_match: bool,
}

impl Conditions {
    /// Bits for [`Conditions::from_bits`].
    pub(crate) fn bits(self) -> u8 {
        let all = [self.if_match, self.if_none_match, self.remove_if_match];
        all.into_iter()
            .rfold(0, |bits, is| bits << 1 | u8::from(is))
    }

    pub(crate) fn from_bits(bits: u8) -> Self {
        let is = |bit: u8| bits >> bit & 1 == 1;
        Self {
            if_match: is(0),
            if_none_match: is(1),
            remove_if_match: is(2),
        }
    }
}

/// The outcome of the removal of a version.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removal {
    Done,
    /// There is no object: an earlier attempt removed it, or another writer had put a version and removed that.
    Gone,
    /// Another writer has put another version, which stays.
    Refused,
}

/// An object that was put.
pub(crate) struct Stored {
    pub(crate) version: Version,
    /// The checksums of its pieces, as a map has them.
    pub(crate) sums: Vec<u32>,
    /// The hash of its contents, if it is known.
    pub(crate) print: Option<Print>,
}

/// The beginning of the SHA-256 of an object's contents.
pub(crate) type Print = [u8; 16];

/// Called with the hash of an object's contents, before the request that makes the store have them.
pub(crate) type Tell<'a> = &'a (dyn Fn(Print) -> Result<()> + Send + Sync);

/// The user metadata of an object.
pub(crate) type Words = HashMap<String, String>;

/// An object that is uploaded in parts. The store has no object before [`Store::put`] completes it.
pub(crate) struct Upload {
    writer: Writer,
    key: String,
    replaces: Option<Version>,
    /// Bytes of a part.
    part: u64,
    pieces: Pieces,
    /// The permits for the memory of an upload that began before its file was closed. The upload keeps them to its end, because
    /// OpenDAL does not tell when a part is sent.
    _memory: Option<OwnedSemaphorePermit>,
}

impl Upload {
    fn is_of(&self, key: &str, replaces: Option<&Version>) -> bool {
        self.key == key
            && match (&self.replaces, replaces) {
                (None, None) => true,
                (Some(one), Some(two)) => one.is(two),
                _ => false,
            }
    }
}

fn options(user_metadata: Option<Words>) -> WriteOptions {
    WriteOptions {
        user_metadata,
        ..WriteOptions::default()
    }
}

impl Store {
    /// Puts what a file has as an object, in the place of the version `replaces`, or as a new object. `None` if the store
    /// has another version. Goes on with the upload of parts that have been sent, if it is one of this object.
    ///
    /// # Errors
    /// EAGAIN when the file was made shorter meanwhile, and those of the store.
    pub(crate) async fn put(
        &self,
        key: &str,
        file: &File,
        replaces: Option<&Version>,
        metadata: Option<Words>,
        sent: Option<Upload>,
        tell: Option<Tell<'_>>,
    ) -> Result<Option<Stored>> {
        self.earlier_ended().await;
        let size = file.metadata()?.len();
        let upload = match sent {
            Some(upload) if upload.is_of(key, replaces) && upload.pieces.at <= size => upload,
            other => {
                if let Some(upload) = other {
                    self.abort(upload).await;
                }
                let mut how = options(metadata);
                if !self.condition(&mut how, replaces) && !self.has(key, replaces).await? {
                    return Ok(None);
                }
                let (most, more) = self.at_once();
                if size > most && !more {
                    let why = format!("object {key:?}: the store takes {most} bytes at most");
                    return Err(Error::new(Errno::FBIG, why));
                }
                if size <= most {
                    let mut pieces = Pieces::new(tell.is_some());
                    let all = Buffer::from(pieces.read(file, size)?);
                    pieces.tell(tell)?;
                    let answer = self.uploads.write_options(key, all, how);
                    let answer = self.uploaded(answer).await;
                    return self.stored(key, size, pieces, answer).await;
                }
                let whole = size.div_ceil(MOST_PARTS).next_multiple_of(1 << 20);
                let pieces = Pieces::new(tell.is_some());
                match self
                    .begin(key, replaces, how, whole.max(PART), pieces)
                    .await
                {
                    Ok(upload) => upload,
                    Err(error) => {
                        return self.stored(key, size, Pieces::default(), Err(error)).await;
                    }
                }
            }
        };
        self.complete(upload, file, size, tell).await
    }

    /// Begins to upload a file that programs still write. The store has to take parts: see [`Store::takes_parts`].
    ///
    /// # Errors
    /// The store's errors.
    pub(crate) async fn begin_early(
        &self,
        key: &str,
        replaces: Option<&Version>,
        memory: OwnedSemaphorePermit,
        prints: bool,
    ) -> Result<Upload> {
        self.earlier_ended().await;
        let mut how = options(None);
        self.condition(&mut how, replaces);
        let pieces = Pieces::new(prints);
        let begun = self.begin(key, replaces, how, PART, pieces).await;
        let upload = begun.map_err(|error| failed(key, error))?;
        Ok(Upload {
            _memory: Some(memory),
            ..upload
        })
    }

    /// Whether an upload of parts may begin before the file is whole. A directory of the host is as near as the file itself.
    pub(crate) fn takes_parts(&self) -> bool {
        let info = self.uploads.info();
        info.capability().write_can_multi && info.scheme() != "fs"
    }

    /// The largest object that one request puts, and whether larger ones may be put in several.
    fn at_once(&self) -> (u64, bool) {
        match self.uploads.info().capability().write_can_multi {
            true => (PART, true),
            // As much as the parts of another upload take.
            false => (PARTS as u64 * PART, false),
        }
    }

    async fn begin(
        &self,
        key: &str,
        replaces: Option<&Version>,
        mut how: WriteOptions,
        part: u64,
        pieces: Pieces,
    ) -> opendal::Result<Upload> {
        // Each write is a part. OpenDAL keeps the last one back, and sends the others.
        how.concurrent = PARTS - 1;
        let writer = self.uploads.writer_options(key, how);
        Ok(Upload {
            writer: self.uploaded(writer).await?,
            key: key.to_owned(),
            replaces: replaces.cloned(),
            part,
            pieces,
            _memory: None,
        })
    }

    /// Sends the next part of a file, which has `size` bytes.
    ///
    /// # Errors
    /// EAGAIN when the file was made shorter meanwhile, and those of the store.
    pub(crate) async fn send(&self, upload: &mut Upload, file: &File, size: u64) -> Result<()> {
        let sent = self.next_part(upload, file, size).await?;
        sent.map_err(|error| failed(&upload.key, error))
    }

    async fn next_part(
        &self,
        upload: &mut Upload,
        file: &File,
        size: u64,
    ) -> Result<opendal::Result<()>> {
        let len = upload.part.min(size - upload.pieces.at);
        let bytes = Buffer::from(upload.pieces.read(file, len)?);
        Ok(self.uploaded(upload.writer.write(bytes)).await)
    }

    /// Sends what is left of a file. `None` if the store has another version by then.
    async fn complete(
        &self,
        mut upload: Upload,
        file: &File,
        size: u64,
        tell: Option<Tell<'_>>,
    ) -> Result<Option<Stored>> {
        let done = loop {
            if upload.pieces.at == size {
                // Some stores keep the conditions of single requests alone, so the versions are compared once more. A store that
                // takes no parts shows this very file by now.
                let same = match self.takes_parts() {
                    true => self.has(&upload.key, upload.replaces.as_ref()).await,
                    false => Ok(true),
                };
                match same.and_then(|same| upload.pieces.tell(tell).map(|()| same)) {
                    Ok(true) => break Ok(Some(self.uploaded(upload.writer.close()).await)),
                    Ok(false) => break Ok(None),
                    Err(error) => break Err(error),
                }
            }
            match self.next_part(&mut upload, file, size).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => break Ok(Some(Err(error))),
                Err(error) => break Err(error),
            }
        };
        match done {
            Ok(Some(Ok(answer))) => {
                let Upload { key, pieces, .. } = upload;
                self.stored(&key, size, pieces, Ok(answer)).await
            }
            failed => {
                let (key, pieces) = (upload.key.clone(), Pieces::default());
                self.abort(upload).await;
                match failed? {
                    Some(answer) => self.stored(&key, size, pieces, answer).await,
                    None => Ok(None),
                }
            }
        }
    }

    /// Ends an upload: the parts that the store has by now cost money, and are no object.
    pub(crate) async fn abort(&self, mut upload: Upload) {
        if let Err(error) = self.uploaded(upload.writer.abort()).await {
            let key = &upload.key;
            tracing::warn!(key, %error, "the store may keep parts of an upload that was given up");
        }
    }

    /// Takes the new version from the answer to a put. `None` if the store kept another version.
    async fn stored(
        &self,
        key: &str,
        size: u64,
        pieces: Pieces,
        answer: opendal::Result<Metadata>,
    ) -> Result<Option<Stored>> {
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) if error.kind() == ErrorKind::ConditionNotMatch => return Ok(None),
            Err(error) => return Err(failed(key, error)),
        };
        let version = self.version_of(key, &answer, size).await?;
        let print = pieces.print();
        let sums = pieces.sums();
        Ok(Some(Stored {
            version,
            sums,
            print,
        }))
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
        Ok(file.metadata()?.len() == version.size && self.begins(key, version, file).await?)
    }

    /// Whether a version is what a put of a file leaves that is cut off, in a store that writes into the object that it shows.
    pub(crate) async fn is_cut_off(
        &self,
        key: &str,
        version: &Version,
        file: &File,
    ) -> Result<bool> {
        let shows = self.uploads.info().scheme() == "webdav";
        let is_part = shows && version.size < file.metadata()?.len();
        Ok(is_part && self.begins(key, version, file).await?)
    }

    /// Whether a file begins with the contents of a version.
    async fn begins(&self, key: &str, version: &Version, file: &File) -> Result<bool> {
        let mut block = vec![0; BLOCK];
        self.all_of(key, version, |at, part| {
            let mine = &mut block[..part.len()];
            file.read_exact_at(mine, at).is_ok() && mine == part
        })
        .await
    }

    /// Whether a version has the contents of one of these prints.
    pub(crate) async fn has_print(
        &self,
        key: &str,
        version: &Version,
        prints: [Option<Print>; 2],
    ) -> Result<bool> {
        if prints == [None; 2] {
            return Ok(false);
        }
        let mut hash = Sha256::new();
        let whole = self.all_of(key, version, |_, part| {
            hash.update(part);
            true
        });
        let is_whole = whole.await?;
        let hash = hash.finalize();
        let mut prints = prints.iter().flatten();
        Ok(is_whole && prints.any(|print| hash[..print.len()] == *print))
    }

    /// Looks at all of a version, until that says no.
    async fn all_of(
        &self,
        key: &str,
        version: &Version,
        mut look: impl FnMut(u64, &[u8]) -> bool,
    ) -> Result<bool> {
        let mut stream = self.fetch(key, version, 0..version.size).await?;
        let mut at = 0;
        while let Some(buffer) = self.next(key, &mut stream).await? {
            for bytes in buffer {
                for part in bytes.chunks(BLOCK) {
                    if !look(at, part) {
                        return Ok(false);
                    }
                    at += part.len() as u64;
                }
            }
        }
        Ok(at == version.size)
    }

    /// Copies an object, and gives the copy's version.
    pub(crate) async fn copy(&self, from: &str, key: &str, size: u64) -> Result<Version> {
        self.earlier_ended().await;
        let copy = async {
            let copy_to = |to| (self.uploads).copy_options(from, to, CopyOptions::default());
            if self.puts_in.is_none() {
                return copy_to(key).await;
            }
            // OpenDAL does not rename copies into place, only what it is given to write.
            let part = format!("{PUTS}{:016x}", random());
            let answer = copy_to(&part).await?;
            self.uploads.rename(&part, key).await?;
            Ok(answer)
        };
        match self.uploaded(copy).await {
            Ok(answer) => self.version_of(key, &answer, size).await,
            Err(error) => Err(failed(from, error)),
        }
    }

    /// Removes an object if it is this version.
    pub(crate) async fn remove_version(&self, key: &str, version: &Version) -> Result<Removal> {
        self.earlier_ended().await;
        let now = async || Ok::<_, Error>(self.stat(key).await?.and_then(|facts| facts.version));
        let if_match = version.etag.clone().filter(|_| self.puts.remove_if_match);
        if if_match.is_none() {
            match now().await? {
                Some(now) if !now.is(version) => return Ok(Removal::Refused),
                None => return Ok(Removal::Gone),
                Some(_) => {}
            }
        }
        let how = DeleteOptions {
            if_match,
            ..DeleteOptions::default()
        };
        match self.within(self.operator.delete_options(key, how)).await {
            Ok(()) => Ok(Removal::Done),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Removal::Gone),
            Err(error) if error.kind() == ErrorKind::ConditionNotMatch => match now().await? {
                None => Ok(Removal::Gone),
                Some(_) => Ok(Removal::Refused),
            },
            Err(error) => Err(failed(key, error)),
        }
    }

    /// Removes an object, whatever its version, or the marker of a directory.
    pub(crate) async fn remove(&self, key: &str) -> Result<()> {
        self.earlier_ended().await;
        match self.within(self.operator.delete(key)).await {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(key, error)),
            _ => Ok(()),
        }
    }

    /// Whether attributes of directories are kept. A directory of the host, or of WebDAV, is no object that could have them.
    pub(crate) fn keeps_directories(&self) -> bool {
        self.metadata && !matches!(self.operator.info().scheme(), "fs" | "webdav")
    }

    /// Puts the marker of a directory, with attributes if they count.
    pub(crate) async fn make_directory(&self, key: &str, posix: &Posix) -> Result<()> {
        self.earlier_ended().await;
        let made = match self.keeps_directories() && *posix != Posix::default() {
            true => self.within(self.put_marker(key, posix)).await,
            false => self.within(self.operator.create_dir(key)).await,
        };
        made.map_err(|error| failed(key, error))
    }

    /// OpenDAL's operator writes no object whose key is a directory's, and its services do.
    async fn put_marker(&self, key: &str, posix: &Posix) -> opendal::Result<()> {
        let service = self.operator.service();
        let how = options(Some(posix.words(FileType::Directory)));
        let (how, _) = OpWrite::from_options(&service.capability(), how)?;
        let mut writer = service.write(self.operator.context(), key, how)?;
        writer.write(Buffer::new()).await?;
        writer.close().await.map(drop)
    }

    /// Puts the marker of a directory that has none. The root needs none.
    pub(crate) async fn mark(&self, key: &str) -> Result<()> {
        self.earlier_ended().await;
        match key.is_empty() || self.stat(key).await?.is_some() {
            true => Ok(()),
            false => self.make_directory(key, &Posix::default()).await,
        }
    }

    /// The keys and versions of all objects below a directory, and the keys of all markers.
    pub(crate) async fn below(&self, directory: &str) -> Result<Vec<(String, Option<Version>)>> {
        let error = |error| failed(directory, error);
        let list = self.operator.lister_with(directory).recursive(true);
        let mut list = self.within(list).await.map_err(error)?;
        let mut found = Vec::new();
        loop {
            let next = async { list.next().await.transpose() };
            let Some(entry) = self.within(next).await.map_err(error)? else {
                return Ok(found);
            };
            if !is_below(entry.path(), directory) {
                continue;
            }
            let is_file = entry.metadata().mode() != EntryMode::DIR;
            let version = is_file.then(|| Version::new(entry.metadata()));
            found.push((entry.path().to_owned(), version));
        }
    }

    /// Tries by an object of its own which conditions of puts the store keeps, and whether it may be written at all.
    pub(crate) async fn probe(&self) -> Result<Conditions> {
        let key = format!(".uvfs-{:016x}", random());
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
        // OpenDAL looks in a directory of the host before it writes, not as it renames what it wrote.
        if can.write_with_if_not_exists && self.puts_in.is_none() {
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
        if can.delete_with_if_match {
            let how = DeleteOptions {
                if_match: Some("\"another\"".to_owned()),
                ..DeleteOptions::default()
            };
            let answer = self.within(self.operator.delete_options(&key, how)).await;
            kept.remove_if_match =
                answer.is_err_and(|error| error.kind() == ErrorKind::ConditionNotMatch);
        }
        self.remove(&key).await?;
        Ok(kept)
    }
}

fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// The hash of a file.
///
/// # Errors
/// EAGAIN when the file was made shorter meanwhile.
pub(crate) fn print(file: &File) -> Result<Print> {
    let (mut pieces, size) = (Pieces::new(true), file.metadata()?.len());
    while pieces.at < size {
        pieces.read(file, (size - pieces.at).min(PART))?;
    }
    Ok(pieces.print().expect("it has been asked for"))
}

/// The checksums of a file that is read once from its beginning.
#[derive(Default)]
struct Pieces {
    /// Bytes that have been read.
    at: u64,
    /// The checksum of the last block as far as it has been read.
    sum: u32,
    /// The checksums of blocks of [`BLOCK`] bytes.
    blocks: Vec<u32>,
    print: Option<Sha256>,
}

impl Pieces {
    fn new(prints: bool) -> Self {
        Self {
            print: prints.then(Sha256::new),
            ..Self::default()
        }
    }

    /// Tells the hash of the whole file, which is about to become an object.
    fn tell(&self, tell: Option<Tell<'_>>) -> Result<()> {
        match tell.zip(self.print()) {
            Some((tell, print)) => tell(print),
            None => Ok(()),
        }
    }

    fn print(&self) -> Option<Print> {
        let hash = self.print.clone()?.finalize();
        hash.first_chunk().copied()
    }

    /// Reads the next bytes of the file.
    fn read(&mut self, file: &File, len: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, self.at)
            .map_err(|error| match error.kind() {
                IoErrorKind::UnexpectedEof => Error::from(Errno::AGAIN),
                _ => error.into(),
            })?;
        if let Some(hash) = &mut self.print {
            hash.update(&bytes);
        }
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let left = BLOCK - self.at as usize % BLOCK;
            let (block, others) = rest.split_at(rest.len().min(left));
            self.sum = crc32c::crc32c_append(self.sum, block);
            self.at += block.len() as u64;
            rest = others;
            if block.len() == left {
                self.blocks.push(std::mem::take(&mut self.sum));
            }
        }
        Ok(bytes)
    }

    /// The checksums of the pieces, which a large file has longer ones of.
    fn sums(mut self) -> Vec<u32> {
        let last = self.at as usize % BLOCK;
        if last > 0 {
            self.blocks.push(self.sum);
        }
        let blocks = (1 << piece_log(self.at)) / BLOCK;
        if blocks == 1 {
            return self.blocks;
        }
        let lens = |n| match n + 1 == self.blocks.len() && last > 0 {
            true => last,
            false => BLOCK,
        };
        let piece = |n: usize| {
            let all = n * blocks..self.blocks.len().min((n + 1) * blocks);
            all.fold(0, |sum, n| {
                crc32c::crc32c_combine(sum, self.blocks[n], lens(n))
            })
        };
        (0..self.blocks.len().div_ceil(blocks)).map(piece).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks' checksums make those of longer pieces.
    #[test]
    fn sums_of_blocks_make_those_of_pieces() {
        for size in [0, 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7] {
            let bytes: Vec<_> = (0..size).map(|n| (n * 7 + n / 251) as u8).collect();
            let mut file = tempfile::tempfile().unwrap();
            std::io::Write::write_all(&mut file, &bytes).unwrap();
            let mut pieces = Pieces::default();
            for part in bytes.chunks(100_000) {
                assert_eq!(pieces.read(&file, part.len() as u64).unwrap(), part);
            }
            let sums: Vec<_> = bytes.chunks(BLOCK).map(crc32c::crc32c).collect();
            assert_eq!(pieces.sums(), sums);
        }
    }
}
