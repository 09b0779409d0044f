//! The rig's network itself: what is cut does not arrive, what is healed does.

use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cluster_rig::{CutDirection, Network};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A datagram that was not dropped arrives at once; this only bounds a test that fails.
const ARRIVES: Duration = Duration::from_secs(20);
const PORT: u16 = 4711;

/// A socket that lives in a node's namespace, whoever uses it.
fn socket(network: &Network, node: u8) -> Result<UdpSocket> {
    let (name, address) = (network.namespace(node), network.address(node));
    let opened = std::thread::spawn(move || -> Result<UdpSocket> {
        let namespace = std::fs::File::open(format!("/run/netns/{name}"))?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        let socket = UdpSocket::bind((address.as_str(), PORT))?;
        socket.set_read_timeout(Some(ARRIVES))?;
        Ok(socket)
    });
    opened.join().ok().context("the thread panicked")?
}

struct Pair<'a> {
    network: &'a Network,
    sockets: [UdpSocket; 2],
}

impl Pair<'_> {
    /// Sends `word` from node `from`, which is 1 or 2, to the other one.
    fn send(&self, from: u8, word: &[u8]) -> Result<()> {
        let to = self.network.address(3 - from);
        let sent = self.sockets[usize::from(from) - 1].send_to(word, (to.as_str(), PORT));
        // The sender's own rules refuse it, which is as good as losing it.
        ensure!(
            sent.as_ref().is_ok()
                || sent
                    .as_ref()
                    .is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied),
            "{sent:?}"
        );
        Ok(())
    }

    /// What node `at` hears next.
    fn hear(&self, at: u8) -> Result<Vec<u8>> {
        let mut buffer = [0; 16];
        let (count, _) = self.sockets[usize::from(at) - 1].recv_from(&mut buffer)?;
        Ok(buffer[..count].to_vec())
    }
}

#[test]
fn what_is_cut_does_not_arrive_and_what_is_healed_does() -> Result<()> {
    let mut network = Network::new(2)?;
    let sockets = [socket(&network, 1)?, socket(&network, 2)?];
    // A datagram that waits for its receiver's hardware address could leave after the cut has healed.
    let pair = Pair {
        network: &network,
        sockets: [sockets[0].try_clone()?, sockets[1].try_clone()?],
    };
    pair.send(1, &[0])?;
    assert_eq!(pair.hear(2)?, [0]);
    pair.send(2, &[0])?;
    assert_eq!(pair.hear(1)?, [0]);
    let mut word = 0u8;
    // Way as node 1 sees it; who is heard then.
    for (way, one_is_heard, two_is_heard) in [
        (CutDirection::Both, false, false),
        (CutDirection::In, true, false),
        (CutDirection::Out, false, true),
    ] {
        network.cut(1, way)?;
        let pair = Pair {
            network: &network,
            sockets: [sockets[0].try_clone()?, sockets[1].try_clone()?],
        };
        word += 2;
        pair.send(1, &[word])?;
        pair.send(2, &[word])?;
        if one_is_heard {
            assert_eq!(pair.hear(2)?, [word]);
        }
        if two_is_heard {
            assert_eq!(pair.hear(1)?, [word]);
        }
        network.heal(1)?;
        let pair = Pair {
            network: &network,
            sockets: [sockets[0].try_clone()?, sockets[1].try_clone()?],
        };
        pair.send(1, &[word + 1])?;
        pair.send(2, &[word + 1])?;
        // Whatever was sent during the cut would come first.
        assert_eq!(pair.hear(1)?, [word + 1], "{way:?}");
        assert_eq!(pair.hear(2)?, [word + 1], "{way:?}");
    }
    Ok(())
}

#[test]
fn nothing_is_left_of_a_network() -> Result<()> {
    let network = Network::new(3)?;
    let names: Vec<String> = (1..=3).map(|node| network.namespace(node)).collect();
    let exists = |name: &String| std::path::Path::new("/run/netns").join(name).exists();
    ensure!(names.iter().all(exists));
    drop(network);
    ensure!(!names.iter().any(exists));
    Ok(())
}
