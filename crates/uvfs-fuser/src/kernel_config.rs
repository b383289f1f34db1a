//! The settings that a file system and the kernel agree on when a mount begins.

use std::time::Duration;

use crate::{InitFlags, Version};

/// The largest write that can be asked for; the kernel sends at most 1 MiB.
const MAX_WRITE: u32 = 16 << 20;
/// The deepest stack of file systems that the kernel allows.
const MAX_STACK_DEPTH: u32 = 2;
/// The number of background requests that counts as the previous value until a file system sets one.
const BACKGROUND: u16 = 16;

/// The settings that a file system asks the kernel for in [`Filesystem::init`](crate::Filesystem::init).
#[derive(Debug)]
pub struct KernelConfig {
    offered: InitFlags,
    pub(crate) requested: InitFlags,
    pub(crate) max_readahead: u32,
    most_readahead: u32,
    pub(crate) max_background: Option<u16>,
    congestion_threshold: Option<u16>,
    pub(crate) max_write: u32,
    pub(crate) time_gran: Duration,
    pub(crate) max_stack_depth: u32,
    version: Version,
}

impl KernelConfig {
    pub(crate) fn new(offered: InitFlags, max_readahead: u32, version: Version) -> Self {
        let wanted =
            InitFlags::FUSE_ASYNC_READ | InitFlags::FUSE_BIG_WRITES | InitFlags::FUSE_MAX_PAGES;
        Self {
            offered,
            requested: wanted & offered,
            max_readahead,
            most_readahead: max_readahead,
            max_background: None,
            congestion_threshold: None,
            max_write: MAX_WRITE,
            time_gran: Duration::from_nanos(1),
            max_stack_depth: 0,
            version,
        }
    }

    /// How many file systems may be stacked below this one; at least 1 for backing files. Returns the
    /// previous value.
    ///
    /// # Errors
    /// The nearest value that can be.
    pub fn set_max_stack_depth(&mut self, value: u32) -> Result<u32, u32> {
        if value > MAX_STACK_DEPTH {
            return Err(MAX_STACK_DEPTH);
        }
        Ok(std::mem::replace(&mut self.max_stack_depth, value))
    }

    /// The smallest step of times: a second, or a power of ten of nanoseconds. Returns the previous value.
    ///
    /// # Errors
    /// The nearest value that can be.
    pub fn set_time_granularity(&mut self, value: Duration) -> Result<Duration, Duration> {
        let second = Duration::from_secs(1);
        if value > second {
            return Err(second);
        }
        let nanos = value.as_nanos().max(1) as u64;
        let nearest = Duration::from_nanos(10u64.pow(nanos.ilog10()));
        match nearest == value {
            true => Ok(std::mem::replace(&mut self.time_gran, value)),
            false => Err(nearest),
        }
    }

    /// The largest write in bytes. Returns the previous value.
    ///
    /// # Errors
    /// The nearest value that can be.
    pub fn set_max_write(&mut self, value: u32) -> Result<u32, u32> {
        match value {
            0 => Err(1),
            1..=MAX_WRITE => Ok(std::mem::replace(&mut self.max_write, value)),
            _ => Err(MAX_WRITE),
        }
    }

    /// The largest readahead in bytes. Returns the previous value.
    ///
    /// # Errors
    /// The nearest value that can be.
    pub fn set_max_readahead(&mut self, value: u32) -> Result<u32, u32> {
        match value {
            0 => Err(1),
            _ if value > self.most_readahead => Err(self.most_readahead),
            _ => Ok(std::mem::replace(&mut self.max_readahead, value)),
        }
    }

    /// The capabilities that the kernel offers.
    pub fn capabilities(&self) -> InitFlags {
        self.offered & !InitFlags::FUSE_INIT_EXT
    }

    /// The kernel's version of the protocol.
    pub fn kernel_abi(&self) -> Version {
        self.version
    }

