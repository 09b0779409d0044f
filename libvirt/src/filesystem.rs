//! The `<filesystem>` element of an attachment.

use quick_xml::writer::Writer;

/// Entries of each virtqueue, the most that QEMU takes. A request takes one for each page and four more: with
/// fewer entries the guest's kernel sends requests of less than 1 MiB.
pub const QUEUE_SIZE: u16 = 1024;

/// The XML element of a virtio-fs device whose back end is served on a socket.
///
/// The device has one request queue: libvirt has no word for more. There is no `<readonly/>`, which many
/// versions of libvirt refuse for virtiofs (6.4 is the first): a read-only attachment refuses all changes
/// itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilesystemElement {
    /// Path of the attachment's socket.
    pub socket: String,
    /// What the guest mounts it by.
    pub tag: String,
}

impl FilesystemElement {
    /// The element as text, with its last line ended.
    pub fn to_xml(&self) -> String {
        crate::xml::to_text(|writer| self.write(writer))
    }

    fn write(&self, writer: &mut Writer<Vec<u8>>) -> std::io::Result<()> {
        let queue = QUEUE_SIZE.to_string();
        writer
            .create_element("filesystem")
            .with_attribute(("type", "mount"))
            .write_inner_content(|writer| {
                let element = writer.create_element("driver");
                let told = [("type", "virtiofs"), ("queue", queue.as_str())];
                element.with_attributes(told).write_empty()?;
                let element = writer.create_element("source");
                element
                    .with_attribute(("socket", self.socket.as_str()))
                    .write_empty()?;
                let element = writer.create_element("target");
                element
                    .with_attribute(("dir", self.tag.as_str()))
                    .write_empty()
                    .map(drop)
            })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xml::Element;

    #[test]
    fn a_filesystem_element_says_what_it_was_told() {
        let text = FilesystemElement {
            socket: "/run/penstock/home.sock".into(),
            tag: "a&b'<".into(),
        }
        .to_xml();
        let read = Element::parse(&text).unwrap();
        assert_eq!(
            (read.name.as_str(), read.attribute("type")),
            ("filesystem", Some("mount"))
        );
        let driver = |name| read.find_attribute(&["driver"], name);
        assert_eq!(
            (driver("type"), driver("queue")),
            (Some("virtiofs"), Some("1024"))
        );
        let socket = read.find_attribute(&["source"], "socket");
        assert_eq!(socket, Some("/run/penstock/home.sock"));
        assert_eq!(read.find_attribute(&["target"], "dir"), Some("a&b'<"));
    }
}
