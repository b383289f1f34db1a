//! Lists all files of an image for an investigation, one a line, as the body file of The Sleuth Kit has them: inode, mode,
//! owner, group, size and the four times. A dirty log is replayed in memory; nothing is written.
//! `cargo run -p uvfs-xfs --example list -- IMAGE`

use std::error::Error;
use std::io::Write;
use std::path::Path;

use uvfs_xfs::tools::{escape, mode_string, walk};
use uvfs_xfs::{Image, ImageOptions};

/// Lists `image`; gives how often something could not be read.
pub fn list(image: &Path, out: &mut dyn Write) -> Result<u64, Box<dyn Error>> {
    let image = Image::open(image, &ImageOptions::default())?;
    for warning in image.volume().warnings() {
        writeln!(out, "# {warning}")?;
    }
    let mut visit = |path: &[u8], i: &uvfs_xfs::Inode| {
        let birth = i.crtime.map_or(0, |t| t.sec);
        let line = writeln!(
            out,
            "0|{}|{}|{}|{}|{}|{}|{}|{}|{}|{birth}",
            escape(path),
            i.ino,
            mode_string(i.mode),
            i.uid,
            i.gid,
            i.size,
            i.atime.sec,
            i.mtime.sec,
            i.ctime.sec,
        );
        line.map_err(|source| uvfs_xfs::Error::Output {
            what: "writing the list".into(),
            source,
        })
    };
    let mut report = |path: &Path, error: &uvfs_xfs::Error| {
        eprintln!("{}: {error}", path.display());
    };
    Ok(walk(image.volume(), b"/", true, &mut visit, &mut report)?)
}

#[allow(dead_code, reason = "a test has this example as a module")]
fn main() -> Result<(), Box<dyn Error>> {
    let image = std::env::args_os().nth(1).ok_or("usage: list IMAGE")?;
    let errors = list(image.as_ref(), &mut std::io::stdout().lock())?;
    match errors {
        0 => Ok(()),
        errors => Err(format!("{errors} files could not be read").into()),
    }
}
