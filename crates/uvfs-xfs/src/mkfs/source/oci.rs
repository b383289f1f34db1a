//! Images of layers: OCI layouts (image-spec 1.1, "Image Layout", "Image Index", "Image Manifest"), and what
//! `docker save` writes.

use super::tar::Archive;
use super::{Root, SourceReader, as_path, invalid};
use crate::mkfs::MkfsError;
use rustix::fs::OFlags;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256, Sha512};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The largest index or manifest.
const LARGEST: u64 = 4 << 20;
/// The most indexes and manifests that lead to one image.
const MOST_INDEXES: usize = 64;
/// The most symbolic links on the way to a layer.
const MOST_LINKS: usize = 8;

/// A file of an image.
type Opened = Box<dyn Read + Send>;

/// Where an image's files are.
pub trait Files {
    /// Opens a file, if it is there. The path has no names that lead out.
    fn open(&self, path: &str) -> Result<Option<Opened>, MkfsError>;

    /// The path of a file in messages.
    fn path(&self, path: &str) -> PathBuf;
}

impl Files for Path {
    fn open(&self, path: &str) -> Result<Option<Opened>, MkfsError> {
        let path = self.join(path);
        // A FIFO would wait for a writer.
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
        let mut how = File::options();
        how.read(true).custom_flags(flags.bits() as i32);
        let opened = how.open(&path).and_then(|file| {
            let regular = file.metadata()?.is_file();
            Ok(regular.then(|| Box::new(file) as Opened))
        });
        match opened {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => opened.map_err(|e| MkfsError::source(path, "opening it", e)),
        }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.join(path)
    }
}

/// The contents of a file of a source.
struct Contents {
    from: SourceReader,
    at: u64,
    size: u64,
}

impl Read for Contents {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = buf.len().min((self.size - self.at).min(1 << 20) as usize);
        let n = self.from.read_at(self.at, &mut buf[..n])?;
        self.at += n as u64;
        Ok(n)
    }
}

impl Files for Root {
    fn open(&self, path: &str) -> Result<Option<Opened>, MkfsError> {
        // Older versions of Docker save a layer once, and lead to it by symbolic links.
        let mut names: VecDeque<Box<[u8]>> = path.split('/').map(|n| n.as_bytes().into()).collect();
        let mut dirs = vec![self.dir.clone()];
        let mut links = 0;
        while let (Some(name), Some(dir)) = (names.pop_front(), dirs.last().cloned()) {
            match &*name {
                b"" | b"." => continue,
                b".." => {
                    if dirs.len() > 1 {
                        dirs.pop();
                    }
                    continue;
                }
                _ => {}
            }
            let Some(entry) = dir.list()?.into_iter().find(|e| e.name == name) else {
                return Ok(None);
            };
            if entry.meta.is_dir() {
                dirs.extend(dir.enter(&name)?);
            } else if !entry.target.is_empty() {
                links += 1;
                if links > MOST_LINKS {
                    return Ok(None);
                }
                for part in entry.target.split(|b| *b == b'/').rev() {
                    names.push_front(part.into());
                }
            } else if names.is_empty() {
                let size = entry.meta.size;
                let contents = dir.open(&name)?.map(|from| Contents { from, at: 0, size });
                return Ok(contents.map(|c| Box::new(c) as Opened));
            } else {
                return Ok(None);
            }
        }
        Ok(None)
    }

    fn path(&self, path: &str) -> PathBuf {
        as_path(path.as_bytes())
    }
}

/// Reads a blob, and compares its digest at the end.
struct Blob<H> {
    from: Opened,
    hash: Option<H>,
    expected: String,
}

impl<H: Digest> Read for Blob<H> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.from.read(buf)?;
        if let Some(hash) = &mut self.hash {
            hash.update(&buf[..n]);
        }
        if n == 0
            && !buf.is_empty()
            && let Some(hash) = self.hash.take()
        {
            let digest = hash.finalize();
            let hex = digest.iter().map(|b| format!("{b:02x}"));
            if hex.collect::<String>() != self.expected {
                return Err(invalid("its digest is another one: it is damaged"));
            }
        }
        Ok(n)
    }
}

