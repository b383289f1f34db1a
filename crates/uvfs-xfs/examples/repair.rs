//! Says what a repair of an image would change, or repairs it.
//! `cargo run -p uvfs-xfs --example repair -- IMAGE [write]`

use std::error::Error;
use std::io::Write;
use std::path::Path;

use uvfs_xfs::repair::RepairOptions;

/// Repairs `image` if `write` is set, and prints the changes; gives how many findings are left.
pub fn repair(image: &Path, write: bool, out: &mut dyn Write) -> Result<u64, Box<dyn Error>> {
    let outcome = uvfs_xfs::repair(image, &RepairOptions::default(), write)?;
    if let Some(why) = outcome.dirty_log {
        return Err(why.into());
    }
    for change in &outcome.changes {
        writeln!(out, "{change}")?;
    }
    Ok(outcome.left_count)
}

#[allow(dead_code, reason = "a test has this example as a module")]
fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let image = args.first().ok_or("usage: repair IMAGE [write]")?;
    let write = args.get(1).is_some_and(|word| word == "write");
    match repair(image.as_ref(), write, &mut std::io::stdout().lock())? {
        0 => Ok(()),
        left => Err(format!("{left} findings are left, nothing was written").into()),
    }
}
