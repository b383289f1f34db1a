//! What a source is changed by on its way into the file system: names left out, owners, labels.

use super::contexts::Contexts;
use super::glob::Patterns;
use super::{Meta, Root, SourceDir, SourceEntry, SourceReader};
use crate::bulk::attr::NewAttr;
use crate::format::*;
use crate::mkfs::MkfsError;
use crate::read::attr::ACL_NAMES;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

/// How a source is changed. Without any of these it is taken as it is.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    /// What one of these matches is left out, with all that is below.
    pub exclude: Patterns,
    /// If there are any: only what one of these matches is taken, with all that is below and the directories that lead
    /// there. What is excluded is left out in any case.
    pub include: Patterns,
    /// The owners.
    pub users: Owners,
    /// The groups.
    pub groups: Owners,
    /// Labels of SELinux.
    pub contexts: Option<Arc<Contexts>>,
}

/// Numbers of users or groups in the source, and those that they become.
#[derive(Debug, Clone, Default)]
pub struct Owners {
    /// The first range that has a number decides.
    pub ranges: Vec<IdRange>,
    /// Of files whose owner is in no range.
    pub others: Others,
}

/// Consecutive numbers.
#[derive(Debug, Clone, Copy)]
pub struct IdRange {
    /// The first one in the source.
    pub from: u32,
    /// What that becomes.
    pub to: u32,
    /// How many there are.
    pub count: u32,
}

/// What becomes of numbers in no range.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Others {
    /// They stay.
    #[default]
    Kept,
    /// All files get this owner. Those in access control lists stay.
    Set(u32),
    /// They are an error.
    Refused,
}

impl Owners {
    fn is_plain(&self) -> bool {
        self.ranges.is_empty() && self.others == Others::Kept
    }

    fn in_range(&self, id: u32) -> Option<u32> {
        self.ranges.iter().find_map(|r| {
            let nth = id.checked_sub(r.from).filter(|nth| *nth < r.count)?;
            // 2^32-1 stands for no owner.
            r.to.checked_add(nth).filter(|id| *id != u32::MAX)
        })
    }

    /// `None`: it has no place.
    fn of_file(&self, id: u32) -> Option<u32> {
        self.in_range(id).or(match self.others {
            Others::Kept => Some(id),
            Others::Set(id) => Some(id),
            Others::Refused => None,
        })
    }

    fn of_acl(&self, id: u32) -> Option<u32> {
        let kept = (self.others != Others::Refused).then_some(id);
        self.in_range(id).or(kept)
    }
}

impl Rules {
    /// The source as these rules change it.
    ///
    /// # Errors
    /// [`MkfsError`] of listing it, and of owners that have no place.
    pub fn apply(&self, root: Root) -> Result<Root, MkfsError> {
        let leaves_out = !self.exclude.is_empty() || !self.include.is_empty();
        let owners = !self.users.is_plain() || !self.groups.is_plain();
        if !leaves_out && !owners && self.contexts.is_none() {
            return Ok(root);
        }
        let Root {
            dir,
            mut meta,
            mut attrs,
        } = root;
        let nothing = self.exclude.matches(b".");
        let all = self.include.is_empty() || self.include.matches(b".");
        let leading = match all || nothing {
            true => HashSet::new(),
            false => self.leading(&dir)?,
        };
        self.change(&dir, b"", &mut meta, &mut attrs)?;
        let rules = Shared {
            rules: self.clone(),
            leading,
            nothing,
        };
        let dir = Arc::new(RulesDir {
            shared: Arc::new(rules),
            dir,
            path: b"."[..].into(),
            all,
        });
        Ok(Root { dir, meta, attrs })
    }

    /// The paths of the directories that lead to what is included.
    fn leading(&self, root: &Arc<dyn SourceDir>) -> Result<HashSet<Box<[u8]>>, MkfsError> {
        let mut found = HashSet::new();
        // Directories are opened when it is their turn: each takes a descriptor.
        let mut todo = vec![(root.clone(), Box::<[u8]>::default(), b"."[..].into())];
        while let Some((above, name, path)) = todo.pop() {
            let path: Box<[u8]> = path;
            let dir = match name.is_empty() {
                true => Some(above),
                false => above.enter(&name)?,
            };
            let Some(dir) = dir else { continue };
            let wanted = |name: &[u8]| !self.exclude.matches(&join(&path, name));
            for e in dir.list_wanted(&wanted)? {
                let below = join(&path, &e.name);
                if self.include.matches(&below) {
                    let mut at = &path[..];
                    while found.insert(at.into()) {
                        let Some(slash) = at.iter().rposition(|b| *b == b'/') else {
                            break;
                        };
                        at = &at[..slash];
                    }
                } else if e.meta.is_dir() {
                    todo.push((dir.clone(), e.name, below.into()));
                }
            }
        }
        Ok(found)
    }

