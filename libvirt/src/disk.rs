//! The `<disk>` element of an attachment.

use quick_xml::writer::Writer;

/// Seconds between QEMU's attempts to reach the daemon again after it went away.
pub const RECONNECT_S: u32 = 1;
/// Entries of a virtqueue that vhost-user allows QEMU's disks. It is also what elements say unless told
/// otherwise: QEMU 10.0 lets the guest's driver use as many, whatever its own `queue-size` is, and asks for
/// an in-flight record of `queue-size` entries. A ring that the record has no room for is refused.
pub const QUEUE_SIZE_MAX: u16 = 1024;
/// Letters after which libvirt runs out of names with one letter; `vdaa` comes next.
const LETTERS: u32 = 26;

/// The memory that every domain with such a disk needs.
pub const SHARED_MEMORY: &str =
    "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>";

/// The XML element of a vhost-user disk.
///
/// libvirt refuses `<readonly/>` and `<serial>` on such disks: the guest learns both from the device itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskElement {
    /// Path of the attachment's socket.
    pub socket: String,
    /// Name of the device in libvirt's tools, like `vdb`.
    pub target: String,
    /// Virtqueues.
    pub queues: u16,
    /// Entries of each.
    pub queue_size: u16,
    /// Place in the order in which the firmware tries devices, from 1.
    pub boot_order: Option<u32>,
    /// Whether the guest may use packed virtqueues.
    pub is_packed: bool,
}

impl DiskElement {
    /// The element as text, with its last line ended.
    pub fn to_xml(&self) -> String {
        crate::xml::to_text(|writer| self.write(writer))
    }

    fn write(&self, writer: &mut Writer<Vec<u8>>) -> std::io::Result<()> {
        let (queues, reconnect) = (self.queues.to_string(), RECONNECT_S.to_string());
        let size = self.queue_size.to_string();
        let order = self.boot_order.map(|order| order.to_string());
        let mut driver = vec![
            ("name", "qemu"),
            ("type", "raw"),
            ("queues", queues.as_str()),
            ("queue_size", size.as_str()),
        ];
        if self.is_packed {
            driver.push(("packed", "on"));
        }
        writer
            .create_element("disk")
            .with_attributes([("type", "vhostuser"), ("device", "disk")])
            .write_inner_content(|writer| {
                let element = writer.create_element("driver");
                element.with_attributes(driver).write_empty()?;
                writer
                    .create_element("source")
                    .with_attributes([("type", "unix"), ("path", self.socket.as_str())])
                    .write_inner_content(|writer| {
                        let element = writer.create_element("reconnect");
                        let told = [("enabled", "yes"), ("timeout", reconnect.as_str())];
                        element.with_attributes(told).write_empty().map(drop)
                    })?;
                let element = writer.create_element("target");
                let told = [("dev", self.target.as_str()), ("bus", "virtio")];
                element.with_attributes(told).write_empty()?;
                if let Some(order) = &order {
                    let element = writer.create_element("boot");
                    element
                        .with_attribute(("order", order.as_str()))
                        .write_empty()?;
                }
                Ok(())
            })?;
        Ok(())
    }
}

/// The first character of a socket's path that libvirt cannot keep. It writes such a path into the domain's
/// XML as it is (as of version 9.0), and does not read that XML again: the domain would be lost.
pub fn unkeepable(socket: &str) -> Option<char> {
    let is_bad = |c: &char| matches!(c, '&' | '<' | '>' | '\'' | '"') || c.is_control();
    socket.chars().find(is_bad)
}

/// Whether libvirt takes it as the name of a virtio disk: `vd` and letters.
pub fn is_target(name: &str) -> bool {
    name.strip_prefix("vd").is_some_and(|letters| {
        (1..=3).contains(&letters.len()) && letters.chars().all(|c| c.is_ascii_lowercase())
    })
}

/// The first name of a virtio disk that is not among `used`.
pub fn free_target<'a>(used: impl Iterator<Item = &'a str> + Clone) -> String {
    let mut index = 0;
    loop {
        let name = target_name(index);
        if !used.clone().any(|one| one == name) {
            return name;
        }
        index += 1;
    }
}

/// 0 is `vda`, 26 is `vdaa`.
fn target_name(index: u32) -> String {
    let mut letters = Vec::new();
    let mut rest = index + 1;
    while rest > 0 {
        rest -= 1;
        letters.push(char::from(b'a' + (rest % LETTERS) as u8));
        rest /= LETTERS;
    }
    letters.push('d');
    letters.push('v');
    letters.iter().rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xml::Element;

    #[test]
    fn a_disk_element_says_what_it_was_told() {
        let mut disk = DiskElement {
            socket: "/run/a&b'<.sock".into(),
            target: "vdc".into(),
            queues: 2,
            queue_size: 1024,
            boot_order: None,
            is_packed: false,
        };
        let text = disk.to_xml();
        let read = Element::parse(&text).unwrap();
        let path = read.find_attribute(&["source"], "path");
        assert_eq!(path, Some("/run/a&b'<.sock"));
        let reconnect = read.find(&["source", "reconnect"]).unwrap();
        assert_eq!(reconnect.attribute("timeout"), Some("1"));
        assert!(!text.contains("boot") && !text.contains("packed"), "{text}");
        (disk.queue_size, disk.boot_order) = (512, Some(1));
        disk.is_packed = true;
        let read = Element::parse(&disk.to_xml()).unwrap();
        assert_eq!(
            read.find_attribute(&["driver"], "queue_size"),
            Some("512"),
            "{text}"
        );
        assert_eq!(read.find_attribute(&["boot"], "order"), Some("1"));
        assert_eq!(read.find_attribute(&["driver"], "packed"), Some("on"));
    }

    #[test]
    fn a_path_that_libvirt_cannot_keep_is_known() {
        assert_eq!(unkeepable("/run/penstock/a b-ä_1.sock"), None);
        for (path, bad) in [("/a&b", '&'), ("/it's", '\''), ("/a\n", '\n')] {
            assert_eq!(unkeepable(path), Some(bad));
        }
    }

    #[test]
    fn the_next_free_name_is_found() {
        assert_eq!(free_target([].into_iter()), "vda");
        assert_eq!(free_target(["vda", "hda", "vdc"].into_iter()), "vdb");
        assert_eq!(
            [25, 26, 51, 52, 701, 702].map(target_name),
            ["vdz", "vdaa", "vdaz", "vdba", "vdzz", "vdaaa"]
        );
        for name in ["vda", "vdaa", "vdabc"] {
            assert!(is_target(name), "{name}");
        }
        for name in ["", "vd", "sda", "vd1", "vdA", "vdabcd", "vd'b"] {
            assert!(!is_target(name), "{name}");
        }
    }
}
