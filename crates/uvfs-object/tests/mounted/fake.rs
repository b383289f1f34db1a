//! A store in memory that speaks as much of S3 as a mount needs, for keys and answers that no store on a disk can have.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::stores::At;

/// Keys of one answer to a listing, as in S3.
const PAGE: usize = 1000;

/// An object.
#[derive(Clone, Default)]
pub struct Object {
    pub contents: Vec<u8>,
    pub etag: String,
    pub metadata: Vec<(String, String)>,
    /// Answers with the contents have another ETag than those without.
    pub lies: bool,
    /// Requests for the contents are this error.
    pub refused: Option<&'static str>,
    /// All requests for it are refused. Listings show it.
    pub hidden: bool,
    /// More headers of its answers.
    pub headers: &'static str,
}

/// What it has, and what it was asked for.
#[derive(Default)]
pub struct Bucket {
    pub objects: BTreeMap<String, Object>,
    /// `HEAD key`, `GET key` and `LIST prefix`.
    pub asked: Vec<String>,
    puts: u64,
    /// Listings have ETags without quotes.
    pub bare_etags: bool,
    /// Listings are not over after a page, but don't say how they go on.
    pub no_token: bool,
    /// Puts are done whatever their conditions say.
    pub unconditional: bool,
    /// Puts are refused.
    pub forbids: bool,
    /// So many puts are done, and the connection ends before their answers.
    pub loses: u32,
    /// So many answers are this error instead: its status, and the code that S3 has for it.
    pub refuses: Option<(u16, &'static str, u32)>,
}

impl Bucket {
    pub fn put(&mut self, key: &str, contents: &[u8]) -> &mut Object {
        self.puts += 1;
        let object = Object {
            contents: contents.to_vec(),
            etag: format!("\"{}\"", self.puts),
            ..Object::default()
        };
        let place = self.objects.entry(key.to_owned()).or_default();
        *place = object;
        place
    }

    /// A request that puts or copies an object.
    fn change(
        &mut self,
        key: &str,
        contents: Vec<u8>,
        headers: &[(String, String)],
    ) -> (String, Vec<u8>) {
        let header =
            |wanted: &str| Some(headers.iter().find(|(name, _)| name == wanted)?.1.as_str());
        if self.forbids {
            let body = "<Error><Code>AccessDenied</Code><Message>of a test</Message></Error>";
            return ("403 Forbidden".to_owned(), body.into());
        }
        let had = self.objects.get(key);
        let other = |etag| had.is_none_or(|had| had.etag != etag);
        let fails = header("if-match").is_some_and(other)
            || header("if-none-match").is_some() && had.is_some();
        if fails && !self.unconditional {
            let body = "<Error><Code>PreconditionFailed</Code><Message>of a test</Message></Error>";
            return ("412 Precondition Failed".to_owned(), body.into());
        }
        if let Some(source) = header("x-amz-copy-source") {
            let source = decoded(source.trim_start_matches('/').split_once('/').unwrap().1);
            let Some(source) = self.objects.get(&source).cloned() else {
                let body = "<Error><Code>NoSuchKey</Code><Message>of a test</Message></Error>";
                return ("404 Not Found".to_owned(), body.into());
            };
            if header("x-amz-copy-source-if-match").is_some_and(|etag| etag != source.etag) {
                let body =
                    "<Error><Code>PreconditionFailed</Code><Message>of a test</Message></Error>";
                return ("412 Precondition Failed".to_owned(), body.into());
            }
            let object = self.put(key, &source.contents);
            object.metadata = source.metadata;
            let etag = text(&object.etag);
            let body = format!("<CopyObjectResult><ETag>{etag}</ETag></CopyObjectResult>");
            return ("200 OK".to_owned(), body.into_bytes());
        }
        let words = headers.iter();
        let words = words.filter_map(|(name, value)| {
            Some((name.strip_prefix("x-amz-meta-")?.to_owned(), value.clone()))
        });
        let object = self.put(key, &contents);
        object.metadata = words.collect();
        (format!("200 OK\r\netag: {}", object.etag), Vec::new())
    }

    pub fn put_with(&mut self, key: &str, contents: &[u8], metadata: &[(&str, &str)]) {
        let metadata = metadata
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_string()));
        self.put(key, contents).metadata = metadata.collect();
    }
}

