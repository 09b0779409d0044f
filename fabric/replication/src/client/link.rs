//! Links of the lists that lie in tables: an element names its neighbours by their places.

use fabric_types::ids::Version;

/// No element of a linked list.
pub(super) const NONE: u32 = u32::MAX;

/// A write's place in the list of a volume's [writes](super::writes::Writes).
#[derive(Debug, Clone, Copy)]
pub(super) struct Link {
    /// Drawn when it came: no older one is its own.
    pub(super) version: Version,
    pub(super) older: u32,
    pub(super) newer: u32,
}

impl Link {
    /// Link of an element that is in no list.
    pub(super) const NONE: Self = Self {
        version: Version(0),
        older: NONE,
        newer: NONE,
    };
}
