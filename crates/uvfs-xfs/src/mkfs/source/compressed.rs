//! Compressed archives, known by how they begin.

use super::invalid;
use super::member::{BLOCK, is_header};
use bzip2::bufread::BzDecoder;
use flate2::bufread::GzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::sync::mpsc::{self, Receiver, Sender};

/// The most memory that a decoder takes, in bytes: what the strongest levels of zstd and xz ask for.
const MEMORY: u32 = 128 << 20;

/// Compressions that are known and not read: how they begin, and the program for them.
const OTHERS: [(&[u8], &str); 6] = [
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"LZIP", "lzip"),
    (b"\x89LZO", "lzop"),
    (b"\x1f\x9d", "uncompress"),
    (b"\x5d\0\0", "lzma"),
    (b"PK\x03\x04", "unzip"),
];

/// Bytes that are read ahead at a time, and how often.
const AHEAD: (usize, usize) = (256 << 10, 4);

/// An archive's bytes, decompressed if it is compressed. A thread reads them ahead.
pub fn plain(from: impl Read + Send + 'static) -> io::Result<impl Read + Send> {
    Ahead::new(decompressed(from)?)
}

/// Reads what a thread has read.
struct Ahead {
    /// An empty one ends it.
    full: Receiver<io::Result<Vec<u8>>>,
    empty: Sender<Vec<u8>>,
    chunk: Vec<u8>,
    at: usize,
    ended: bool,
}

impl Ahead {
    fn new(mut from: impl Read + Send + 'static) -> io::Result<Ahead> {
        let (to_reader, full) = mpsc::channel();
        let (empty, emptied) = mpsc::channel::<Vec<u8>>();
        let (size, count) = AHEAD;
        for _ in 0..count {
            let _ = empty.send(vec![0; size]);
        }
        let read = move || {
            // Until the end, an error, or the reader has gone.
            for mut chunk in emptied {
                let read = fill(&mut from, &mut chunk);
                let goes_on = matches!(read, Ok(1..));
                let read = read.map(|n| {
                    chunk.truncate(n);
                    chunk
                });
                if to_reader.send(read).is_err() || !goes_on {
                    break;
                }
            }
        };
        let name = "uvfs-archive".to_owned();
        std::thread::Builder::new().name(name).spawn(read)?;
        Ok(Ahead {
            full,
            empty,
            chunk: Vec::new(),
            at: 0,
            ended: false,
        })
    }
}

impl Read for Ahead {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while self.at == self.chunk.len() && !self.ended {
            let why = || io::Error::other("the thread that reads it has failed");
            let next = self.full.recv().map_err(|_| why())??;
            self.ended = next.is_empty();
            self.at = 0;
            let used = std::mem::replace(&mut self.chunk, next);
            if !used.is_empty() {
                let _ = self.empty.send(used);
            }
        }
        let n = (&self.chunk[self.at..]).read(buf)?;
        self.at += n;
        Ok(n)
    }
}

/// Reads until the buffer is full or nothing follows.
fn fill(from: &mut impl Read, buf: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buf.len() {
        match from.read(&mut buf[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(filled)
}

fn decompressed(mut from: impl Read + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
    let mut head = Vec::new();
    (&mut from).take(BLOCK as u64).read_to_end(&mut head)?;
    // A name may look like a compression.
    let block = head.first_chunk().filter(|block| is_header(block));
    let (is_tar, start) = (block.is_some(), head.clone());
    let from = BufReader::new(Cursor::new(head).chain(from));
    let begins = |magic: &[u8]| !is_tar && start.starts_with(magic);
    if begins(b"\x1f\x8b") {
        return Ok(Named::boxed("gzip", Frames::<_, GzDecoder<_>>::new(from)));
    }
    if begins(b"BZh") {
        return Ok(Named::boxed("bzip2", Frames::<_, BzDecoder<_>>::new(from)));
    }
    if begins(b"\xfd7zXZ\0") {
        let reader = XzReader::new_mem_limit(from, true, MEMORY >> 10);
        return Ok(Named::boxed("xz", reader));
    }
    if begins(b"\x28\xb5\x2f\xfd") || (begins(b"") && is_skippable(&start)) {
        return Ok(Named::boxed("zstd", Zstd::new(from)));
    }
    match OTHERS.iter().find(|(magic, _)| begins(magic)) {
        Some((_, program)) => {
            let why = format!(
                "it is compressed in a way that mkfs does not read; decompress it with {program}"
            );
            Err(invalid(why))
        }
        None => Ok(Box::new(from)),
    }
}

/// A frame that zstd skips: one of 16 numbers.
fn is_skippable(start: &[u8]) -> bool {
    matches!(start, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..])
}

/// A reader whose errors say what it reads.
struct Named<R> {
    name: &'static str,
    from: R,
}

impl<R: Read + Send + 'static> Named<R> {
    fn boxed(name: &'static str, from: R) -> Box<dyn Read + Send> {
        Box::new(Named { name, from })
    }
}

impl<R: Read> Read for Named<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(buf);
        read.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", self.name)))
    }
}