pub struct Fake {
    address: SocketAddr,
    bucket: Arc<Mutex<Bucket>>,
}

impl Fake {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let bucket: Arc<Mutex<Bucket>> = Arc::default();
        let shared = bucket.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let bucket = shared.clone();
                std::thread::spawn(move || serve(&client, &bucket));
            }
        });
        Self { address, bucket }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The same store by another address.
    pub fn uri_at(&self, address: SocketAddr) -> String {
        let keys = "region=r&access_key_id=k&secret_access_key=s";
        format!("s3://bucket/p?endpoint=http://{address}&{keys}")
    }

    pub fn bucket(&self) -> MutexGuard<'_, Bucket> {
        self.bucket.lock().unwrap()
    }
}

impl At for Fake {
    fn uri(&self) -> String {
        self.uri_at(self.address)
    }

    fn put(&self, key: &str, contents: &[u8]) {
        self.bucket().put(&format!("p/{key}"), contents);
    }

    fn put_directory(&self, key: &str) {
        self.put(&format!("{key}/"), b"");
    }

    fn remove(&self, key: &str) {
        let gone = self.bucket().objects.remove(&format!("p/{key}"));
        assert!(gone.is_some());
    }
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'%' => {
                let digits = [rest.next().unwrap(), rest.next().unwrap()];
                let digits = std::str::from_utf8(&digits).unwrap();
                bytes.push(u8::from_str_radix(digits, 16).unwrap());
            }
            byte => bytes.push(byte),
        }
    }
    String::from_utf8(bytes).unwrap()
}

/// Text in XML; control characters as S3 writes them.
fn text(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            c if c < ' ' => write!(out, "&#x{:x};", u32::from(c)).unwrap(),
            c => out.push(c),
        }
    }
    out
}

/// One request and its answer after another.
fn serve(client: &TcpStream, bucket: &Mutex<Bucket>) -> Option<()> {
    // Head and body are two writes.
    client.set_nodelay(true).ok()?;
    let mut reader = BufReader::new(client);
    loop {
        let mut line = String::new();
        reader.by_ref().take(1 << 16).read_line(&mut line).ok()?;
        let mut words = line.split_whitespace();
        let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            reader.by_ref().take(1 << 16).read_line(&mut line).ok()?;
            match line.trim_end().split_once(':') {
                Some((name, value)) => {
                    headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
                }
                None => break,
            }
        }
        let length = headers.iter().find(|(name, _)| name == "content-length");
        let length = length.map_or(0, |(_, length)| length.parse().unwrap());
        let mut sent = vec![0; length];
        reader.read_exact(&mut sent).ok()?;
        let header =
            |wanted: &str| Some(headers.iter().find(|(name, _)| name == wanted)?.1.as_str());
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let key = decoded(path.strip_prefix("/bucket").unwrap());
        let mut bucket = bucket.lock().unwrap();
        let (head, body) = match key.strip_prefix('/') {
            _ if bucket.refuses.is_some() => {
                let (status, code, times) = bucket.refuses.unwrap();
                bucket.refuses = (times > 1).then_some((status, code, times - 1));
                let body =
                    format!("<Error><Code>{code}</Code><Message>of a test</Message></Error>");
                (format!("{status} No"), body.into_bytes())
            }
            Some(key) if method == "PUT" => {
                bucket.asked.push(format!("PUT {key}"));
                let answer = bucket.change(key, sent, &headers);
                if bucket.loses > 0 {
                    bucket.loses -= 1;
                    return None;
                }
                answer
            }
            Some(key) if method == "DELETE" => {
                bucket.asked.push(format!("DELETE {key}"));
                let had = bucket.objects.get(key).map(|had| had.etag.as_str());
                let is_other = header("if-match").is_some_and(|etag| had != Some(etag));
                match is_other && !bucket.unconditional {
                    true => ("412 Precondition Failed".to_owned(), Vec::new()),
                    false => {
                        bucket.objects.remove(key);
                        ("204 No Content".to_owned(), Vec::new())
                    }
                }
            }
            Some(key) if !key.is_empty() => {
                bucket.asked.push(format!("{method} {key}"));
                object(
                    bucket.objects.get(key),
                    method == "HEAD",
                    header("range"),
                    header("if-match"),
                )
            }
            _ => ("200 OK".to_owned(), list(&mut bucket, query).into_bytes()),
        };
        drop(bucket);
        let length = match head.contains("content-length") {
            true => String::new(),
            false => format!("\r\ncontent-length: {}", body.len()),
        };
        let mut out = client;
        write!(out, "HTTP/1.1 {head}{length}\r\n\r\n").ok()?;
        if method != "HEAD" {
            out.write_all(&body).ok()?;
        }
    }
}

