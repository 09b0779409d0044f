//! A domain's virtio-fs devices whose back ends are served on sockets, and which filesystems these are.

use super::{Domain, DomainError, asked_elements, devices, is_same_path, name_of, socket_of};
use crate::xml::Element;

/// A virtio-fs device with the socket of a back end that libvirt does not start itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtioFilesystem {
    /// What the guest mounts it by.
    pub tag: String,
    /// Path of the socket.
    pub socket: String,
    /// Entries of each virtqueue, if said.
    pub queue_size: Option<u16>,
}

/// A filesystem that metadata asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AskedFilesystem {
    /// Its name; empty if the element names none.
    pub filesystem: String,
    /// Tag of the device that it is to serve, if said.
    pub target: Option<String>,
    /// Whether it is served read-only.
    pub is_read_only: bool,
}

/// A filesystem that a domain needs attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NeededFilesystem {
    /// Its name.
    pub filesystem: String,
    /// The socket that the domain's device connects to.
    pub socket: String,
    /// What the guest mounts it by.
    pub tag: String,
    /// Whether it is served read-only.
    pub is_read_only: bool,
}

impl AskedFilesystem {
    pub(super) fn to_xml(&self) -> String {
        let mut element = quick_xml::events::BytesStart::new("filesystem");
        element.push_attribute(("name", self.filesystem.as_str()));
        if let Some(target) = &self.target {
            element.push_attribute(("target", target.as_str()));
        }
        if self.is_read_only {
            element.push_attribute(("readonly", "yes"));
        }
        format!("<{}/>", String::from_utf8_lossy(&element))
    }
}

impl Domain {
    /// The filesystem that is to serve a device, by its socket or the metadata; none if it is somebody else's
    /// back end.
    pub fn filesystem_of<'a>(&'a self, device: &'a VirtioFilesystem) -> Option<&'a str> {
        let asked = || self.asked_for_filesystem(device);
        name_of(&device.socket).or_else(|| asked().map(|asked| asked.filesystem.as_str()))
    }

    /// What the metadata ask for as this device, by its tag or by the filesystem that its socket names.
    pub fn asked_for_filesystem(&self, device: &VirtioFilesystem) -> Option<&AskedFilesystem> {
        let mut asked = self.asked_filesystems.iter();
        asked.find(|asked| match &asked.target {
            Some(tag) => *tag == device.tag,
            None => is_same_path(&socket_of(&asked.filesystem), &device.socket),
        })
    }

    /// Whether a Penstock filesystem is one of its devices, or its metadata ask for one.
    pub fn has_filesystem(&self) -> bool {
        let mut devices = self.filesystems.iter();
        !self.asked_filesystems.is_empty()
            || devices.any(|device| self.filesystem_of(device).is_some())
    }

    /// The filesystems that it needs attached before it starts: those its metadata ask for, and those that
    /// its devices' sockets name.
    ///
    /// # Errors
    /// The metadata name no filesystem, or a device that is not there.
    pub fn needed_filesystems(&self) -> Result<Vec<NeededFilesystem>, DomainError> {
        let mut needed: Vec<NeededFilesystem> = Vec::new();
        for asked in &self.asked_filesystems {
            needed.push(self.needed_filesystem(asked)?);
        }
        for device in &self.filesystems {
            let is_known = |one: &NeededFilesystem| is_same_path(&one.socket, &device.socket);
            if let Some(name) = name_of(&device.socket).filter(|_| !needed.iter().any(is_known)) {
                needed.push(NeededFilesystem {
                    filesystem: name.to_owned(),
                    socket: device.socket.clone(),
                    tag: device.tag.clone(),
                    is_read_only: false,
                });
            }
        }
        Ok(needed)
    }

    fn needed_filesystem(&self, asked: &AskedFilesystem) -> Result<NeededFilesystem, DomainError> {
        let filesystem = &asked.filesystem;
        if filesystem.is_empty() {
            return Err(DomainError::NoFilesystem);
        }
        let mut devices = self.filesystems.iter();
        let device = match &asked.target {
            Some(tag) => {
                let device = devices.find(|device| device.tag == *tag);
                Some(device.ok_or_else(|| DomainError::NoSuchFilesystem {
                    filesystem: filesystem.clone(),
                    target: tag.clone(),
                })?)
            }
            None => devices.find(|device| is_same_path(&device.socket, &socket_of(filesystem))),
        };
        Ok(NeededFilesystem {
            filesystem: filesystem.clone(),
            socket: device.map_or_else(|| socket_of(filesystem), |device| device.socket.clone()),
            tag: device.map_or_else(|| filesystem.clone(), |device| device.tag.clone()),
            is_read_only: asked.is_read_only,
        })
    }
}

/// The virtio-fs devices of a domain that have a socket.
pub(super) fn filesystems(root: &Element) -> Vec<VirtioFilesystem> {
    let device = |element: &Element| {
        let socket = element.find_attribute(&["source"], "socket")?;
        let driver = |name| element.find_attribute(&["driver"], name);
        (driver("type") == Some("virtiofs")).then(|| VirtioFilesystem {
            tag: element
                .find_attribute(&["target"], "dir")
                .unwrap_or_default()
                .to_owned(),
            socket: socket.to_owned(),
            queue_size: driver("queue").and_then(|text| text.parse().ok()),
        })
    };
    devices(root, "filesystem").filter_map(device).collect()
}

pub(super) fn asked(root: &Element) -> Vec<AskedFilesystem> {
    let said = |element: &Element| AskedFilesystem {
        filesystem: element.attribute("name").unwrap_or_default().to_owned(),
        target: element.attribute("target").map(str::to_owned),
        is_read_only: element.attribute("readonly") == Some("yes"),
    };
    let elements = asked_elements(root, "filesystem");
    elements.into_iter().map(said).collect()
}
