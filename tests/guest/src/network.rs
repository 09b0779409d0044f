//! Networks between guests: a switch of ours that QEMU's `stream` back end connects to, so that neither
//! privilege nor a network of the host is needed, nothing is lost that a guest takes, and a test can pull the
//! plug.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};

/// Longest frame that is taken from a guest; virtio-net with segmentation offload sends 64 KiB and headers.
const FRAME_BYTES_MAX: usize = 128 << 10;
/// Frames that wait for one guest; those beyond are lost, as in any switch.
const QUEUED_FRAMES_MAX: usize = 4096;
/// Bytes of a frame's length in front of it.
const LENGTH_BYTES: usize = 4;

/// A network card of a guest: `eth0` is the first.
#[derive(Debug, Clone)]
pub struct Nic {
    /// Its address on the wire.
    pub mac: [u8; 6],
    /// The switch that its cable leads to; without one it is up and hears nobody.
    pub switch: Option<PathBuf>,
}

impl Nic {
    /// A card with an address of its own for each `number`, on no network.
    pub fn new(number: u8) -> Self {
        Self {
            // Locally administered, QEMU's own prefix.
            mac: [0x52, 0x54, 0x00, 0x00, 0x00, number],
            switch: None,
        }
    }

    /// The same card on the network of `switch`.
    pub fn on(mut self, switch: &Switch) -> Self {
        self.switch = Some(switch.socket.clone());
        self
    }

    /// QEMU's arguments for the card with this `index`.
    pub fn args(&self, index: usize) -> [String; 4] {
        let end = match &self.switch {
            Some(socket) => format!(
                "stream,id=net{index},server=off,addr.type=unix,addr.path={}",
                socket.display()
            ),
            None => format!("hubport,id=net{index},hubid={index}"),
        };
        let mac = self.mac.map(|byte| format!("{byte:02x}")).join(":");
        let card = format!("virtio-net-pci,netdev=net{index},mac={mac},romfile=");
        ["-netdev".into(), end, "-device".into(), card]
    }
}

/// A queue of frames for one guest; `None` when it is gone.
type Port = Option<SyncSender<Arc<[u8]>>>;

/// What the switch's threads share.
#[derive(Debug, Default)]
struct Shared {
    ports: Mutex<Vec<Port>>,
    unplugged: AtomicBool,
    /// UDP packets to this port get nowhere; 0: all do.
    dropped_port: AtomicU16,
    ended: AtomicBool,
}

/// Forwards every frame to all other guests. Its threads end with the guests' connections.
#[derive(Debug)]
pub struct Switch {
    socket: PathBuf,
    shared: Arc<Shared>,
    _directory: tempfile::TempDir,
}

impl Switch {
    /// A switch that guests can be connected to.
    pub fn new() -> Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix("rig-")
            .tempdir()
            .context("make a directory for the switch")?;
        let socket = directory.path().join("switch");
        let listener =
            UnixListener::bind(&socket).with_context(|| format!("bind {}", socket.display()))?;
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("rig-switch".to_owned())
            .spawn(move || theirs.accept(&listener))
            .context("start the switch")?;
        Ok(Self {
            socket,
            shared,
            _directory: directory,
        })
    }

    /// From now on no frame gets anywhere; the guests' links stay up.
    pub fn pull_plug(&self) {
        self.shared.unplugged.store(true, Ordering::Relaxed);
    }

    /// Packets of UDP over IPv4 to this port get nowhere from now on; with `None` all do again.
    pub fn drop_udp_to(&self, port: Option<u16>) {
        let port = port.unwrap_or(0);
        self.shared.dropped_port.store(port, Ordering::Relaxed);
    }

    /// Forwards again.
    pub fn plug_in(&self) {
        self.shared.unplugged.store(false, Ordering::Relaxed);
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        // Wakes the thread that listens.
        let _ = UnixStream::connect(&self.socket);
    }
}

impl Shared {
    fn accept(self: Arc<Self>, listener: &UnixListener) {
        for stream in listener.incoming().map_while(Result::ok) {
            if self.ended.load(Ordering::SeqCst) {
                return;
            }
            let Ok(output) = stream.try_clone() else {
                return;
            };
            let (queue, frames) = sync_channel(QUEUED_FRAMES_MAX);
            let mut ports = self.ports();
            let port = ports.len();
            ports.push(Some(queue));
            drop(ports);
            let shared = Arc::clone(&self);
            std::thread::spawn(move || shared.receive(port, stream));
            std::thread::spawn(move || send(&frames, output));
        }
    }

    /// Takes frames from one guest until it is gone.
    fn receive(&self, port: usize, mut input: UnixStream) {
        while let Ok(frame) = read_frame(&mut input) {
            let dropped = self.dropped_port.load(Ordering::Relaxed);
            let is_dropped = dropped != 0 && udp_port(&frame[LENGTH_BYTES..]) == Some(dropped);
            if is_dropped || self.unplugged.load(Ordering::Relaxed) {
                continue;
            }
            let others = self.ports();
            for queue in others
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != port)
                .filter_map(|(_, queue)| queue.as_ref())
            {
                // A full queue loses the frame, and a guest that is gone takes none.
                let _ = queue.try_send(Arc::clone(&frame));
            }
        }
        self.ports()[port] = None;
    }

    fn ports(&self) -> MutexGuard<'_, Vec<Port>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A frame as QEMU puts it on a stream: its length in four bytes, the highest first, and its bytes.
fn read_frame(input: &mut UnixStream) -> std::io::Result<Arc<[u8]>> {
    let mut length = [0; LENGTH_BYTES];
    input.read_exact(&mut length)?;
    let bytes = u32::from_be_bytes(length) as usize;
    if bytes > FRAME_BYTES_MAX {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    let mut frame = vec![0; LENGTH_BYTES + bytes];
    frame[..LENGTH_BYTES].copy_from_slice(&length);
    input.read_exact(&mut frame[LENGTH_BYTES..])?;
    Ok(frame.into())
}

fn send(frames: &Receiver<Arc<[u8]>>, mut output: UnixStream) {
    for frame in frames {
        if output.write_all(&frame).is_err() {
            return;
        }
    }
}

/// Where a frame goes if it is UDP over IPv4: Ethernet's header has 14 bytes, with the protocol at 12; IP's
/// as many words as its first byte says, with the protocol at 9; UDP's has the port at 2 (RFC 894, 791, 768).
fn udp_port(frame: &[u8]) -> Option<u16> {
    const IPV4: [u8; 2] = [0x08, 0x00];
    const UDP: u8 = 17;
    let packet = frame.get(14..).filter(|_| frame[12..14] == IPV4)?;
    let header = usize::from(packet.first()? & 0x0f) * 4;
    let is_udp = *packet.get(9)? == UDP;
    let port = packet.get(header + 2..header + 4).filter(|_| is_udp)?;
    Some(u16::from_be_bytes([port[0], port[1]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_of_a_udp_packet_is_found_and_of_nothing_else() {
        let mut frame = [0; 64];
        frame[12..14].copy_from_slice(&[0x08, 0x00]);
        (frame[14], frame[23]) = (0x45, 17);
        frame[36..38].copy_from_slice(&4791u16.to_be_bytes());
        assert_eq!(udp_port(&frame), Some(4791));
        assert_eq!(udp_port(&frame[..37]), None, "cut short");
        frame[23] = 6;
        assert_eq!(udp_port(&frame), None, "TCP");
        (frame[23], frame[13]) = (17, 0x06);
        assert_eq!(udp_port(&frame), None, "ARP");
        assert_eq!(udp_port(&[]), None);
    }
}
