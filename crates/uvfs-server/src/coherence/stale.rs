//! The items that a request makes stale in the kernel, which is told when the request ends.

use super::invalidator::Job;
use crate::fs::Unlinked;
use crate::lease::{Access, Link};
use std::sync::atomic::Ordering;

use super::access::{AccessSet, Part};
use super::kernel_cache::{Key, Version};
use super::{Coherence, Under};

/// Something to invalidate in the kernel, and what is noted of it then.
pub(super) struct Stale {
    job: Job,
    given: Option<(Key, Version)>,
}

impl Coherence {
    /// The kernel caches that must go before a client's change is answered, but for names. A failed
    /// change may have changed something all the same. `grown` is a node, and how long its file is now at least.
    pub(super) fn stale(
        &self,
        link: &Link,
        access: &AccessSet<'_>,
        under: &Under<'_>,
        grown: Option<(u64, u64)>,
    ) -> Vec<Stale> {
        let mut stale = Vec::new();
        for one in &under.entered {
            let node = one.what.node;
            // A holder may have given its lease back meanwhile, and the kernel may have looked before
            // the change.
            let own = one.own && self.writes(link, node);
            let grown = grown.filter(|grown| grown.0 == node);
            if one.what.access != Access::Change || own && grown.is_none() {
                continue;
            }
            self.epoch.fetch_add(u64::from(!own), Ordering::SeqCst);
            let Some(kernel) = self.kernel.get() else {
                continue;
            };
            if self.is_unknown_to_kernel(node) {
                continue;
            }
            if own {
                let length = grown.map_or(0, |grown| grown.1);
                if self.shard(node).table.grows(node, link.id, length) {
                    // The page there may be locked by a read that waits for this client's lease.
                    kernel.grown_later(node, length);
                }
                continue;
            }
            let (offset, len) = match one.what.part {
                Part::Links => {
                    stale.extend(self.stale_links(node));
                    continue;
                }
                Part::Attributes => (-1, 0),
                _ => access.range,
            };
            self.shard(node).drops(node, offset, len);
            stale.push(Stale {
                job: Job::Inode(node, offset, len),
                given: None,
            });
            stale.extend(grown.map(|(node, size)| Stale {
                job: Job::Grown(node, size),
                given: None,
            }));
        }
        stale
    }

    /// As [`Coherence::stale`], after a client has given a node a name, or taken one from it.
    pub(super) fn stale_links(&self, node: u64) -> Option<Stale> {
        let key = Key::attributes(node);
        let version = self.given().change(key)?;
        Some(Stale {
            job: Job::Inode(node, -1, 0),
            given: Some((key, version)),
        })
    }

    /// As [`Coherence::stale`], after a client has changed names.
    pub(super) fn stale_names(&self, access: &AccessSet<'_>, unlinked: Unlinked) -> Vec<Stale> {
        let mut stale = Vec::new();
        let Some(kernel) = self.kernel.get() else {
            return stale;
        };
        let given = self.given();
        // The file that lost a name lost its last one.
        let mut gone =
            (unlinked.node.map(|node| node.0)).filter(|&node| !self.is_unknown_to_kernel(node));
        for &(parent, name) in access.names.iter().rev() {
            let key = Key::attributes(parent);
            if let Some(version) = given.change(key) {
                // The pages of a directory are its listing. The kernel lists anew when the directory's time
                // has changed, but that may be no finer than the clock's ticks.
                stale.push(Stale {
                    job: Job::Inode(parent, 0, 0),
                    given: Some((key, version)),
                });
                // A part of the old listing may still be under way to the kernel.
                kernel.tell_again(parent);
            }
            let gone = gone.take();
            stale.extend(gone.and_then(|node| self.stale_links(node)));
            let key = Key::name(parent, name.to_bytes());
            if let Some(version) = given.change(key) {
                stale.push(Stale {
                    job: Job::Entry(parent, name.to_owned()),
                    given: Some((key, version)),
                });
            } else if let Some(node) = gone
                && unlinked.last
            {
                // It may still be there, to be looked up when it is used; and with it the file.
                kernel.hint(parent, node, name.to_owned());
            }
        }
        stale
    }

    /// Invalidates things in the kernel, and waits for that.
    pub(super) async fn tell(&self, stale: Vec<Stale>) {
        let Some(kernel) = self.kernel.get() else {
            debug_assert!(stale.is_empty(), "there is no kernel to tell");
            return;
        };
        for Stale { job, given } in stale {
            // Rare, and large enough to slow down those that have nothing to tell.
            Box::pin(kernel.run(job)).await;
            if let Some((key, version)) = given {
                self.given().dropped(key, version);
            }
        }
    }
}