    /// Gives an inode the owners and the label that it is to have.
    fn change(
        &self,
        dir: &Arc<dyn SourceDir>,
        path: &[u8],
        meta: &mut Meta,
        attrs: &mut Vec<NewAttr>,
    ) -> Result<(), MkfsError> {
        let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
        let unfit = |why| {
            let shown = dir.path(name);
            // The root of an archive has no name.
            let empty = shown.as_os_str().is_empty();
            MkfsError::unfit(if empty { "/".into() } else { shown }, why)
        };
        let why = "its owner or group is in none of the ranges that are mapped";
        meta.uid = self.users.of_file(meta.uid).ok_or_else(|| unfit(why))?;
        meta.gid = self.groups.of_file(meta.gid).ok_or_else(|| unfit(why))?;
        if !self.users.ranges.is_empty() || !self.groups.ranges.is_empty() {
            let lists = |a: &&mut NewAttr| {
                a.flags == ATTR_ROOT && ACL_NAMES.iter().any(|(stored, _)| *stored == &a.name[..])
            };
            let why = "its access control list has users or groups that are in none of the ranges";
            for a in attrs.iter_mut().filter(lists) {
                self.change_list(&mut a.value).ok_or_else(|| unfit(why))?;
            }
        }
        if let Some(contexts) = &self.contexts {
            let path = if path.is_empty() { b"/" } else { path };
            contexts.apply(path, meta.mode, attrs);
        }
        Ok(())
    }

    /// Changes the numbers in an access control list as XFS stores it.
    fn change_list(&self, list: &mut [u8]) -> Option<()> {
        /// The tags of entries that have a number.
        const USER: [u8; 4] = 2u32.to_be_bytes();
        const GROUP: [u8; 4] = 8u32.to_be_bytes();
        for entry in list.get_mut(4..)?.chunks_exact_mut(12) {
            let (tag, rest) = entry.split_at_mut(4);
            let owners = match *tag {
                [..] if tag == USER => &self.users,
                [..] if tag == GROUP => &self.groups,
                _ => continue,
            };
            let id = u32::from_be_bytes(rest[..4].try_into().ok()?);
            rest[..4].copy_from_slice(&owners.of_acl(id)?.to_be_bytes());
        }
        Some(())
    }
}

fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    [path, name].join(&b'/')
}

/// What all directories of a changed source share.
struct Shared {
    rules: Rules,
    leading: HashSet<Box<[u8]>>,
    /// The root itself is excluded.
    nothing: bool,
}

struct RulesDir {
    shared: Arc<Shared>,
    dir: Arc<dyn SourceDir>,
    /// From the root, which is `.`.
    path: Box<[u8]>,
    /// All that is below is included.
    all: bool,
}

impl SourceDir for RulesDir {
    fn list_wanted(&self, wanted: &dyn Fn(&[u8]) -> bool) -> Result<Vec<SourceEntry>, MkfsError> {
        let Shared {
            rules,
            leading,
            nothing,
        } = &*self.shared;
        let taken = |name: &[u8]| {
            let path = join(&self.path, name);
            !nothing
                && !rules.exclude.matches(&path)
                && (self.all || rules.include.matches(&path) || leading.contains(&path[..]))
                && wanted(name)
        };
        let mut entries = self.dir.list_wanted(&taken)?;
        for e in &mut entries {
            let path = join(&self.path, &e.name);
            rules.change(&self.dir, &path[1..], &mut e.meta, &mut e.attrs)?;
        }
        Ok(entries)
    }

    fn enter(self: Arc<Self>, name: &[u8]) -> Result<Option<Arc<dyn SourceDir>>, MkfsError> {
        let path = join(&self.path, name);
        let dir = self.dir.clone().enter(name)?;
        Ok(dir.map(|dir| {
            Arc::new(RulesDir {
                shared: self.shared.clone(),
                dir,
                all: self.all || self.shared.rules.include.matches(&path),
                path: path.into(),
            }) as Arc<dyn SourceDir>
        }))
    }

    fn open(&self, name: &[u8]) -> Result<Option<SourceReader>, MkfsError> {
        self.dir.open(name)
    }

    fn path(&self, name: &[u8]) -> PathBuf {
        self.dir.path(name)
    }
}