#[derive(Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct Manifest {
    layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    platform: Option<Platform>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct Platform {
    architecture: String,
    os: String,
    #[serde(default)]
    variant: Option<String>,
}

/// An image of `docker save`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

impl Descriptor {
    fn annotation(&self, key: &str) -> Option<&str> {
        Some(self.annotations.as_ref()?.get(key)?)
    }

    fn is_index(&self) -> bool {
        self.media_type.contains(".image.index.") || self.media_type.contains(".manifest.list.")
    }

    /// Whether it is about another manifest: how that was built, say.
    fn is_about_another(&self) -> bool {
        let unknown = |p: &Platform| p.architecture == "unknown";
        self.annotation("vnd.docker.reference.type").is_some()
            || self.platform.as_ref().is_some_and(unknown)
    }

    /// Its platform as `docker` calls it.
    fn platform(&self) -> String {
        match &self.platform {
            Some(p) => {
                let variant = p.variant.iter().map(|v| format!("/{v}"));
                format!("{}/{}{}", p.os, p.architecture, variant.collect::<String>())
            }
            None => "no platform".into(),
        }
    }

    fn name(&self) -> String {
        let name = self.annotation("org.opencontainers.image.ref.name");
        name.unwrap_or(&self.digest).to_owned()
    }
}

/// This machine's platform.
fn here() -> String {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    format!("linux/{architecture}")
}

fn refused(path: PathBuf, why: String) -> MkfsError {
    MkfsError::source(path, "reading it", invalid(why))
}

/// A JSON file; `None` if it is not there.
fn json<T: DeserializeOwned>(
    files: &(impl Files + ?Sized),
    path: &str,
) -> Result<Option<T>, MkfsError> {
    let Some(from) = files.open(path)? else {
        return Ok(None);
    };
    parse(from, files.path(path)).map(Some)
}

fn parse<T: DeserializeOwned>(from: Opened, path: PathBuf) -> Result<T, MkfsError> {
    let mut text = Vec::new();
    let read = from.take(LARGEST + 1).read_to_end(&mut text);
    read.map_err(|e| MkfsError::source(path.clone(), "reading it", e))?;
    if text.len() as u64 > LARGEST {
        return Err(refused(path, "it is longer than 4 MiB".into()));
    }
    let parsed = serde_json::from_slice(&text);
    parsed.map_err(|e| {
        refused(
            path,
            format!("it is not the JSON that image-spec says: {e}"),
        )
    })
}

/// A blob by its digest.
fn blob(files: &(impl Files + ?Sized), digest: &str) -> Result<(Opened, PathBuf), MkfsError> {
    let hex = |text: &str, len| {
        text.len() == len && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    };
    let known = digest
        .split_once(':')
        .filter(|(algorithm, text)| match *algorithm {
            "sha256" => hex(text, 64),
            "sha512" => hex(text, 128),
            _ => false,
        });
    let Some((algorithm, expected)) = known else {
        let why = format!("the digest {digest:?} is not one of SHA-256 or SHA-512");
        return Err(refused(files.path("index.json"), why));
    };
    let path = format!("blobs/{algorithm}/{expected}");
    let shown = files.path(&path);
    let Some(from) = files.open(&path)? else {
        let why = "a part of the image is missing: copy the whole image";
        return Err(MkfsError::unfit(shown, why));
    };
    let expected = expected.to_owned();
    let verified: Opened = match algorithm {
        "sha256" => Box::new(Blob {
            from,
            hash: Some(Sha256::new()),
            expected,
        }),
        _ => Box::new(Blob {
            from,
            hash: Some(Sha512::new()),
            expected,
        }),
    };
    Ok((verified, shown))
}

