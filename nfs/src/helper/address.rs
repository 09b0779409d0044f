//! Floating addresses. Each is set for a limited time, no longer than the lease of its volume: the kernel
//! removes it then by itself, also when every process of ours is dead. So it is on one machine at a time.

use std::ffi::CString;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use serde::Deserialize;

use crate::plan::FloatingAddress;

use super::command::succeed;
use super::{HelperError, Result};

/// A floating address has no network of its own: the interface's address has.
const PREFIX: u8 = 32;
const ETHER_BYTES: usize = 6;
const BROADCAST: [u8; ETHER_BYTES] = [0xff; ETHER_BYTES];

/// What `ip -json addr` tells.
#[derive(Debug, Deserialize)]
struct Interface {
    ifname: String,
    #[serde(default)]
    addr_info: Vec<Info>,
}

#[derive(Debug, Deserialize)]
struct Info {
    local: Option<Ipv4Addr>,
    #[serde(default)]
    prefixlen: u8,
}

fn interfaces() -> Result<Vec<Interface>> {
    let told = succeed("ip", ["-json", "-4", "addr", "show"])?;
    serde_json::from_str(&told)
        .map_err(|e| HelperError::new(format!("cannot read what ip tells: {e}"), "update iproute2"))
}

/// All IPv4 addresses of this machine.
pub fn all() -> Result<Vec<Ipv4Addr>> {
    let all = interfaces()?.into_iter().flat_map(|one| one.addr_info);
    Ok(all.filter_map(|info| info.local).collect())
}

/// Refuses an address that could not be set here, or is this machine's own.
pub fn check(address: &FloatingAddress) -> Result<()> {
    let interfaces = interfaces()?;
    let mut all = interfaces.iter().flat_map(|one| &one.addr_info);
    if all.any(|info| info.local == Some(address.ip)) {
        return Err(HelperError::new(
            format!("{} is an address of this machine already", address.ip),
            "choose one that nobody has",
        ));
    }
    require_interface(&interfaces, address).map(drop)
}

fn require_interface<'a>(
    interfaces: &'a [Interface],
    address: &FloatingAddress,
) -> Result<&'a str> {
    interface(interfaces, address).ok_or_else(|| {
        HelperError::new(
            format!(
                "no interface of this machine has an address in {}",
                address.network()
            ),
            "give an interface of each NFS node an address in that network",
        )
    })
}

/// Sets an address, or keeps it, for some seconds, and tells the network where it is.
pub fn set(address: &FloatingAddress, valid_s: u32) -> Result<()> {
    let interfaces = interfaces()?;
    let name = require_interface(&interfaces, address)?;
    if valid_s == 0 {
        return give_up(address);
    }
    let (with_prefix, valid) = (format!("{}/{PREFIX}", address.ip), valid_s.to_string());
    let args = [
        "addr",
        "replace",
        &with_prefix,
        "dev",
        name,
        "valid_lft",
        &valid,
        "preferred_lft",
        &valid,
    ];
    succeed("ip", args)?;
    // Also with each renewal: a neighbour that missed the first hears it then.
    announce(name, address.ip).map_err(|e| HelperError::io(format!("announce {}", address.ip), &e))
}

/// Removes an address; one that is not there is no error.
pub fn give_up(address: &FloatingAddress) -> Result<()> {
    for interface in interfaces()? {
        let has = |info: &Info| info.local == Some(address.ip);
        if interface.addr_info.iter().any(has) {
            let with_prefix = format!("{}/{PREFIX}", address.ip);
            let removed = succeed(
                "ip",
                ["addr", "del", &with_prefix, "dev", &interface.ifname],
            );
            // It may have run out this moment.
            removed.or_else(|error| match all()?.contains(&address.ip) {
                true => Err(error),
                false => Ok(String::new()),
            })?;
        }
    }
    Ok(())
}

/// The interface whose own address is in the network of a floating one.
fn interface<'a>(interfaces: &'a [Interface], address: &FloatingAddress) -> Option<&'a str> {
    let is_beside = |info: &Info| {
        let local = info.local.filter(|_| info.prefixlen < PREFIX);
        local.is_some_and(|local| local != address.ip && address.is_beside(local))
    };
    let found = interfaces
        .iter()
        .find(|one| one.addr_info.iter().any(is_beside))?;
    Some(&found.ifname)
}

