//! Makes an image of a directory: as small as that allows, the same bytes each time, all files root's.
//! `cargo run -p uvfs-xfs --example build -- DIRECTORY IMAGE`

use std::error::Error;
use std::path::Path;

use uvfs_xfs::Builder;
use uvfs_xfs::mkfs::source::{Others, Owners, Patterns, Rules};
use uvfs_xfs::mkfs::{Made, Margin};

/// Makes `image` of `directory`, without version control.
pub fn build(directory: &Path, image: &Path) -> Result<Made, Box<dyn Error>> {
    let root = Owners {
        others: Others::Set(0),
        ..Owners::default()
    };
    let rules = Rules {
        exclude: Patterns::new(&[".git"])?,
        users: root.clone(),
        groups: root,
        ..Rules::default()
    };
    let made = Builder::directory(directory)
        .rules(rules)
        .smallest(Margin::Percent(10))
        .reproducible(None)
        .label("built")
        .build(image)?;
    Ok(made)
}

#[allow(dead_code, reason = "a test has this example as a module")]
fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let [directory, image] = &args[..] else {
        return Err("usage: build DIRECTORY IMAGE".into());
    };
    let made = build(directory.as_ref(), image.as_ref())?;
    println!("{} inodes, {} bytes of contents", made.inodes, made.bytes);
    Ok(())
}
