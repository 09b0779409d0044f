//! What a device tells by itself.

use rdma_sys::ibv_event_type as raw;

use super::address::{PortNumber, QpNumber};

/// An event of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A port works.
    PortActive(PortNumber),
    /// A port does not work: the link is down.
    PortDown(PortNumber),
    /// The addresses of a port have changed: entries of its table of GIDs, its LID, or its partition keys.
    AddressesChanged(PortNumber),
    /// Whoever manages the InfiniBand subnet wants something of a port; the kernel deals with it.
    Subnet(PortNumber),
    /// The device does not work any more.
    DeviceFatal,
    /// A queue pair is in error, for a reason that no completion tells.
    QueuePairFatal(QpNumber),
    /// A peer asked for what the queue pair refused; it is in error.
    QueuePairRefused(QpNumber),
    /// A message arrived before the queue pair was told that it is connected. No error.
    CommunicationEstablished(QpNumber),
    /// Something of a queue pair that needs nothing: its queue ran empty, it took another path, or it has its
    /// last receive.
    QueuePairNotice(QpNumber),
    /// A completion queue ran over, or is broken; with the token that it was made with. Its queue pairs are
    /// in error.
    CompletionQueueFatal(u64),
    /// Something of an object that we do not make, or that this version does not know.
    Other(u32),
}

/// Of what an event speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Subject {
    QueuePair,
    CompletionQueue,
    Port,
    Device,
    Other,
}

/// Which member of the event's union is valid.
pub(super) fn subject(code: u32) -> Subject {
    const QP: &[raw] = &[
        raw::IBV_EVENT_QP_FATAL,
        raw::IBV_EVENT_QP_REQ_ERR,
        raw::IBV_EVENT_QP_ACCESS_ERR,
        raw::IBV_EVENT_COMM_EST,
        raw::IBV_EVENT_SQ_DRAINED,
        raw::IBV_EVENT_PATH_MIG,
        raw::IBV_EVENT_PATH_MIG_ERR,
        raw::IBV_EVENT_QP_LAST_WQE_REACHED,
    ];
    const PORT: &[raw] = &[
        raw::IBV_EVENT_PORT_ACTIVE,
        raw::IBV_EVENT_PORT_ERR,
        raw::IBV_EVENT_LID_CHANGE,
        raw::IBV_EVENT_PKEY_CHANGE,
        raw::IBV_EVENT_GID_CHANGE,
        raw::IBV_EVENT_SM_CHANGE,
        raw::IBV_EVENT_CLIENT_REREGISTER,
    ];
    let is = |known: &raw| *known as u32 == code;
    if QP.iter().any(is) {
        Subject::QueuePair
    } else if PORT.iter().any(is) {
        Subject::Port
    } else if is(&raw::IBV_EVENT_CQ_ERR) {
        Subject::CompletionQueue
    } else if is(&raw::IBV_EVENT_DEVICE_FATAL) {
        Subject::Device
    } else {
        Subject::Other
    }
}

/// An event of a queue pair.
pub(super) fn of_queue_pair(code: u32, number: QpNumber) -> Event {
    let is = |known: raw| known as u32 == code;
    if is(raw::IBV_EVENT_QP_REQ_ERR) || is(raw::IBV_EVENT_QP_ACCESS_ERR) {
        Event::QueuePairRefused(number)
    } else if is(raw::IBV_EVENT_QP_FATAL) || is(raw::IBV_EVENT_PATH_MIG_ERR) {
        Event::QueuePairFatal(number)
    } else if is(raw::IBV_EVENT_COMM_EST) {
        Event::CommunicationEstablished(number)
    } else {
        Event::QueuePairNotice(number)
    }
}

/// An event of a port.
pub(super) fn of_port(code: u32, port: PortNumber) -> Event {
    let is = |known: raw| known as u32 == code;
    if is(raw::IBV_EVENT_PORT_ACTIVE) {
        Event::PortActive(port)
    } else if is(raw::IBV_EVENT_PORT_ERR) {
        Event::PortDown(port)
    } else if is(raw::IBV_EVENT_SM_CHANGE) || is(raw::IBV_EVENT_CLIENT_REREGISTER) {
        Event::Subnet(port)
    } else {
        Event::AddressesChanged(port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_has_no_subject() {
        assert_eq!(subject(raw::IBV_EVENT_SRQ_ERR as u32), Subject::Other);
        assert_eq!(subject(4711), Subject::Other);
        assert_eq!(
            subject(raw::IBV_EVENT_CQ_ERR as u32),
            Subject::CompletionQueue
        );
        assert_eq!(subject(raw::IBV_EVENT_DEVICE_FATAL as u32), Subject::Device);
    }

    #[test]
    fn events_of_ports_and_queue_pairs_are_sorted() {
        let port = PortNumber(1);
        let down = raw::IBV_EVENT_PORT_ERR as u32;
        assert_eq!(subject(down), Subject::Port);
        assert_eq!(of_port(down, port), Event::PortDown(port));
        assert_eq!(
            of_port(raw::IBV_EVENT_GID_CHANGE as u32, port),
            Event::AddressesChanged(port)
        );
        let (fatal, number) = (raw::IBV_EVENT_QP_FATAL as u32, QpNumber(17));
        assert_eq!(subject(fatal), Subject::QueuePair);
        assert_eq!(of_queue_pair(fatal, number), Event::QueuePairFatal(number));
    }
}
