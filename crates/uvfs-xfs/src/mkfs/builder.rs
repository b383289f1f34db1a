//! The short way to make a file system.

use super::source::{Patterns, Rules};
use super::{Archive, From, Made, Margin, MkfsError, MkfsOptions, MkfsProgress, mkfs, mkfs_to};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Makes an XFS image: what goes in, then choices, then where to.
///
/// ```no_run
/// # fn main() -> Result<(), uvfs_xfs::mkfs::MkfsError> {
/// let made = uvfs_xfs::Builder::directory("rootfs")
///     .smallest(uvfs_xfs::mkfs::Margin::Percent(10))
///     .reproducible(Some(1_700_000_000))
///     .build("disk.img".as_ref())?;
/// # Ok(()) }
/// ```
pub struct Builder {
    options: MkfsOptions,
    from: From,
}

impl Builder {
    /// Of anything. [`From`] says what there is.
    pub fn new(from: From) -> Builder {
        Builder {
            options: MkfsOptions::default(),
            from,
        }
    }

    /// Without contents, of so many bytes.
    pub fn empty(bytes: u64) -> Builder {
        Builder::new(From::Nothing).size(bytes)
    }

    /// Of a directory, or of the image of layers whose OCI layout that is.
    pub fn directory(path: impl Into<PathBuf>) -> Builder {
        Builder::new(From::Directory(path.into()))
    }

    /// Of a tar archive, compressed or not, or of layers, the lowest first.
    pub fn archives(layers: Vec<Archive>) -> Builder {
        Builder::new(From::Archives(layers))
    }

    /// Of so many bytes.
    pub fn size(mut self, bytes: u64) -> Builder {
        self.options.size = Some(bytes);
        self
    }

    /// As small as the contents allow, with room to spare.
    pub fn smallest(mut self, margin: Margin) -> Builder {
        (self.options.smallest, self.options.margin) = (true, margin);
        self
    }

    /// The same bytes for the same contents. No time is later than this one, in seconds since 1970; `None`: the last
    /// change of contents.
    pub fn reproducible(mut self, epoch: Option<i64>) -> Builder {
        (self.options.reproducible, self.options.epoch) = (true, epoch);
        self
    }

    /// A label of at most 12 bytes.
    pub fn label(mut self, label: impl Into<Vec<u8>>) -> Builder {
        self.options.label = label.into();
        self
    }

    /// Without what these match.
    pub fn exclude(mut self, patterns: Patterns) -> Builder {
        self.options.rules.exclude = patterns;
        self
    }

    /// All other changes to the contents.
    pub fn rules(mut self, rules: Rules) -> Builder {
        self.options.rules = rules;
        self
    }

    /// Any other choice.
    pub fn with(mut self, change: impl FnOnce(&mut MkfsOptions)) -> Builder {
        change(&mut self.options);
        self
    }

    /// Makes it in a file or on a device. What is there is not overwritten unless [`MkfsOptions::force`] is set.
    ///
    /// # Errors
    /// [`MkfsError`].
    pub fn build(self, image: &Path) -> Result<Made, MkfsError> {
        mkfs(image, &self.options, self.from, &MkfsProgress::default())
    }

    /// Makes it, and writes it.
    ///
    /// # Errors
    /// [`MkfsError`].
    pub fn write_to(self, out: &mut dyn Write) -> Result<Made, MkfsError> {
        mkfs_to(out, &self.options, self.from, &MkfsProgress::default())
    }
}
