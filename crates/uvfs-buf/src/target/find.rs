//! Finds a buffer, or reads and verifies it.

use crate::buffer::Buffer;
use crate::index::{Key, key};
use crate::inner::Phase;
use crate::shared::{Shared, count};
use crate::{BufError, Extent, Verifier};
use std::sync::{Arc, PoisonError};

use super::{Found, MAX_REFERENCES, Plug};
use uvfs_sys::lock;

impl Shared {
    pub(super) fn find(self: &Arc<Self>, extents: &[Extent], key: Key) -> Option<Buffer> {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let group = lock(index.group(key.0));
        group
            .get(&key)
            .map(|inner| Buffer::hold(inner, self))
            .filter(|found| found.extents() == extents)
    }

    pub(super) fn find_or_claim(
        self: &Arc<Self>,
        extents: &[Extent],
        verifier: &'static dyn Verifier,
        cached: bool,
        plug: Option<&mut Plug>,
    ) -> Result<Found, BufError> {
        let len = self.validate(extents)?;
        let daddr = extents[0].daddr;
        let references = verifier.references().min(MAX_REFERENCES);
        if cached {
            if let Some(buffer) = self.find(extents, (daddr, len)) {
                buffer.inner.refs.used(references);
                count(&self.counters.hits, 1);
                return Ok(Found::Cached(buffer));
            }
            count(&self.counters.misses, 1);
        } else {
            count(&self.counters.uncached, 1);
        }
        let block = self.alloc(daddr, len, plug)?;
        let inner = self.make(extents);
        inner.refs.used(references);
        let buffer = Buffer {
            inner,
            shared: self.clone(),
        };
        if !cached {
            return Ok(Found::Claimed(buffer, block));
        }
        let inner = &buffer.inner;
        {
            let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
            let mut group = lock(index.group(daddr));
            if let Some(other) = group.get(&key(inner)) {
                if other.extents[..] == *extents {
                    // Another thread was faster.
                    let other = Buffer::hold(other, self);
                    drop(group);
                    return Ok(Found::Cached(other));
                }
                // Same first address and length, but elsewhere after that: the metadata
                // contradict themselves. Each reader gets what it asked for; the first stays.
                return Ok(Found::Claimed(buffer, block));
            }
            group.insert(key(inner), inner.clone());
        }
        let mut lru = lock(&self.lru);
        *lock(&inner.lru) = Some(lru.push(inner.clone()));
        drop(lru);
        Ok(Found::Claimed(buffer, block))
    }

    /// Finds a buffer, or begins to read it.
    pub(super) fn begin(
        self: &Arc<Self>,
        extents: &[Extent],
        verifier: &'static dyn Verifier,
        cached: bool,
        plug: &mut Plug,
    ) -> Result<Buffer, BufError> {
        match self.find_or_claim(extents, verifier, cached, Some(plug))? {
            Found::Claimed(buffer, block) => {
                count(&self.counters.reads, 1);
                plug.ios.push(self.read_io(&buffer.inner, block));
                Ok(buffer)
            }
            Found::Cached(buffer) => Ok(buffer),
        }
    }

    /// Waits for a buffer that [`Shared::begin`] found, and has it verified.
    pub(super) fn finish(
        &self,
        buffer: Buffer,
        verifier: &'static dyn Verifier,
    ) -> Result<Buffer, BufError> {
        let inner = &buffer.inner;
        self.wait_until(|| inner.phase() != Phase::Reading);
        if let Phase::Failed(errno) = inner.phase() {
            return Err(inner.error("reading", errno));
        }
        self.verify(&buffer, verifier)?;
        Ok(buffer)
    }

    fn verify(&self, buffer: &Buffer, verifier: &'static dyn Verifier) -> Result<(), BufError> {
        let inner = &buffer.inner;
        let known = {
            let state = inner.state();
            match &state.verified {
                Some((name, outcome)) if *name == verifier.name() => Some(outcome.clone()),
                // Changed content is sealed and judged when it is written.
                _ if state.dirty && state.verifier.is_some_and(|v| v.name() == verifier.name()) => {
                    Some(Ok(()))
                }
                _ => None,
            }
        };
        let outcome = match known {
            Some(outcome) => outcome,
            None => {
                let content = buffer.read();
                let outcome = verifier.verify(inner.daddr(), &content);
                let mut state = inner.state();
                state.verified = Some((verifier.name(), outcome.clone()));
                state.verifier = Some(verifier);
                if outcome.is_err() {
                    count(&self.counters.verify_errors, 1);
                }
                outcome
            }
        };
        outcome.map_err(|what| BufError::Verify {
            daddr: inner.daddr(),
            verifier: verifier.name(),
            what,
        })
    }
}