/// The layers of the image that an OCI layout has, the lowest first; `None` if the files are none.
///
/// # Errors
/// [`MkfsError::Source`] and [`MkfsError::Unfit`], which name the file.
pub fn layout(files: &(impl Files + ?Sized)) -> Result<Option<Vec<Archive>>, MkfsError> {
    if files.open("oci-layout")?.is_none() {
        return Ok(None);
    }
    let index = json::<Index>(files, "index.json")?;
    index.map(|index| of_layout(files, index)).transpose()
}

/// The layers of the image that an archive holds, the lowest first; `None` if it holds none.
///
/// # Errors
/// As [`layout`].
pub fn layers(archive: &Root) -> Result<Option<Vec<Archive>>, MkfsError> {
    if let Some(layers) = layout(archive)? {
        return Ok(Some(layers));
    }
    // A file of this name may be anything.
    match json::<Vec<Saved>>(archive, "manifest.json") {
        Ok(Some(saved)) => of_saved(archive, saved).map(Some),
        _ => Ok(None),
    }
}

fn of_layout(files: &(impl Files + ?Sized), index: Index) -> Result<Vec<Archive>, MkfsError> {
    let shown = || files.path("index.json");
    let mut seen = BTreeSet::new();
    let mut images = Vec::new();
    let mut todo = VecDeque::from(index.manifests);
    while let Some(descriptor) = todo.pop_front() {
        if descriptor.is_about_another() || !seen.insert(descriptor.digest.clone()) {
            continue;
        }
        if !descriptor.is_index() {
            images.push(descriptor);
            continue;
        }
        if seen.len() > MOST_INDEXES {
            return Err(refused(shown(), "it leads to too many indexes".into()));
        }
        let (from, path) = blob(files, &descriptor.digest)?;
        todo.extend(parse::<Index>(from, path)?.manifests);
    }
    let all: Vec<String> = images.iter().map(Descriptor::platform).collect();
    if images.len() > 1 {
        images.retain(|image| match &image.platform {
            Some(p) => format!("{}/{}", p.os, p.architecture) == here(),
            None => true,
        });
    }
    let [image] = &images[..] else {
        let why = match images.len() {
            0 if all.is_empty() => "it has no image".into(),
            0 => format!(
                "it has images for {}, and none for {}",
                all.join(", "),
                here()
            ),
            _ => {
                let names: Vec<String> = images.iter().map(Descriptor::name).collect();
                let names = names.join(", ");
                format!(
                    "it has several images: {names}; copy one of them (skopeo copy oci:DIR:NAME oci:ONE)"
                )
            }
        };
        return Err(refused(shown(), why));
    };
    let (from, path) = blob(files, &image.digest)?;
    let manifest: Manifest = parse(from, path.clone())?;
    let layer = |d: &Descriptor| {
        let is_tree = d.media_type.contains(".tar") && !d.media_type.contains("encrypted");
        if !is_tree {
            let why = format!("a layer of the type {:?} is no tar archive", d.media_type);
            return Err(refused(path.clone(), why));
        }
        let (from, name) = blob(files, &d.digest)?;
        Ok(Archive { name, from })
    };
    manifest.layers.iter().map(layer).collect()
}

fn of_saved(files: &Root, saved: Vec<Saved>) -> Result<Vec<Archive>, MkfsError> {
    let [image] = &saved[..] else {
        let names = saved.iter().map(|s| match s.repo_tags.as_deref() {
            Some([name, ..]) => name.clone(),
            _ => "one without a name".into(),
        });
        let names = names.collect::<Vec<_>>().join(", ");
        let why = format!("it has not one image but these: {names}; save one of them");
        return Err(refused(files.path("manifest.json"), why));
    };
    let layer = |path: &String| {
        let shown = files.path(path);
        let inside = path.split('/').all(|name| name != "..") && !path.starts_with('/');
        match files.open(path)?.filter(|_| inside) {
            Some(from) => Ok(Archive { name: shown, from }),
            None => Err(MkfsError::unfit(shown, "a layer of the image is missing")),
        }
    };
    image.layers.iter().map(layer).collect()
}