/// A gratuitous ARP: who has it told a neighbour before forgets where it was (RFC 5944, section 4.6).
fn frame(mac: [u8; ETHER_BYTES], ip: Ipv4Addr) -> [u8; 42] {
    let mut frame = [0; 42];
    frame[..6].copy_from_slice(&BROADCAST);
    frame[6..12].copy_from_slice(&mac);
    // ARP; Ethernet, IPv4, their lengths; a request.
    frame[12..22].copy_from_slice(&[0x08, 0x06, 0x00, 0x01, 0x08, 0x00, 6, 4, 0x00, 0x01]);
    frame[22..28].copy_from_slice(&mac);
    frame[28..32].copy_from_slice(&ip.octets());
    frame[38..42].copy_from_slice(&ip.octets());
    frame
}

fn announce(interface: &str, ip: Ipv4Addr) -> io::Result<()> {
    let told = std::fs::read_to_string(format!("/sys/class/net/{interface}/address"))?;
    let bytes = told
        .trim()
        .split(':')
        .map(|pair| u8::from_str_radix(pair, 16));
    let bytes: std::result::Result<Vec<u8>, _> = bytes.collect();
    let mac = bytes
        .ok()
        .and_then(|bytes| <[u8; ETHER_BYTES]>::try_from(bytes).ok());
    // An interface without Ethernet addresses has no neighbours to tell.
    let Some(mac) = mac.filter(|mac| *mac != [0; ETHER_BYTES]) else {
        return Ok(());
    };
    send(interface, &frame(mac, ip))
}

fn send(interface: &str, frame: &[u8]) -> io::Result<()> {
    let protocol = u16::to_be(libc::ETH_P_ARP as u16);
    // SAFETY: makes a descriptor, which is owned from here on.
    let socket = unsafe {
        let fd = libc::socket(
            libc::AF_PACKET,
            libc::SOCK_RAW | libc::SOCK_CLOEXEC,
            i32::from(protocol),
        );
        match fd {
            ..0 => return Err(io::Error::last_os_error()),
            fd => OwnedFd::from_raw_fd(fd),
        }
    };
    let name = CString::new(interface).map_err(io::Error::other)?;
    // SAFETY: the name ends with a zero.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    // SAFETY: all bytes zero are a valid address of this family.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = libc::AF_PACKET as u16;
    to.sll_protocol = protocol;
    to.sll_ifindex = i32::try_from(index).map_err(io::Error::other)?;
    to.sll_halen = ETHER_BYTES as u8;
    to.sll_addr[..ETHER_BYTES].copy_from_slice(&BROADCAST);
    // SAFETY: frame and address live until the call returns, and their lengths are theirs.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            frame.as_ptr().cast(),
            frame.len(),
            0,
            (&raw const to).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    match sent {
        ..0 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLD: &str = r#"[{"ifname":"lo","addr_info":[{"local":"127.0.0.1","prefixlen":8}]},
        {"ifname":"eth1","addr_info":[]},
        {"ifname":"eth0","addr_info":[{"local":"10.9.0.50","prefixlen":32},
            {"local":"10.9.0.1","prefixlen":24,"valid_life_time":4294967295}]}]"#;

    #[test]
    fn the_interface_in_the_network_is_found() {
        let told: Vec<Interface> = serde_json::from_str(TOLD).unwrap();
        let of = |text: &str| interface(&told, &text.parse().unwrap());
        assert_eq!(of("10.9.0.50/24"), Some("eth0"));
        assert_eq!(of("10.9.0.51/24"), Some("eth0"));
        assert_eq!(of("10.9.0.1/24"), None, "its own address floats nowhere");
        assert_eq!(of("10.8.0.1/24"), None);
    }

    #[test]
    fn an_announcement_names_the_address_twice() {
        let frame = frame([2, 0, 0, 0, 0, 1], Ipv4Addr::new(10, 9, 0, 50));
        assert_eq!(frame[12..14], [0x08, 0x06]);
        assert_eq!(
            (&frame[28..32], &frame[38..42]),
            (&[10, 9, 0, 50][..], &[10, 9, 0, 50][..])
        );
        assert_eq!(frame[6..12], frame[22..28]);
    }
}
