//! The kernel's nbd client: devices are created, reconnected and removed by generic netlink (Linux,
//! `include/uapi/linux/nbd-netlink.h`), and found in sysfs by their backend identifier (Linux 5.14).

use std::fmt::Debug;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable, NLM_F_ACK, NLM_F_REQUEST, NetlinkDeserializable,
    NetlinkMessage, NetlinkPayload, NetlinkSerializable, Nla, NlasIterator, Parseable,
    ParseableParametrized,
};
use netlink_packet_generic::ctrl::nlas::GenlCtrlAttrs;
use netlink_packet_generic::ctrl::{GenlCtrl, GenlCtrlCmd};
use netlink_packet_generic::{GenlFamily, GenlHeader, GenlMessage};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_GENERIC};

use super::protocol::Geometry;

/// Request timeout. After that the kernel marks the connection dead, and requeues the request.
pub const REQUEST_LIMIT: Duration = Duration::from_secs(30);
/// How long requests wait for a reconnect (`dead_conn_timeout`): a year.
const SERVER_LIMIT: Duration = Duration::from_secs(365 * 24 * 3600);
/// Timeout for a disconnect, and for the kernel to mark an old connection dead.
const GONE_LIMIT: Duration = Duration::from_secs(15);
const LOOK: Duration = Duration::from_millis(20);
const BLOCK_DEVICES: &str = "/sys/block";

/// Error text for EPERM.
const RIGHT_MISSING: &str = "configuring nbd devices needs CAP_SYS_ADMIN: add it to CapabilityBoundingSet= \
    of the daemon's unit";

/// Commands.
mod command {
    pub const CONNECT: u8 = 1;
    pub const DISCONNECT: u8 = 2;
    pub const RECONFIGURE: u8 = 3;
}

/// Attributes.
mod attribute {
    pub const INDEX: u16 = 1;
    pub const SIZE_BYTES: u16 = 2;
    pub const BLOCK_SIZE_BYTES: u16 = 3;
    pub const TIMEOUT: u16 = 4;
    pub const SERVER_FLAGS: u16 = 5;
    pub const SOCKETS: u16 = 7;
    pub const DEAD_CONN_TIMEOUT: u16 = 8;
    pub const BACKEND_IDENTIFIER: u16 = 10;
    /// Of a list of sockets: one of them, and its descriptor.
    pub const SOCKET: u16 = 1;
    pub const SOCKET_FD: u16 = 1;
    /// The attribute holds attributes.
    pub const NESTED: u16 = 1 << 15;
}

/// A device of the kernel's nbd client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Index: N of `/dev/nbdN`.
    pub index: u32,
    /// Backend identifier.
    pub name: String,
}

impl Device {
    /// The device with this backend identifier, if there is one.
    pub fn find(name: &str) -> Option<Self> {
        Self::find_in(Path::new(BLOCK_DEVICES), name)
    }

    fn find_in(devices: &Path, name: &str) -> Option<Self> {
        let entries = std::fs::read_dir(devices).ok()?;
        entries.flatten().find_map(|entry| {
            let index = entry
                .file_name()
                .to_str()?
                .strip_prefix("nbd")?
                .parse()
                .ok()?;
            let told = std::fs::read_to_string(entry.path().join("backend")).ok()?;
            (told.trim_end() == name).then(|| Self {
                index,
                name: name.to_owned(),
            })
        })
    }

