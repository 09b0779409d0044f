//! What the library refuses: which operation on which object, errno, and a hint where one is known.

use std::io;

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Listing the devices.
    ListDevices,
    /// Opening a device.
    Open,
    /// Asking for a device's limits.
    QueryDevice,
    /// Asking for a port's state.
    QueryPort,
    /// Asking for an entry of a port's table of GIDs.
    QueryGid,
    /// Taking an event of a device.
    TakeEvent,
    /// Making a protection domain.
    MakeProtectionDomain,
    /// Registering memory.
    Register,
    /// Making a memory window.
    MakeWindow,
    /// Making a completion channel.
    MakeChannel,
    /// Taking an event of a completion channel.
    TakeCompletionEvent,
    /// Making a completion queue.
    MakeCompletionQueue,
    /// Asking a completion queue for an event.
    Arm,
    /// Polling a completion queue.
    Poll,
    /// Making a queue pair.
    MakeQueuePair,
    /// Changing the state of a queue pair.
    Modify,
    /// Asking for the state of a queue pair.
    QueryQueuePair,
    /// Posting work requests.
    PostSend,
    /// Posting receives.
    PostReceive,
}

impl Operation {
    fn text(self) -> &'static str {
        match self {
            Self::ListDevices => "list",
            Self::Open => "open",
            Self::QueryDevice => "query the limits of",
            Self::QueryPort => "query a port of",
            Self::QueryGid => "query a GID of",
            Self::TakeEvent => "take an event of",
            Self::MakeProtectionDomain => "make a protection domain on",
            Self::Register => "register memory on",
            Self::MakeWindow => "make a memory window on",
            Self::MakeChannel => "make a completion channel on",
            Self::TakeCompletionEvent => "take a completion event of",
            Self::MakeCompletionQueue => "create a completion queue on",
            Self::Arm => "arm a completion queue of",
            Self::Poll => "poll a completion queue of",
            Self::MakeQueuePair => "create a queue pair on",
            Self::Modify => "change the state of a queue pair of",
            Self::QueryQueuePair => "query a queue pair of",
            Self::PostSend => "post work requests on",
            Self::PostReceive => "post receives on",
        }
    }

    fn hint(self, errno: i32) -> &'static str {
        match (self, errno) {
            (Self::Register, libc::ENOMEM) => {
                ": memory must be there, and is pinned, which counts against RLIMIT_MEMLOCK; raise it with \
                 LimitMEMLOCK=infinity in the \
                 service's unit, or `ulimit -l unlimited`"
            }
            (Self::Open, libc::EACCES | libc::EPERM) => {
                ": the daemon must be allowed to open /dev/infiniband/uverbs*"
            }
            (Self::Open, libc::ENOENT) => {
                ": /dev/infiniband has no such device; is ib_uverbs loaded?"
            }
            (Self::PostSend | Self::PostReceive, libc::ENOMEM) => ": the queue is full",
            (Self::MakeWindow, libc::EOPNOTSUPP) => ": the device has no memory windows of type 2",
            _ => "",
        }
    }
}

/// An operation failed.
#[derive(Debug, thiserror::Error)]
#[error("{} {object}: {source}{}", operation.text(), self.hint())]
pub struct VerbsError {
    /// What was asked for.
    pub operation: Operation,
    /// Of what: a device's name.
    pub object: Box<str>,
    /// The errno.
    pub source: io::Error,
}

impl VerbsError {
    /// With what the library left in errno.
    pub(super) fn last(operation: Operation, object: &str) -> Self {
        Self::from_io(operation, object, io::Error::last_os_error())
    }

    /// With an errno that the library returned, by either sign.
    pub(super) fn returned(operation: Operation, object: &str, code: i32) -> Self {
        Self::from_io(operation, object, io_error(code))
    }

    pub(super) fn from_io(operation: Operation, object: &str, source: io::Error) -> Self {
        Self {
            operation,
            object: object.into(),
            source,
        }
    }

    /// The errno, if the system gave one.
    pub fn errno(&self) -> Option<i32> {
        self.source.raw_os_error()
    }

    fn hint(&self) -> &'static str {
        self.errno().map_or("", |errno| self.operation.hint(errno))
    }
}

fn io_error(code: i32) -> io::Error {
    if code == -1 {
        io::Error::last_os_error()
    } else {
        io::Error::from_raw_os_error(code.saturating_abs())
    }
}

/// Logs what could not be destroyed: it stays until the process ends, and with it whatever it was made of.
pub(super) fn log_destroyed(object: &'static str, device: &str, code: i32) {
    if code != 0 {
        let error = io_error(code);
        tracing::error!(object, device, %error, "an RDMA object cannot be destroyed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_operation_object_and_errno() {
        let error = VerbsError::returned(Operation::MakeQueuePair, "mlx5_0", libc::EINVAL);
        assert_eq!(
            error.to_string(),
            "create a queue pair on mlx5_0: Invalid argument (os error 22)"
        );
        assert_eq!(error.errno(), Some(libc::EINVAL));
        let negative = VerbsError::returned(Operation::Arm, "mlx5_0", -libc::ENODEV);
        assert_eq!(negative.errno(), Some(libc::ENODEV));
    }

    #[test]
    fn pinning_failure_names_the_limit_and_how_to_raise_it() {
        let text = VerbsError::returned(Operation::Register, "mlx5_0", libc::ENOMEM).to_string();
        assert!(text.contains("RLIMIT_MEMLOCK"), "{text}");
        assert!(text.contains("LimitMEMLOCK=infinity"), "{text}");
        let other = VerbsError::returned(Operation::Register, "mlx5_0", libc::EFAULT).to_string();
        assert!(!other.contains("MEMLOCK"), "{other}");
    }
}
