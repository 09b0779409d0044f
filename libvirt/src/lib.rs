//! libvirt's side of disks and filesystems: the XML of a domain, virsh, the hook that libvirt calls, and
//! what stands in the way of a guest.
//!
//! | module | what it does |
//! |---|---|
//! | [`xml`] | reads and writes XML |
//! | [`domain`] | what a domain's XML says, as far as disks and filesystems depend on it |
//! | [`disk`] | the `<disk>` element of an attachment |
//! | [`filesystem`] | the `<filesystem>` element of an attachment |
//! | [`virsh`] | calls virsh |
//! | [`check`] | what keeps a domain from a disk or filesystem, and the XML that helps |
//! | [`access`], [`apparmor`] | whether a domain's QEMU may connect to a socket |
//! | [`hook`] | libvirt's hook: its arguments, what a domain asks for, installation |
//! | [`claim`] | which domain uses which socket |
//!
//! **virsh, not the `virt` crate.** The crate links libvirt's client library, so whoever builds Penstock
//! would need its headers, and whoever runs it the library, even where no libvirt is.
//! virsh is on every machine
//! with libvirt. Its errors are what operators know and search for, and they can repeat each step by hand.
//!
//! **quick-xml**, because one crate both reads and writes, with namespaces (metadata has one) and with the
//! place of each element in the text: a disk goes back to virsh exactly as libvirt wrote it. It expands no
//! entities but the five of XML, and loads nothing.
//!
//! **Architecture Invariant:** this crate knows nothing of volumes' data, of meta or of the admin API.
//! The caller passes attachments in.

pub mod access;
pub mod apparmor;
pub mod check;
pub mod claim;
pub mod disk;
pub mod domain;
pub mod filesystem;
pub mod hook;
pub mod virsh;
pub mod xml;