    /// Asks for further capabilities.
    ///
    /// # Errors
    /// The capabilities that the kernel does not offer. Nothing is added then.
    pub fn add_capabilities(&mut self, capabilities_to_add: InitFlags) -> Result<(), InitFlags> {
        // Bits without a name are not among the missing ones then, as in fuser.
        if !self.offered.contains(capabilities_to_add) {
            return Err(capabilities_to_add & !self.offered);
        }
        self.requested |= capabilities_to_add;
        Ok(())
    }

    /// The most background requests that the kernel may have under way. Returns the previous value.
    ///
    /// # Errors
    /// The nearest value that can be.
    pub fn set_max_background(&mut self, value: u16) -> Result<u16, u16> {
        match value {
            0 => Err(1),
            _ => Ok(self.max_background.replace(value).unwrap_or(BACKGROUND)),
        }
    }

    /// The number of background requests from which on the kernel holds back readahead and writeback.
    /// Returns the previous value.
    ///
    /// # Errors
    /// The nearest value that can be.
    pub fn set_congestion_threshold(&mut self, value: u16) -> Result<u16, u16> {
        if value == 0 {
            return Err(1);
        }
        let last = self.congestion_below(self.max_background.unwrap_or(BACKGROUND));
        self.congestion_threshold = Some(value);
        Ok(last)
    }

    /// The threshold where `max` requests may be under way.
    pub(crate) fn congestion_below(&self, max: u16) -> u16 {
        match self.congestion_threshold {
            None => max - max.div_ceil(4),
            Some(value) => value.min(max),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> KernelConfig {
        let offered = InitFlags::FUSE_ASYNC_READ | InitFlags::FUSE_POSIX_ACL;
        KernelConfig::new(offered, 128 << 10, Version(7, 45))
    }

    /// A time granularity is rounded down to a power of ten, and answered as by fuser.
    #[test]
    fn times_step_by_powers_of_ten() {
        let mut config = config();
        let nanos = Duration::from_nanos;
        assert_eq!(config.set_time_granularity(nanos(0)), Err(nanos(1)));
        assert_eq!(config.set_time_granularity(nanos(150)), Err(nanos(100)));
        assert_eq!(config.set_time_granularity(nanos(100)), Ok(nanos(1)));
        let second = Duration::from_secs(1);
        assert_eq!(config.set_time_granularity(second), Ok(nanos(100)));
        assert_eq!(config.set_time_granularity(2 * second), Err(second));
    }

    /// A request for capabilities that the kernel lacks is refused, and the error lists those with a name.
    #[test]
    fn what_the_kernel_lacks_can_not_be_asked_for() {
        let mut config = config();
        let both = InitFlags::FUSE_POSIX_ACL | InitFlags::FUSE_PASSTHROUGH;
        let refused = config.add_capabilities(both);
        assert_eq!(refused, Err(InitFlags::FUSE_PASSTHROUGH));
        let unnamed = InitFlags::from_bits_retain(1 << 63);
        let refused = config.add_capabilities(unnamed);
        assert_eq!(refused, Err(InitFlags::empty()));
        assert_eq!(config.requested, InitFlags::FUSE_ASYNC_READ);
        assert_eq!(config.add_capabilities(InitFlags::FUSE_POSIX_ACL), Ok(()));
        assert!(config.requested.contains(InitFlags::FUSE_POSIX_ACL));
    }

    /// Sizes are bounded to what the kernel takes, and answered as by fuser.
    #[test]
    fn sizes_are_bounded_and_the_last_value_is_told() {
        let mut config = config();
        assert_eq!(config.set_max_readahead(1 << 20), Err(128 << 10));
        assert_eq!(config.set_max_readahead(4096), Ok(128 << 10));
        assert_eq!(config.set_max_write(0), Err(1));
        assert_eq!(config.set_max_write(u32::MAX), Err(16 << 20));
        assert_eq!(config.set_max_background(8), Ok(16));
        assert_eq!(config.set_congestion_threshold(100), Ok(6));
        assert_eq!(config.congestion_below(8), 8);
    }
}
