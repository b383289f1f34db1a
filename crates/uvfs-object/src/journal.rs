//! The journal: the last record of each draft, in one file.
//!
//! Drafts come and go by the thousand. A file for each record would cost more than the data: ext4, for one, looks at each inode
//! that was freed within the last seconds before it hands out another.
//!
//! The file `journal` is a magic number and frames, little-endian: the length of the record (4 bytes), the CRC-32C of what follows
//! (4), the draft's number (8), the record. An empty record says that the draft has ended. The last frame of a number counts. A
//! frame is written in one piece at the end. What kill -9 or a power cut left of one is no frame, and ends the file. Frames that
//! count no more go when the journal is written anew, under another name first.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use uvfs_io::ops;
use uvfs_server::fs::Errno;

const NAME: &str = "journal";
/// Where it is written anew.
const NEW: &str = "journal.tmp";
const MAGIC: &[u8; 8] = b"uvfsjnl1";
/// The bytes of a frame before its record.
const HEAD: usize = 16;
/// The longest record.
const LONGEST: usize = 16 << 10;
/// The journal is written anew when it is longer than this, and longer than so many times what counts of it.
const LENGTH: u64 = 4 << 20;
const TIMES: u64 = 4;

/// The numbers of drafts are below this: there is always a next one.
pub(crate) const NUMBERS: u64 = u64::MAX / 2;

pub(crate) type Records = BTreeMap<u64, Vec<u8>>;

/// The journal of a cache's directory, which one mount has.
pub(crate) struct Journal {
    dir: PathBuf,
    state: Mutex<State>,
}

struct State {
    file: Arc<File>,
    end: u64,
    /// The same file, and how much of it the disk has.
    data: Arc<ops::File>,
    synced: u64,
    /// The records that count.
    live: HashMap<u64, Vec<u8>>,
    /// The bytes of their frames.
    bytes: u64,
    /// It is written anew when it is longer.
    limit: u64,
}

impl Journal {
    /// Opens the journal of a directory, which has these records from now on.
    pub(crate) fn open(dir: &Path, records: &Records) -> io::Result<Self> {
        let before = File::open(dir)?;
        let mut state = State {
            data: data(&before)?,
            synced: 0,
            file: Arc::new(before),
            end: 0,
            live: records.clone().into_iter().collect(),
            bytes: records.values().map(|record| length(record)).sum(),
            limit: 0,
        };
        match state.rewrite(dir) {
            // There is room for the old one: it is on the disk.
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                let _ = std::fs::remove_file(dir.join(NEW));
                state.go_on(dir, records, error)?;
            }
            done => done?,
        }
        Ok(Self {
            dir: dir.to_owned(),
            state: Mutex::new(state),
        })
    }

    /// Notes the record of a draft.
    pub(crate) fn set(&self, number: u64, record: Vec<u8>) -> io::Result<()> {
        debug_assert!(!record.is_empty() && record.len() <= LONGEST);
        let mut state = uvfs_sys::lock(&self.state);
        if state.live.get(&number) == Some(&record) {
            return Ok(());
        }
        state.append(number, &record)?;
        state.bytes += length(&record);
        if let Some(had) = state.live.insert(number, record) {
            state.bytes -= length(&had);
        }
        self.shorten(&mut state);
        Ok(())
    }

    /// Notes that a draft has ended.
    pub(crate) fn end(&self, number: u64) -> io::Result<()> {
        let mut state = uvfs_sys::lock(&self.state);
        if !state.live.contains_key(&number) {
            return Ok(());
        }
        state.append(number, &[])?;
        let had = state.live.remove(&number).expect("it is there");
        state.bytes -= length(&had);
        self.shorten(&mut state);
        Ok(())
    }

    /// Waits until the disk has it.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let file = uvfs_sys::lock(&self.state).file.clone();
        file.sync_data()
    }

    /// The same for a handler.
    pub(crate) async fn sync_record(&self) -> std::result::Result<(), Errno> {
        let (data, end) = {
            let state = uvfs_sys::lock(&self.state);
            if state.synced == state.end {
                return Ok(());
            }
            (state.data.clone(), state.end)
        };
        ops::fsync(&data, true).await?;
        let mut state = uvfs_sys::lock(&self.state);
        if Arc::ptr_eq(&state.data, &data) {
            state.synced = state.synced.max(end);
        }
        Ok(())
    }

    fn shorten(&self, state: &mut State) {
        if state.end > state.limit
            && let Err(error) = state.rewrite(&self.dir)
        {
            tracing::debug!(%error, "the journal is not written anew");
            state.limit = 2 * state.end;
        }
    }
}