    /// Path of the block device (`/dev/nbd0`).
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/nbd{}", self.index))
    }

    /// Creates a device that is connected to `socket`.
    ///
    /// # Errors
    /// `PermissionDenied` without CAP_SYS_ADMIN; `Unsupported` before Linux 5.14.
    pub fn make(name: &str, geometry: Geometry, socket: BorrowedFd<'_>) -> io::Result<Self> {
        let mut attributes = vec![
            number(attribute::SIZE_BYTES, geometry.size_bytes),
            number(attribute::BLOCK_SIZE_BYTES, geometry.block_bytes.into()),
            number(attribute::SERVER_FLAGS, geometry.flags.into()),
            number(attribute::TIMEOUT, REQUEST_LIMIT.as_secs()),
            number(attribute::DEAD_CONN_TIMEOUT, SERVER_LIMIT.as_secs()),
            text(attribute::BACKEND_IDENTIFIER, name),
        ];
        attributes.push(socket_list(socket));
        let told = ask(command::CONNECT, attributes)?;
        let index = told.iter().find(|one| one.kind() == attribute::INDEX);
        let index = index.and_then(|one| <[u8; 4]>::try_from(bytes_of(one)).ok());
        let index = index
            .ok_or_else(|| io::Error::other("the kernel's answer has no index of an nbd device"))?;
        let device = Self {
            index: u32::from_ne_bytes(index),
            name: name.to_owned(),
        };
        // Without its name in sysfs (before Linux 5.14) the next helper would not find it, and make another.
        if Self::find(name).is_none() {
            device.disconnect()?;
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this kernel's nbd does not keep the names of devices: Linux 5.14 or later does",
            ));
        }
        Ok(device)
    }

    /// Reconnects the device to another socket, once the kernel has marked the old connection dead.
    pub fn reconnect(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let until = Instant::now() + GONE_LIMIT;
        loop {
            let mut attributes = self.address();
            attributes.push(socket_list(socket));
            match ask(command::RECONFIGURE, attributes) {
                Err(error)
                    if error.raw_os_error() == Some(libc::ENOSPC) && Instant::now() < until =>
                {
                    std::thread::sleep(LOOK);
                }
                other => return other.map(drop),
            }
        }
    }

    /// Sets the size.
    pub fn resize(&self, size_bytes: u64) -> io::Result<()> {
        let mut attributes = self.address();
        attributes.push(number(attribute::SIZE_BYTES, size_bytes));
        ask(command::RECONFIGURE, attributes).map(drop)
    }

    /// Disconnects the device and waits until it is gone. Requests that still wait fail.
    pub fn remove(&self) -> io::Result<()> {
        self.disconnect()?;
        let until = Instant::now() + GONE_LIMIT;
        while Self::find(&self.name).is_some() {
            if Instant::now() > until {
                return Err(io::Error::other(format!(
                    "{} is still there",
                    self.path().display()
                )));
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    fn disconnect(&self) -> io::Result<()> {
        ask(command::DISCONNECT, self.address()).map(drop)
    }

    /// The kernel refuses a command if the device with this index has another name by now.
    fn address(&self) -> Vec<DefaultNla> {
        vec![
            DefaultNla::new(attribute::INDEX, self.index.to_ne_bytes().to_vec()),
            text(attribute::BACKEND_IDENTIFIER, &self.name),
        ]
    }
}

/// Whether the kernel has the netlink interface of nbd; loads the module if it is missing.
pub fn check() -> io::Result<()> {
    if family().is_err() {
        let loaded = Command::new("modprobe")
            .arg("nbd")
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .status();
        tracing::debug!(?loaded, "load the module nbd");
    }
    family().map(drop)
}

fn number(kind: u16, value: u64) -> DefaultNla {
    DefaultNla::new(kind, value.to_ne_bytes().to_vec())
}

fn text(kind: u16, value: &str) -> DefaultNla {
    DefaultNla::new(kind, [value.as_bytes(), &[0]].concat())
}

fn socket_list(socket: BorrowedFd<'_>) -> DefaultNla {
    let fd = socket.as_raw_fd() as u32;
    let fd = DefaultNla::new(attribute::SOCKET_FD, fd.to_ne_bytes().to_vec());
    let socket = nested(attribute::SOCKET, &fd);
    nested(attribute::SOCKETS, &socket)
}

fn nested(kind: u16, inner: &DefaultNla) -> DefaultNla {
    let mut bytes = vec![0; inner.buffer_len()];
    inner.emit(&mut bytes);
    DefaultNla::new(kind | attribute::NESTED, bytes)
}

fn bytes_of(attribute: &DefaultNla) -> Vec<u8> {
    let mut bytes = vec![0; attribute.value_len()];
    attribute.emit_value(&mut bytes);
    bytes
}

/// A message of the family `nbd`.
#[derive(Debug, Clone)]
struct Message {
    command: u8,
    attributes: Vec<DefaultNla>,
}

impl GenlFamily for Message {
    fn family_name() -> &'static str {
        "nbd"
    }

    fn command(&self) -> u8 {
        self.command
    }

    fn version(&self) -> u8 {
        1
    }
}

impl Emitable for Message {
    fn buffer_len(&self) -> usize {
        self.attributes.as_slice().buffer_len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        self.attributes.as_slice().emit(buffer);
    }
}

impl ParseableParametrized<[u8], GenlHeader> for Message {
    fn parse_with_param(bytes: &[u8], header: GenlHeader) -> Result<Self, DecodeError> {
        let attributes = NlasIterator::new(bytes)
            .map(|attribute| DefaultNla::parse(&attribute?))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            command: header.cmd,
            attributes,
        })
    }
}

