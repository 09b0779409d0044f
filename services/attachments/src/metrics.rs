//! Figures of attachments.

use api::metrics::{Family, Page, families};
use api::types::{Attachment, AttachmentState, AttachmentStats};
use service::metrics::put_latency;

/// A value of an attachment.
type OfAttachment = fn(&Attachment) -> u64;

/// Puts what attachments did.
pub(crate) fn put_attachments(page: &mut Page, attachments: &[Attachment]) {
    let values: [(&'static Family, OfAttachment); 9] = [
        (&families::VOLUME_READS, |a| a.counters.reads),
        (&families::VOLUME_WRITES, |a| a.counters.writes),
        (&families::VOLUME_READ_BYTES, |a| a.counters.read_bytes),
        (&families::VOLUME_WRITTEN_BYTES, |a| a.counters.write_bytes),
        (&families::VOLUME_FLUSHES, |a| a.counters.flushes),
        (&families::VOLUME_DISCARDS, |a| a.counters.discards),
        (&families::VOLUME_ERRORS, |a| a.counters.errors),
        (&families::CONNECTED, |a| {
            u64::from(a.state == AttachmentState::Connected)
        }),
        (&families::QUEUES, |a| u64::from(a.queues_running)),
    ];
    for (family, value) in values {
        for attachment in attachments {
            let labels = [attachment.volume.as_str(), attachment.socket.as_str()];
            page.put(family, &labels, value(attachment));
        }
    }
}

/// Puts how long requests took.
pub(crate) fn put_latencies(page: &mut Page, all: &[AttachmentStats]) {
    for stats in all {
        for (operation, requests) in [
            ("read", &stats.reads),
            ("write", &stats.writes),
            ("flush", &stats.flushes),
            ("discard", &stats.discards),
        ] {
            let labels = [stats.volume.as_str(), stats.socket.as_str(), operation];
            put_latency(page, &families::VOLUME_LATENCY, &labels, requests);
        }
    }
    for stats in all {
        let labels = [stats.volume.as_str(), stats.socket.as_str()];
        page.put(&families::IN_FLIGHT, &labels, stats.in_flight);
    }
}
