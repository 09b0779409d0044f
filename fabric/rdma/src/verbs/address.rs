//! Numbers and units: what peers tell each other of their ends, and what limits them.

use std::fmt;
use std::time::Duration;

use rdma_sys::ibv_mtu;

use super::gid::Gid;

macro_rules! number {
    ($(#[$meta:meta])* $name:ident($inner:ty)) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(formatter)
            }
        }
    };
}

number!(
    /// A port of a device; the first is 1.
    PortNumber(u8)
);
number!(
    /// An entry of a port's table of GIDs.
    GidIndex(u8)
);
number!(
    /// A queue pair of a device, 24 bits.
    QpNumber(u32)
);
number!(
    /// Address of a port within an InfiniBand subnet; 0 on Ethernet.
    Lid(u16)
);
number!(
    /// What a peer shows to reach memory: the key of a region or a window.
    RemoteKey(u32)
);

/// Number of a packet, 24 bits. Each direction of a connection begins at a number that the sender chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    const MASK: u32 = (1 << 24) - 1;

    /// The lowest 24 bits of `number`.
    pub const fn new(number: u32) -> Self {
        Self(number & Self::MASK)
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// Largest payload of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Mtu {
    /// 256 bytes.
    B256 = ibv_mtu::IBV_MTU_256,
    /// 512 bytes.
    B512 = ibv_mtu::IBV_MTU_512,
    /// 1024 bytes.
    B1024 = ibv_mtu::IBV_MTU_1024,
    /// 2048 bytes.
    B2048 = ibv_mtu::IBV_MTU_2048,
    /// 4096 bytes.
    B4096 = ibv_mtu::IBV_MTU_4096,
}

impl Mtu {
    const ALL: [Self; 5] = [
        Self::B256,
        Self::B512,
        Self::B1024,
        Self::B2048,
        Self::B4096,
    ];

    /// From the number that devices and peers use.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.code() == code)
    }

    /// The number that devices and peers use.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// Bytes of payload.
    pub const fn bytes(self) -> u32 {
        128 << self.code()
    }
}

/// How long a sender waits for an acknowledgement before it sends again: 4.096 µs times a power of two.
/// Devices may wait up to four times that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct AckTimeout(u8);

impl AckTimeout {
    /// Five bits; 0 would be for ever, and is not offered.
    const CODE_MAX: u8 = 31;
    const UNIT_NS: u64 = 4096;

    /// The shortest that is not shorter than `duration`, or the longest there is.
    pub fn at_least(duration: Duration) -> Self {
        let code = (1..Self::CODE_MAX)
            .find(|code| Self(*code).duration() >= duration)
            .unwrap_or(Self::CODE_MAX);
        Self(code)
    }

    /// The number that devices use.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// How long it is.
    pub const fn duration(self) -> Duration {
        Duration::from_nanos(Self::UNIT_NS << self.0)
    }
}

/// What the peer must know of a queue pair to connect to it. It is told by other means, a connection that
/// both trust.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    /// The queue pair.
    pub queue_pair: QpNumber,
    /// Number of the first packet that it sends.
    pub psn: Psn,
    /// Address of its port.
    pub gid: Gid,
    /// Address of its port on InfiniBand.
    pub lid: Lid,
    /// Largest packet that its port takes.
    pub mtu: Mtu,
    /// READs that it serves at once; the peer may not have more on their way.
    pub reads_served: u8,
    /// READs that it wants to have on their way at once.
    pub reads_wanted: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtus_have_codes_and_bytes() {
        let bytes: Vec<u32> = Mtu::ALL.iter().map(|mtu| mtu.bytes()).collect();
        assert_eq!(bytes, [256, 512, 1024, 2048, 4096]);
        for mtu in Mtu::ALL {
            assert_eq!(Mtu::from_code(mtu.code()), Some(mtu));
        }
        assert_eq!((Mtu::from_code(0), Mtu::from_code(6)), (None, None));
    }

    #[test]
    fn timeouts_are_rounded_up_and_never_for_ever() {
        assert_eq!(AckTimeout::at_least(Duration::ZERO).code(), 1);
        let timeout = AckTimeout::at_least(Duration::from_millis(67));
        assert_eq!(timeout.code(), 14);
        assert!(timeout.duration() >= Duration::from_millis(67));
        let exact = AckTimeout(14);
        assert_eq!(AckTimeout::at_least(exact.duration()), exact);
        assert_eq!(
            AckTimeout::at_least(Duration::from_secs(1 << 20)).code(),
            31
        );
    }

    #[test]
    fn packet_numbers_have_24_bits() {
        assert_eq!(Psn::new(u32::MAX).get(), 0xff_ffff);
    }
}
