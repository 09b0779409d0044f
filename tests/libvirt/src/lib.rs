//! The rig for libvirt: a host with libvirt and Penstock, in namespaces of its own, so that nothing of the
//! machine's libvirt is touched; and guests of its domains.

pub mod document;
pub mod guest;
pub mod host;

pub use guest::Guest;
pub use host::{DomainXml, Host, Release};
