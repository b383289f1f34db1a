//! An XFS reader and checker.