impl State {
    fn append(&mut self, number: u64, record: &[u8]) -> io::Result<()> {
        let frame = frame(number, record);
        uvfs_sys::dying::may_die();
        if let Err(error) = self.file.write_all_at(&frame, self.end) {
            // The next frame is written over what there is of this one.
            let _ = self.file.set_len(self.end);
            return Err(error);
        }
        self.end += frame.len() as u64;
        Ok(())
    }

    /// Writes what counts into a new file, and has the disk get it before it takes the old one's place.
    fn rewrite(&mut self, dir: &Path) -> io::Result<()> {
        let (new, place) = (dir.join(NEW), dir.join(NAME));
        let mut how = OpenOptions::new();
        how.write(true).create(true).truncate(true).mode(0o600);
        let file = how.open(&new)?;
        let mut to = BufWriter::new(&file);
        to.write_all(MAGIC)?;
        for (number, record) in &self.live {
            to.write_all(&frame(*number, record))?;
        }
        to.flush()?;
        drop(to);
        file.sync_all()?;
        uvfs_sys::dying::may_die();
        std::fs::rename(new, place)?;
        File::open(dir)?.sync_all()?;
        self.writes_to(file, MAGIC.len() as u64 + self.bytes)
    }

    /// Goes on with the file that is there, if it has these records. Else this fails for the reason that it is called for.
    fn go_on(&mut self, dir: &Path, records: &Records, why: io::Error) -> io::Result<()> {
        let (found, end, _) = scan(dir)?;
        if found != *records || end == 0 {
            return Err(why);
        }
        let file = OpenOptions::new().write(true).open(dir.join(NAME))?;
        file.set_len(end)?;
        file.sync_all()?;
        self.writes_to(file, end)
    }

    fn writes_to(&mut self, file: File, end: u64) -> io::Result<()> {
        self.data = data(&file)?;
        self.file = Arc::new(file);
        (self.end, self.synced) = (end, end);
        self.limit = LENGTH.max(TIMES * end);
        Ok(())
    }
}

/// Reads the journal of a directory, if there is one. Says whether there is more in the file, which is no frame.
pub(crate) fn read(dir: &Path) -> io::Result<(Records, bool)> {
    let (records, end, len) = scan(dir)?;
    Ok((records, end < len))
}

/// The records of a directory's journal, where its frames end, and how long the file is.
fn scan(dir: &Path) -> io::Result<(Records, u64, u64)> {
    let mut records = Records::new();
    let file = match File::open(dir.join(NAME)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((records, 0, 0)),
        file => file?,
    };
    let (mut end, len) = (0, file.metadata()?.len());
    let mut from = BufReader::new(file);
    let mut magic = [0; MAGIC.len()];
    if take(&mut from, &mut magic)? && magic == *MAGIC {
        end = MAGIC.len() as u64;
        while end < len
            && let Some((number, record)) = next(&mut from)?
        {
            end += length(&record);
            match record.is_empty() {
                true => drop(records.remove(&number)),
                false => drop(records.insert(number, record)),
            }
        }
    }
    Ok((records, end, len))
}

/// Removes the journal of a directory, or leaves these records in it.
pub(crate) fn leave(dir: &Path, records: &Records) -> io::Result<()> {
    match records.is_empty() {
        true => crate::cache::remove(&dir.join(NAME)),
        false => Journal::open(dir, records).map(drop),
    }
}

/// The same file for handlers.
fn data(file: &File) -> io::Result<Arc<ops::File>> {
    Ok(Arc::new(ops::File::from(OwnedFd::from(file.try_clone()?))))
}

/// The bytes of a record's frame.
fn length(record: &[u8]) -> u64 {
    (HEAD + record.len()) as u64
}