fn object(
    object: Option<&Object>,
    head: bool,
    range: Option<&str>,
    condition: Option<&str>,
) -> (String, Vec<u8>) {
    let error = |status: &str, code: &str| {
        let body = format!("<Error><Code>{code}</Code><Message>of a test</Message></Error>");
        (status.to_owned(), body.into_bytes())
    };
    let Some(object) = object else {
        return error("404 Not Found", "NoSuchKey");
    };
    if let Some(code) = object
        .refused
        .filter(|_| !head)
        .or(object.hidden.then_some("AccessDenied"))
    {
        return error("403 Forbidden", code);
    }
    if condition.is_some_and(|etag| etag != object.etag && !object.lies) {
        return error("412 Precondition Failed", "PreconditionFailed");
    }
    let size = object.contents.len();
    let range = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let part = range.map(|(from, to)| {
        let to = to.parse().map_or(size, |to: usize| (to + 1).min(size));
        from.parse::<usize>().unwrap()..to
    });
    if part.as_ref().is_some_and(|part| part.start >= size) {
        return error("416 Range Not Satisfiable", "InvalidRange");
    }
    let etag = match object.lies && !head {
        true => "\"a lie\"",
        false => &object.etag,
    };
    let status = if part.is_some() {
        "206 Partial Content"
    } else {
        "200 OK"
    };
    let part = part.unwrap_or(0..size);
    let mut answer = format!(
        "{status}\r\nlast-modified: Tue, 27 Nov 2012 18:15:05 GMT\r\netag: {etag}\r\ncontent-length: {}",
        part.len()
    );
    answer.push_str(object.headers);
    for (name, value) in &object.metadata {
        write!(answer, "\r\nx-amz-meta-{name}: {value}").unwrap();
    }
    (answer, object.contents[part].to_vec())
}

fn list(bucket: &mut Bucket, query: &str) -> String {
    let value = |wanted: &str| {
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        Some(decoded(pairs.find(|(name, _)| *name == wanted)?.1))
    };
    let prefix = value("prefix").unwrap_or_default();
    bucket.asked.push(format!("LIST {prefix}"));
    let by_directory = value("delimiter").is_some();
    let quotes: &[char] = if bucket.bare_etags { &['"'] } else { &[] };
    let after = value("continuation-token").unwrap_or_default();
    let most = value("max-keys")
        .and_then(|most| most.parse().ok())
        .unwrap_or(PAGE);
    let (mut out, mut last, mut count) = (String::new(), String::new(), 0);
    let mut truncated = false;
    for (key, object) in bucket.objects.range(prefix.clone()..) {
        let Some(rest) = key.strip_prefix(&prefix) else {
            break;
        };
        let shown = match rest.split_once('/').filter(|_| by_directory) {
            Some((directory, _)) => format!("{prefix}{directory}/"),
            None => key.clone(),
        };
        if shown <= after || shown == last {
            continue;
        }
        if count == most {
            truncated = true;
            break;
        }
        count += 1;
        let name = text(&shown);
        match shown == *key && !(by_directory && rest.contains('/')) {
            true => write!(
                out,
                "<Contents><Key>{name}</Key><LastModified>2012-11-27T18:15:05.678Z</LastModified><ETag>{}</ETag>\
                 <Size>{}</Size></Contents>",
                text(object.etag.trim_matches(quotes)),
                object.contents.len()
            ),
            false => write!(out, "<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"),
        }
        .unwrap();
        last = shown;
    }
    let token = match truncated {
        true if bucket.no_token => String::new(),
        true => format!(
            "<NextContinuationToken>{}</NextContinuationToken>",
            text(&last)
        ),
        false => String::new(),
    };
    format!(
        "<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{token}{out}</ListBucketResult>"
    )
}
