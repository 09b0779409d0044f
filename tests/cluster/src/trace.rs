//! What a node says to others and hears from them: TCP segments with data, as they pass its end of the cable.

use std::fmt;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::network::Network;

/// How long one wait for a packet takes; a trace that is ended notices it after that.
const LOOK: Duration = Duration::from_millis(50);
/// Every protocol: a socket for one alone does not hear what the node itself sends.
const ETH_P_ALL: u16 = 0x0003;
const IPV4: u8 = 4;
const TCP: u8 = 6;

/// A message, which is a segment with data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Since the trace began.
    pub at: Duration,
    /// Who sent it.
    pub from: Ipv4Addr,
    /// To whom.
    pub to: Ipv4Addr,
    /// Port of the service, whichever side it is on: the lower one.
    pub port: u16,
    /// Bytes of data.
    pub bytes: usize,
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            at,
            from,
            to,
            port,
            bytes,
        } = self;
        write!(
            f,
            "{:>8} us  {from} -> {to}  port {port}, {bytes} bytes",
            at.as_micros()
        )
    }
}

/// A trace that is being taken.
#[derive(Debug)]
pub struct Trace {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<Message>>>,
}

impl Trace {
    /// Begins at a node's end of its cable.
    pub fn start(network: &Network, node: u8) -> Result<Self> {
        let namespace = network.namespace(node);
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&stop);
        let (ready, wait) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let socket = open(&namespace)?;
            let begin = Instant::now();
            let _ = ready.send(());
            let mut messages = Vec::new();
            while !theirs.load(Ordering::Relaxed) {
                if let Some(packet) = receive(&socket)? {
                    messages.extend(parse(&packet, begin.elapsed()));
                }
            }
            Ok(messages)
        });
        // An error is told at the end.
        let _ = wait.recv();
        Ok(Self { stop, thread })
    }

    /// Ends it.
    pub fn stop(self) -> Result<Vec<Message>> {
        // What was sent before is in the socket's buffer by now, and read before the next look at the flag.
        std::thread::sleep(LOOK);
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().ok().context("the trace panicked")?
    }
}

/// A socket that hears every packet in a namespace, both ways.
fn open(namespace: &str) -> Result<OwnedFd> {
    let name = std::fs::File::open(format!("/run/netns/{namespace}"))?;
    move_into_link_name_space(name.as_fd(), Some(LinkNameSpaceType::Network))?;
    let protocol = i32::from(ETH_P_ALL.to_be());
    // SAFETY: socket(2) takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM, protocol) };
    if fd < 0 {
        bail!("open a packet socket: {}", std::io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and is nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The next packet, if one comes soon.
fn receive(socket: &OwnedFd) -> Result<Option<Vec<u8>>> {
    let mut poll = libc::pollfd {
        fd: socket.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one pollfd is given, and it lives during the call.
    let ready = unsafe { libc::poll(&raw mut poll, 1, LOOK.as_millis() as i32) };
    if ready <= 0 {
        return Ok(None);
    }
    let mut buffer = vec![0u8; 128 << 10];
    // SAFETY: the buffer is as long as is told.
    let count = unsafe {
        libc::recv(
            socket.as_raw_fd(),
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            0,
        )
    };
    let Ok(count) = usize::try_from(count) else {
        bail!("read a packet: {}", std::io::Error::last_os_error());
    };
    buffer.truncate(count);
    Ok(Some(buffer))
}

/// The message in an IPv4 packet, if it is a segment with data.
fn parse(packet: &[u8], at: Duration) -> Option<Message> {
    let first = *packet.first()?;
    let header = usize::from(first & 15) * 4;
    if first >> 4 != IPV4 || *packet.get(9)? != TCP {
        return None;
    }
    let total = usize::from(u16::from_be_bytes([packet[2], packet[3]]));
    let address = |at: usize| -> Option<Ipv4Addr> {
        let bytes: [u8; 4] = packet.get(at..at + 4)?.try_into().ok()?;
        Some(bytes.into())
    };
    let tcp = packet.get(header..)?;
    let port = |at: usize| Some(u16::from_be_bytes(tcp.get(at..at + 2)?.try_into().ok()?));
    let data = header + usize::from(tcp.get(12)? >> 4) * 4;
    let bytes = total.checked_sub(data).filter(|bytes| *bytes > 0)?;
    Some(Message {
        at,
        from: address(12)?,
        to: address(16)?,
        port: port(0)?.min(port(2)?),
        bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A packet from 10.77.0.1:50000 to 10.77.0.2:7471.
    fn packet(data: u16) -> Vec<u8> {
        let mut packet = vec![0; 40];
        packet[0] = 0x45;
        packet[2..4].copy_from_slice(&(40 + data).to_be_bytes());
        packet[9] = TCP;
        packet[12..16].copy_from_slice(&[10, 77, 0, 1]);
        packet[16..20].copy_from_slice(&[10, 77, 0, 2]);
        packet[20..22].copy_from_slice(&50000u16.to_be_bytes());
        packet[22..24].copy_from_slice(&7471u16.to_be_bytes());
        packet[32] = 5 << 4;
        packet
    }

    #[test]
    fn segments_with_data_are_messages_and_bare_acks_are_not() {
        let message = parse(&packet(100), Duration::ZERO).unwrap();
        assert_eq!(message.from, Ipv4Addr::new(10, 77, 0, 1));
        assert_eq!(message.to, Ipv4Addr::new(10, 77, 0, 2));
        assert_eq!((message.port, message.bytes), (7471, 100));
        assert_eq!(parse(&packet(0), Duration::ZERO), None);
        for len in 0..40 {
            assert_eq!(parse(&packet(0)[..len], Duration::ZERO), None);
        }
    }
}
