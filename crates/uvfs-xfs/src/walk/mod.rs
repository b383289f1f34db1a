//! Walks of structures, one for each: trees of groups and of forks, directories, and attributes. A walk gives each item
//! or what is wrong with it. The reader stops at the first fault, the check reports it, and the repair keeps the sound
//! items.

pub(crate) mod attr;
pub(crate) mod btree;
pub(crate) mod dir;