/// Sends a command, waits for its acknowledgement, and returns the attributes of the answer.
fn ask(command: u8, attributes: Vec<DefaultNla>) -> io::Result<Vec<DefaultNla>> {
    let mut message = GenlMessage::from_payload(Message {
        command,
        attributes,
    });
    message.set_resolved_family_id(family()?);
    let told: Vec<Message> = exchange(message)?;
    Ok(told.into_iter().flat_map(|one| one.attributes).collect())
}

/// The id of the netlink family.
fn family() -> io::Result<u16> {
    let asked = GenlMessage::from_payload(GenlCtrl {
        cmd: GenlCtrlCmd::GetFamily,
        nlas: vec![GenlCtrlAttrs::FamilyName(Message::family_name().into())],
    });
    let told: Vec<GenlCtrl> = exchange(asked)?;
    let attributes = told.into_iter().flat_map(|one| one.nlas);
    let mut ids = attributes.filter_map(|one| match one {
        GenlCtrlAttrs::FamilyId(id) => Some(id),
        _ => None,
    });
    ids.next()
        .ok_or_else(|| io::Error::other("the kernel has no id for the netlink family nbd"))
}

/// Sends a message and returns what comes before its acknowledgement.
fn exchange<F>(message: GenlMessage<F>) -> io::Result<Vec<F>>
where
    F: GenlFamily + Emitable + Debug + Clone + ParseableParametrized<[u8], GenlHeader>,
    GenlMessage<F>: NetlinkSerializable + NetlinkDeserializable + Debug,
{
    let mut socket = Socket::new(NETLINK_GENERIC)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut message = NetlinkMessage::from(message);
    message.header.flags = NLM_F_REQUEST | NLM_F_ACK;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    let mut told = Vec::new();
    loop {
        let (packet, _) = socket.recv_from_full()?;
        let mut rest = &packet[..];
        while !rest.is_empty() {
            let message = NetlinkMessage::<GenlMessage<F>>::deserialize(rest)
                .map_err(|error| io::Error::other(error.to_string()))?;
            let length = (message.header.length as usize).next_multiple_of(4);
            rest = rest.get(length.max(1)..).unwrap_or_default();
            match message.payload {
                NetlinkPayload::InnerMessage(inner) => told.push(inner.payload),
                NetlinkPayload::Error(error) => {
                    return match error.code {
                        None => Ok(told),
                        Some(code) if -code.get() == libc::EPERM => Err(io::Error::new(
                            io::ErrorKind::PermissionDenied,
                            RIGHT_MISSING,
                        )),
                        Some(code) => Err(io::Error::from_raw_os_error(-code.get())),
                    };
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_found_by_the_name_it_was_made_with() {
        let dir = tempfile::tempdir().unwrap();
        for (device, name) in [
            ("nbd0", "other\n"),
            ("nbd12", "penstock-a\n"),
            ("sda", "penstock-a"),
        ] {
            std::fs::create_dir(dir.path().join(device)).unwrap();
            std::fs::write(dir.path().join(device).join("backend"), name).unwrap();
        }
        std::fs::create_dir(dir.path().join("nbd1")).unwrap();
        let found = Device::find_in(dir.path(), "penstock-a").unwrap();
        assert_eq!(found.path(), Path::new("/dev/nbd12"));
        assert_eq!(Device::find_in(dir.path(), "penstock"), None);
    }
}
