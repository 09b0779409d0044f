//! How work requests end.

use std::fmt;

use rdma_sys::{ibv_wc_opcode, ibv_wc_status};

macro_rules! statuses {
    ($($variant:ident = $name:ident, $text:literal;)*) => {
        /// How a work request ended. The names in the specification are [`Status::name`]s.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Status {
            $(#[doc = $text] $variant,)*
            /// A status that this version does not know.
            Other(u32),
        }

        impl Status {
            #[cfg(test)]
            const ALL: &[Self] = &[$(Self::$variant),*];

            /// From the number that the library gives.
            pub fn from_code(code: u32) -> Self {
                match code {
                    $(ibv_wc_status::$name => Self::$variant,)*
                    other => Self::Other(other),
                }
            }

            /// The number that the library gives.
            pub fn code(self) -> u32 {
                match self {
                    $(Self::$variant => ibv_wc_status::$name,)*
                    Self::Other(code) => code,
                }
            }

            /// The name in the header of the library.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => stringify!($name),)*
                    Self::Other(_) => "IBV_WC_?",
                }
            }

            /// What it means.
            pub fn text(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                    Self::Other(_) => "a status that is not known",
                }
            }
        }
    };
}

statuses! {
    Success = IBV_WC_SUCCESS, "done";
    LocalLength = IBV_WC_LOC_LEN_ERR, "longer than the receive posted for it, or than a message may be";
    LocalQueuePair = IBV_WC_LOC_QP_OP_ERR, "the queue pair cannot do it";
    LocalEeContext = IBV_WC_LOC_EEC_OP_ERR, "the end-to-end context cannot do it";
    LocalProtection = IBV_WC_LOC_PROT_ERR, "a segment is not within a region that allows it";
    Flushed = IBV_WC_WR_FLUSH_ERR, "the queue pair was in error before it was done";
    WindowBind = IBV_WC_MW_BIND_ERR, "the window cannot be bound so";
    BadResponse = IBV_WC_BAD_RESP_ERR, "the peer answered with what is no answer to it";
    LocalAccess = IBV_WC_LOC_ACCESS_ERR, "a peer's write did not fit its protection";
    RemoteInvalid = IBV_WC_REM_INV_REQ_ERR, "the peer takes no such request";
    RemoteAccess = IBV_WC_REM_ACCESS_ERR, "the peer's memory is not open to it";
    RemoteOperation = IBV_WC_REM_OP_ERR, "the peer failed to do it";
    RetryExceeded = IBV_WC_RETRY_EXC_ERR, "the peer does not acknowledge";
    ReceiverNotReady = IBV_WC_RNR_RETRY_EXC_ERR, "the peer has posted no receive for it";
    LocalRddViolation = IBV_WC_LOC_RDD_VIOL_ERR, "the reliable datagram domains differ";
    RemoteInvalidReadRequest = IBV_WC_REM_INV_RD_REQ_ERR, "the peer takes no such read of a datagram";
    RemoteAborted = IBV_WC_REM_ABORT_ERR, "the peer gave it up";
    InvalidEeContext = IBV_WC_INV_EECN_ERR, "no such end-to-end context";
    InvalidEeContextState = IBV_WC_INV_EEC_STATE_ERR, "the end-to-end context is not in a state for it";
    Fatal = IBV_WC_FATAL_ERR, "the device has failed";
    ResponseTimeout = IBV_WC_RESP_TIMEOUT_ERR, "no answer in time";
    General = IBV_WC_GENERAL_ERR, "the device does not say";
    TagMatching = IBV_WC_TM_ERR, "tag matching failed";
    TagMatchingRendezvous = IBV_WC_TM_RNDV_INCOMPLETE, "the software must finish the rendezvous";
}

impl fmt::Display for Status {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other(code) => write!(formatter, "{} ({code})", self.text()),
            known => write!(formatter, "{} ({})", known.text(), known.name()),
        }
    }
}

/// What a work request was that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Done {
    /// A message was sent.
    Send,
    /// The peer's memory was written.
    Write,
    /// The peer's memory was read.
    Read,
    /// A window was bound.
    BindWindow,
    /// A key was invalidated.
    LocalInvalidate,
    /// A message arrived.
    Receive,
    /// The peer wrote into our memory, with immediate data.
    ReceiveWrite,
    /// Something that is not asked for here.
    Other(u32),
}

impl Done {
    /// From the number that the library gives.
    pub fn from_code(code: u32) -> Self {
        match code {
            ibv_wc_opcode::IBV_WC_SEND => Self::Send,
            ibv_wc_opcode::IBV_WC_RDMA_WRITE => Self::Write,
            ibv_wc_opcode::IBV_WC_RDMA_READ => Self::Read,
            ibv_wc_opcode::IBV_WC_BIND_MW => Self::BindWindow,
            ibv_wc_opcode::IBV_WC_LOCAL_INV => Self::LocalInvalidate,
            ibv_wc_opcode::IBV_WC_RECV => Self::Receive,
            ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM => Self::ReceiveWrite,
            other => Self::Other(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_keeps_its_code() {
        for (index, status) in Status::ALL.iter().enumerate() {
            assert_eq!(status.code(), index as u32, "{status:?}");
            assert_eq!(Status::from_code(index as u32), *status);
        }
        let unknown = Status::from_code(1000);
        assert_eq!((unknown, unknown.code()), (Status::Other(1000), 1000));
    }

    #[test]
    fn statuses_are_shown_by_meaning_and_name() {
        assert_eq!(
            Status::ReceiverNotReady.to_string(),
            "the peer has posted no receive for it (IBV_WC_RNR_RETRY_EXC_ERR)"
        );
        assert_eq!(
            Status::Other(77).to_string(),
            "a status that is not known (77)"
        );
    }

    #[test]
    fn receives_are_told_from_what_was_sent() {
        assert_eq!(Done::from_code(128), Done::Receive);
        assert_eq!(Done::from_code(0), Done::Send);
        assert_eq!(Done::from_code(99), Done::Other(99));
    }
}
