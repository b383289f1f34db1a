//! Checks an image and prints what is wrong with it.
//! `cargo run -p uvfs-xfs --example check -- IMAGE`

use std::error::Error;
use std::io::Write;
use std::path::Path;

use uvfs_xfs::check::CheckOptions;

/// Prints the findings of a check of `image`; gives how many there are.
pub fn check(image: &Path, out: &mut dyn Write) -> Result<u64, Box<dyn Error>> {
    let options = CheckOptions {
        // A bound: the check then goes through the image several times if it has to.
        memory: Some(256 << 20),
        ..CheckOptions::default()
    };
    let outcome = uvfs_xfs::check(image, &options)?;
    for finding in &outcome.findings {
        // The name of a kind of defect stays the same, the text is for people.
        writeln!(out, "{}: {finding}", finding.problem.name())?;
    }
    Ok(outcome.count)
}

#[allow(dead_code, reason = "a test has this example as a module")]
fn main() -> Result<(), Box<dyn Error>> {
    let image = std::env::args_os().nth(1).ok_or("usage: check IMAGE")?;
    match check(image.as_ref(), &mut std::io::stdout().lock())? {
        0 => Ok(()),
        count => Err(format!("{count} findings").into()),
    }
}
