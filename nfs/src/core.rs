//! Decides the next step of an NFS node for one export. Pure: takes observations and returns one step.
//!
//! The order of steps is what keeps data and clients safe:
//! - **Up:** attachment (and with it the lease), mount, publish, address. Clients come only when all of it is
//!   there.
//! - **Down:** address, publication, mount, attachment. A client that loses the address first sees a server
//!   that is silent, and waits. If it saw the export vanish, it would get an error.
//!
//! Two rules are never broken, and tests hold any sequence of events against them: nothing is mounted without
//! the lease, and the lease is not given back while the file system is mounted.

#[cfg(test)]
mod tests;

/// Role of this NFS node for an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Serve it.
    Here,
    /// Leave it to another NFS node.
    Elsewhere,
    /// Take it down for good, and forget it.
    Deleted,
}

/// The attachment of the volume, which is a block device of its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachmentSeen {
    /// There is none.
    None,
    /// It is this node's.
    Own {
        /// Its device is there.
        device: bool,
    },
    /// It is another node's.
    Other {
        /// That node is down.
        is_down: bool,
    },
}

/// The lease of the volume, as far as this node is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseSeen {
    /// This node has it, and it has not run out.
    Held,
    /// This node had it last, and it ran out without word of another holder: I/O waits.
    Expired,
    /// It is another's, or nobody's. I/O of what is still mounted fails.
    NotOwn,
}

/// The floating address of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressSeen {
    /// The export has none.
    Unwanted,
    /// It is not on this machine.
    Absent,
    /// It is.
    Present,
}

/// An export as this NFS node sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// The attachment of its volume.
    pub attachment: AttachmentSeen,
    /// The lease of its volume.
    pub lease: LeaseSeen,
    /// Whether it is mounted here.
    pub mounted: bool,
    /// Whether the NFS server has it.
    pub published: bool,
    /// Its address.
    pub address: AddressSeen,
}

/// What is to be done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Nothing: all is as it should be. An address is renewed.
    Rest,
    /// Nothing yet.
    Wait(Reason),
    /// Forget the attachment of a node that is down.
    ForgetDead,
    /// Make the volume a block device of this node; that takes the lease.
    Attach,
    /// Mount it.
    Mount,
    /// Have the NFS server export it.
    Publish,
    /// Take the address.
    SetAddress,
    /// Give the address up.
    DropAddress,
    /// Have the NFS server forget it, and what clients have open.
    Unpublish,
    /// Unmount it.
    Unmount {
        /// The lease is gone: what is not written by now cannot be. If it is busy, it is taken out of sight.
        fenced: bool,
    },
    /// End the attachment; that gives the lease back.
    Detach,
    /// Forget the export.
    ForgetExport,
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The NFS node that has the volume attached lets it go.
    OtherNode,
    /// The block device.
    Device,
    /// The lease.
    Lease,
}

impl Seen {
    /// Whether this node may have the volume mounted: it has the attachment, its device and a lease.
    fn may_mount(&self) -> bool {
        self.attachment == AttachmentSeen::Own { device: true } && self.lease == LeaseSeen::Held
    }

    /// Whether what is mounted here has to go: another may write the volume.
    fn is_fenced(&self) -> bool {
        !matches!(self.attachment, AttachmentSeen::Own { .. }) || self.lease == LeaseSeen::NotOwn
    }
}

/// The next step.
#[must_use]
pub fn next(wanted: Wanted, seen: &Seen) -> Step {
    let has_something = seen.mounted || seen.published || seen.address == AddressSeen::Present;
    if has_something && (wanted != Wanted::Here || seen.is_fenced()) {
        return take_down(seen);
    }
    match wanted {
        Wanted::Here => serve(seen),
        Wanted::Elsewhere => match seen.attachment {
            AttachmentSeen::Own { .. } => Step::Detach,
            AttachmentSeen::None | AttachmentSeen::Other { .. } => Step::Rest,
        },
        Wanted::Deleted => match seen.attachment {
            AttachmentSeen::Own { .. } => Step::Detach,
            AttachmentSeen::Other { is_down: true } => Step::ForgetDead,
            AttachmentSeen::Other { is_down: false } => Step::Wait(Reason::OtherNode),
            AttachmentSeen::None => Step::ForgetExport,
        },
    }
}

fn take_down(seen: &Seen) -> Step {
    if seen.address == AddressSeen::Present {
        return Step::DropAddress;
    }
    // While its lease has run out, an unmount would wait as all I/O does. The lease comes back, or is lost.
    if seen.lease == LeaseSeen::Expired && !seen.is_fenced() {
        return Step::Wait(Reason::Lease);
    }
    match seen.published {
        true => Step::Unpublish,
        false => Step::Unmount {
            fenced: seen.is_fenced(),
        },
    }
}

fn serve(seen: &Seen) -> Step {
    match seen.attachment {
        AttachmentSeen::None => return Step::Attach,
        AttachmentSeen::Other { is_down: true } => return Step::ForgetDead,
        AttachmentSeen::Other { is_down: false } => return Step::Wait(Reason::OtherNode),
        AttachmentSeen::Own { .. } => {}
    }
    if !seen.may_mount() {
        // Clients that keep the address would be served what the page cache has, and another may write.
        if seen.address == AddressSeen::Present && seen.lease != LeaseSeen::Held {
            return Step::DropAddress;
        }
        return Step::Wait(match seen.lease {
            LeaseSeen::Held => Reason::Device,
            LeaseSeen::Expired | LeaseSeen::NotOwn => Reason::Lease,
        });
    }
    if !seen.mounted {
        return Step::Mount;
    }
    if !seen.published {
        return Step::Publish;
    }
    match seen.address {
        AddressSeen::Absent => Step::SetAddress,
        AddressSeen::Unwanted | AddressSeen::Present => Step::Rest,
    }
}
