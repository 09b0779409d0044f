//! Attachments as listings tell them.

use api::types::{Attachment, AttachmentState, Counters, Offer};

use crate::attachments::{Attachments, Live};
use storage::Device;

use crate::attachments::State;
use crate::options::{is_pinned, queue_size};

impl Attachments {
    /// An attachment that meta has, and what it does now.
    pub(crate) fn shown(&self, live: &Live<'_>, attachment: meta::Attachment) -> Attachment {
        let mut shown = Attachment {
            node: self.cluster.meta.map().node_name(attachment.node),
            socket: attachment.socket,
            volume: attachment.target.name().to_string(),
            queues: attachment.queues,
            queue_size: queue_size(&attachment.options),
            read_only: attachment.read_only,
            pin_memory: is_pinned(&attachment.options),
            write_through: attachment.options.write_through,
            incoming: attachment.options.incoming.is_some(),
            expires_at_ms: attachment.expires_at.map(|end| end.0),
            offer: attachment.offer.map(|offer| Offer {
                to: self.cluster.meta.map().node_name(offer.to),
                expires_at_ms: offer.expires_at.0,
            }),
            block_device: None,
            takeover_pause_ms: None,
            // Of another node's only that one knows whether a guest is there.
            state: match attachment.node == self.cluster.node_id() {
                true => AttachmentState::Failed,
                false => AttachmentState::Elsewhere,
            },
            queues_running: 0,
            last_error: None,
            counters: Counters::default(),
        };
        let served = live.attached.served.get(&attachment.id);
        let block = served.and_then(|served| served.block.as_ref());
        shown.block_device = block.and_then(|block| block.device.clone());
        let pause = served.and_then(|served| served.waiting.pause());
        shown.takeover_pause_ms = pause.map(|pause| pause.as_millis() as u64);
        match served.map(|served| &served.state) {
            Some(State::Up {
                session, device, ..
            }) => {
                let state = session.state();
                shown.state = match state.connected {
                    _ if session.is_finished() => AttachmentState::Failed,
                    true => AttachmentState::Connected,
                    false => AttachmentState::Listening,
                };
                shown.queues_running = state.rings;
                shown.last_error = state.last_error;
                shown.write_through = !device.writeback();
                shown.counters = counters(device);
            }
            Some(State::Detaching) => shown.state = AttachmentState::Detaching,
            Some(State::Failed(_) | State::Lost(_)) | None => {}
        }
        shown
    }
}

fn counters(device: &Device) -> Counters {
    let c = device.counters();
    Counters {
        reads: c.reads,
        writes: c.writes,
        read_bytes: c.read_bytes,
        write_bytes: c.written_bytes,
        flushes: c.flushes,
        discards: c.discards + c.write_zeroes,
        errors: c.errors,
    }
}