fn frame(number: u64, record: &[u8]) -> Vec<u8> {
    let mut all = Vec::with_capacity(HEAD + record.len());
    all.extend((record.len() as u32).to_le_bytes());
    all.extend([0; 4]);
    all.extend(number.to_le_bytes());
    all.extend(record);
    let sum = crc32c::crc32c(&all[8..]);
    all[4..8].copy_from_slice(&sum.to_le_bytes());
    all
}

/// The next frame. `None` for anything else, and at the end.
fn next(from: &mut impl Read) -> io::Result<Option<(u64, Vec<u8>)>> {
    let mut head = [0; HEAD];
    if !take(from, &mut head)? {
        return Ok(None);
    }
    let [len, sum] = [0, 4].map(|at| u32::from_le_bytes(head[at..at + 4].try_into().unwrap()));
    if len as usize > LONGEST {
        return Ok(None);
    }
    let mut body = head[8..].to_vec();
    body.resize(8 + len as usize, 0);
    if !take(from, &mut body[8..])? || crc32c::crc32c(&body) != sum {
        return Ok(None);
    }
    let record = body.split_off(8);
    let number = u64::from_le_bytes(body.try_into().unwrap());
    Ok((number < NUMBERS).then_some((number, record)))
}

/// Fills a buffer, if there is enough.
fn take(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match from.read_exact(buffer) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        read => read.map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(dir: &Path) -> Records {
        let (records, more) = read(dir).unwrap();
        assert!(!more);
        records
    }

    #[test]
    fn the_last_record_counts() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        assert_eq!(of(dir), Records::new());
        let journal = Journal::open(dir, &Records::new()).unwrap();
        for (number, record) in [(1, "one"), (2, "two"), (1, "more"), (3, "three")] {
            journal.set(number, record.into()).unwrap();
        }
        journal.end(2).unwrap();
        let now = Records::from([(1, b"more".to_vec()), (3, b"three".to_vec())]);
        assert_eq!(of(dir), now);
        drop(journal);
        let journal = Journal::open(dir, &now).unwrap();
        journal.end(2).unwrap();
        journal.set(4, b"four".to_vec()).unwrap();
        assert_eq!(of(dir).len(), 3);
        leave(dir, &now).unwrap();
        assert_eq!(of(dir), now);
        leave(dir, &Records::new()).unwrap();
        assert!(!dir.join(NAME).exists());
    }

    #[test]
    fn what_counts_no_more_goes() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let journal = Journal::open(dir, &Records::new()).unwrap();
        journal.set(0, vec![1; 100]).unwrap();
        for n in 1..2000_u64 {
            journal.set(n, vec![n as u8; LONGEST]).unwrap();
            journal.end(n).unwrap();
        }
        assert!(dir.join(NAME).metadata().unwrap().len() < 2 * LENGTH);
        assert_eq!(of(dir), Records::from([(0, vec![1; 100])]));
    }

    proptest! {
        /// A journal that was cut anywhere, or damaged, has the records of what stands before.
        #[test]
        fn a_damaged_journal_has_its_beginning(
            all in proptest::collection::vec((0..5_u64, 0..60_usize), 1..20),
            at: proptest::sample::Index,
            cut: bool,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let mut bytes = MAGIC.to_vec();
            for (number, len) in &all {
                bytes.extend(frame(*number, &vec![*len as u8; *len]));
            }
            let at = at.index(bytes.len());
            match cut {
                true => bytes.truncate(at),
                false => bytes[at] ^= 1,
            }
            std::fs::write(dir.path().join(NAME), &bytes).unwrap();
            let (mut expected, mut end) = (Records::new(), MAGIC.len());
            let mut before = end;
            for (number, len) in all {
                end += HEAD + len;
                if end > at {
                    break;
                }
                before = end;
                match len {
                    0 => drop(expected.remove(&number)),
                    _ => drop(expected.insert(number, vec![len as u8; len])),
                }
            }
            let whole = cut && [0, before].contains(&at);
            let (records, more) = read(dir.path()).unwrap();
            prop_assert_eq!(records, expected);
            prop_assert_eq!(more, !whole);
        }
    }
}
