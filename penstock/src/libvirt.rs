//! What libvirt needs to know.

use crate::api::types::Attachment;
use crate::failure::{Failure, Result};

/// Seconds between libvirt's (QEMU's) attempts to reach the daemon again after it went away.
const RECONNECT_S: u32 = 1;

/// The `<disk>` element for an attachment, to be pasted into a domain or given to `virsh attach-device`.
pub fn disk_xml(attachment: &Attachment, target: &str) -> Result<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if target.is_empty() || !target.chars().all(plain) {
        return Err(Failure::invalid(
            format!("'{target}' is no device name"),
            "use one like vdb",
        ));
    }
    let socket = escape(&attachment.socket);
    let queues = attachment.queues;
    // A comment must not contain two hyphens in a row; the volume's name could.
    let volume = escape(&attachment.volume).replace("--", "- -");
    Ok(format!(
        "<!-- Penstock volume {volume}. The domain needs memory that the daemon can map:\n     \
         <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking> -->\n\
         <disk type='vhostuser' device='disk'>\n  \
         <driver name='qemu' type='raw' queues='{queues}'/>\n  \
         <source type='unix' path='{socket}'>\n    \
         <reconnect enabled='yes' timeout='{RECONNECT_S}'/>\n  \
         </source>\n  \
         <target dev='{target}' bus='virtio'/>\n\
         </disk>\n"
    ))
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&apos;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::types::{AttachmentState, Counters};

    #[test]
    fn the_disk_element_reconnects_and_escapes() {
        let attachment = Attachment {
            socket: "/run/a&b'.sock".into(),
            volume: "a--b".into(),
            queues: 2,
            read_only: false,
            state: AttachmentState::Listening,
            queues_running: 0,
            last_error: None,
            pin_memory: true,
            incoming: false,
            takeover_pause_ms: None,
            write_through: false,
            counters: Counters::default(),
        };
        let xml = disk_xml(&attachment, "vdc").unwrap();
        assert!(xml.contains("path='/run/a&amp;b&apos;.sock'"), "{xml}");
        assert!(
            xml.contains("<reconnect enabled='yes' timeout='1'/>"),
            "{xml}"
        );
        assert!(xml.contains("queues='2'"), "{xml}");
        assert!(xml.contains("<!-- Penstock volume a- -b."), "{xml}");
        assert!(xml.contains("<memoryBacking>"), "{xml}");
        assert!(disk_xml(&attachment, "vd'b").is_err());
    }
}