/// Whether something follows, other than the zeros that fill up a block.
fn more(from: &mut impl BufRead) -> io::Result<bool> {
    loop {
        let buf = from.fill_buf()?;
        let zeros = buf.iter().take_while(|b| **b == 0).count();
        if zeros < buf.len() || buf.is_empty() {
            let more = !buf.is_empty();
            from.consume(zeros);
            return Ok(more);
        }
        from.consume(zeros);
    }
}

/// A decoder of one of the frames that lie behind each other.
trait Frame<R>: Read {
    fn begin(from: R) -> Self;
    fn end(self) -> R;
}

impl<R: BufRead> Frame<R> for GzDecoder<R> {
    fn begin(from: R) -> Self {
        GzDecoder::new(from)
    }

    fn end(self) -> R {
        self.into_inner()
    }
}

impl<R: BufRead> Frame<R> for BzDecoder<R> {
    fn begin(from: R) -> Self {
        BzDecoder::new(from)
    }

    fn end(self) -> R {
        self.into_inner()
    }
}

/// Frames behind each other, each of which has a decoder of its own.
struct Frames<R, D> {
    /// The frame that is read; none at the end.
    frame: Option<D>,
    from: std::marker::PhantomData<R>,
}

impl<R: BufRead, D: Frame<R>> Frames<R, D> {
    fn new(from: R) -> Frames<R, D> {
        Frames {
            frame: Some(D::begin(from)),
            from: std::marker::PhantomData,
        }
    }
}

impl<R: BufRead, D: Frame<R>> Read for Frames<R, D> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while let Some(mut frame) = self.frame.take() {
            let n = frame.read(buf)?;
            if n > 0 || buf.is_empty() {
                self.frame = Some(frame);
                return Ok(n);
            }
            let mut from = frame.end();
            if more(&mut from)? {
                self.frame = Some(D::begin(from));
            }
        }
        Ok(0)
    }
}

/// Frames of zstd (RFC 8878).
struct Zstd<R> {
    from: R,
    decoder: FrameDecoder,
    within: bool,
}

impl<R: BufRead> Zstd<R> {
    fn new(from: R) -> Zstd<R> {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(MEMORY.into());
        Zstd {
            from,
            decoder,
            within: false,
        }
    }

    /// Begins a frame, if there is one more.
    fn begin(&mut self) -> io::Result<bool> {
        while more(&mut self.from)? {
            match self.decoder.init(&mut self.from) {
                Ok(()) => {
                    self.within = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let mut skipped = (&mut self.from).take(length.into());
                    if io::copy(&mut skipped, &mut io::sink())? < length.into() {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(FrameDecoderError::WindowSizeTooBig { requested, .. }) => {
                    let why = format!(
                        "it takes {} MiB of memory, and mkfs gives it 128 (compress it without --long)",
                        requested >> 20
                    );
                    return Err(invalid(why));
                }
                Err(e) => return Err(invalid(e)),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.within && !self.begin()? {
                return Ok(0);
            }
            if self.decoder.can_collect() > 0 {
                return self.decoder.read(buf);
            }
            if !self.decoder.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                let decoded = self.decoder.decode_blocks(&mut self.from, one);
                decoded.map_err(invalid)?;
                continue;
            }
            self.within = false;
            let told = self.decoder.get_checksum_from_data();
            if told.is_some() && told != self.decoder.get_calculated_checksum() {
                return Err(invalid("the checksum is wrong"));
            }
        }
    }
}
