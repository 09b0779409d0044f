//! What the ends of a connection tell each other about the queue pair beside it
//! (`docs/decisions/0009-rdma-transport.md`): frames of their own kind on the connection.
//! Little-endian; a [`Pairing`] is a message's header.

use fabric_types::wire::WireError;

/// Longest reason that is told, in bytes; what is beyond is cut.
pub const REASON_BYTES_MAX: usize = 200;
/// Most requests that can be unanswered on a queue pair.
pub const UNANSWERED_MAX: usize = 192;

/// One end of a queue pair, as the other has to know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// Its number, 24 bits.
    pub queue_pair: u32,
    /// The first packet that it sends, 24 bits.
    pub psn: u32,
    /// The address of its port.
    pub gid: [u8; 16],
    /// The same within an InfiniBand subnet; 0 on Ethernet.
    pub lid: u16,
    /// Largest payload of a packet, by the number that devices use.
    pub mtu: u8,
    /// READs that it serves at once.
    pub reads_served: u8,
    /// READs that it has on their way at once.
    pub reads_wanted: u8,
    /// Receives that are posted.
    pub receives: u16,
    /// The key that goes into the checksums of what it sends.
    pub key: [u8; 16],
}

/// What is told. `number` names the queue pair on this connection, counted by the side that offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pairing {
    /// From the side that asks: this is my end.
    Offer {
        /// Which.
        number: u32,
        /// The end.
        end: End,
    },
    /// From the side that is asked: this is mine, and it receives.
    Accept {
        /// Which.
        number: u32,
        /// The end.
        end: End,
    },
    /// From the side that is asked: there is none, and why.
    Refuse {
        /// Which.
        number: u32,
        /// Why.
        reason: String,
    },
    /// From the side that is asked: it has failed here.
    Broken {
        /// Which.
        number: u32,
    },
    /// From the side that asks: it is over here, and these requests that were sent on it have no answer.
    FailedPair {
        /// Which.
        number: u32,
        /// The numbers that pair replies with requests.
        unanswered: Vec<u64>,
    },
    /// From the side that is asked: it is over here, too. These of them were not executed and never will be;
    /// the others are answered on the connection.
    Reconciled {
        /// Which.
        number: u32,
        /// The numbers that pair replies with requests.
        unknown: Vec<u64>,
    },
}

const END_BYTES: usize = 48;

impl End {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.queue_pair.to_le_bytes());
        out.extend_from_slice(&self.psn.to_le_bytes());
        out.extend_from_slice(&self.gid);
        out.extend_from_slice(&self.lid.to_le_bytes());
        out.extend_from_slice(&[self.mtu, self.reads_served, self.reads_wanted, 0]);
        out.extend_from_slice(&self.receives.to_le_bytes());
        out.extend_from_slice(&self.key);
    }

    fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes: &[u8; END_BYTES] = bytes.try_into().map_err(|_| WireError::Field("end"))?;
        let end = Self {
            queue_pair: u32::from_le_bytes(part(bytes, 0)),
            psn: u32::from_le_bytes(part(bytes, 4)),
            gid: part(bytes, 8),
            lid: u16::from_le_bytes(part(bytes, 24)),
            mtu: bytes[26],
            reads_served: bytes[27],
            reads_wanted: bytes[28],
            receives: u16::from_le_bytes(part(bytes, 30)),
            key: part(bytes, 32),
        };
        let is_number = |number: u32| number < 1 << 24;
        if !is_number(end.queue_pair) || !is_number(end.psn) || end.receives == 0 {
            return Err(WireError::Field("end"));
        }
        Ok(end)
    }
}

fn part<const N: usize>(bytes: &[u8; END_BYTES], at: usize) -> [u8; N] {
    *bytes[at..].first_chunk().expect("within an end")
}

impl Pairing {
    /// The wire form: a byte that says what it is, three of zero, the number, and what belongs to it.
    ///
    /// # Panics
    /// If a list is longer than its bound: the sender's own mistake.
    pub fn encode(&self) -> Vec<u8> {
        let (code, number) = match self {
            Self::Offer { number, .. } => (1, number),
            Self::Accept { number, .. } => (2, number),
            Self::Refuse { number, .. } => (3, number),
            Self::Broken { number } => (4, number),
            Self::FailedPair { number, .. } => (5, number),
            Self::Reconciled { number, .. } => (6, number),
        };
        let mut out = vec![code, 0, 0, 0];
        out.extend_from_slice(&number.to_le_bytes());
        match self {
            Self::Offer { end, .. } | Self::Accept { end, .. } => end.encode(&mut out),
            Self::Refuse { reason, .. } => {
                let mut whole = (0..=REASON_BYTES_MAX).rev();
                let len = whole.find(|len| reason.is_char_boundary(*len));
                out.extend_from_slice(&reason.as_bytes()[..len.unwrap_or(0)]);
            }
            Self::Broken { .. } => {}
            Self::FailedPair {
                unanswered: list, ..
            }
            | Self::Reconciled { unknown: list, .. } => {
                assert!(list.len() <= UNANSWERED_MAX);
                list.iter()
                    .for_each(|pair| out.extend_from_slice(&pair.to_le_bytes()));
            }
        }
        out
    }

    /// Reads what [`encode`](Self::encode) wrote; any bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        let Some((&[code, 0, 0, 0, a, b, c, d], rest)) = bytes.split_first_chunk::<8>() else {
            return Err(WireError::Field("pairing"));
        };
        let number = u32::from_le_bytes([a, b, c, d]);
        match code {
            1 => Ok(Self::Offer {
                number,
                end: End::parse(rest)?,
            }),
            2 => Ok(Self::Accept {
                number,
                end: End::parse(rest)?,
            }),
            3 if rest.len() <= REASON_BYTES_MAX => Ok(Self::Refuse {
                number,
                reason: String::from_utf8_lossy(rest).into_owned(),
            }),
            4 if rest.is_empty() => Ok(Self::Broken { number }),
            5 => Ok(Self::FailedPair {
                number,
                unanswered: list(rest)?,
            }),
            6 => Ok(Self::Reconciled {
                number,
                unknown: list(rest)?,
            }),
            _ => Err(WireError::Field("pairing")),
        }
    }
}

fn list(bytes: &[u8]) -> Result<Vec<u64>, WireError> {
    if bytes.len() % 8 != 0 || bytes.len() > 8 * UNANSWERED_MAX {
        return Err(WireError::Field("list of requests"));
    }
    let pairs = bytes.chunks_exact(8);
    let pair = |bytes: &[u8]| u64::from_le_bytes(*bytes.first_chunk().expect("eight bytes"));
    Ok(pairs.map(pair).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::HEADER_BYTES_MAX;

    fn all() -> Vec<Pairing> {
        let end = End {
            queue_pair: 0xab_cdef,
            psn: 0x12_3456,
            gid: [9; 16],
            lid: 3,
            mtu: 5,
            reads_served: 16,
            reads_wanted: 8,
            receives: 128,
            key: [7; 16],
        };
        let many: Vec<u64> = (0..UNANSWERED_MAX as u64).map(|at| at << 40).collect();
        let reason = "no RDMA device".to_owned();
        Vec::from([
            Pairing::Offer { number: 1, end },
            Pairing::Accept { number: 1, end },
            Pairing::Refuse { number: 2, reason },
            Pairing::Broken { number: 3 },
            Pairing::FailedPair {
                number: u32::MAX,
                unanswered: many,
            },
            Pairing::Reconciled {
                number: 4,
                unknown: Vec::new(),
            },
        ])
    }

    #[test]
    fn what_is_told_comes_back_and_fits_a_frame() {
        for told in all() {
            let bytes = told.encode();
            assert!(bytes.len() <= HEADER_BYTES_MAX);
            assert_eq!(Pairing::parse(&bytes).unwrap(), told);
        }
        let long = Pairing::Refuse {
            number: 1,
            reason: "é".repeat(REASON_BYTES_MAX),
        };
        let cut = Pairing::parse(&long.encode()).unwrap();
        assert!(matches!(cut, Pairing::Refuse { reason, .. } if reason.len() == REASON_BYTES_MAX));
    }

    #[test]
    fn what_nobody_tells_is_refused() {
        for told in all() {
            let bytes = told.encode();
            // Nothing but a reason may be of any length.
            let any_length = matches!(told, Pairing::Refuse { .. });
            for len in 0..bytes.len() {
                let whole_list = len >= 8 && len % 8 == 0 && bytes[0] >= 5;
                let parsed = Pairing::parse(&bytes[..len]);
                assert!(
                    parsed.is_err() || any_length || whole_list,
                    "{told:?} {len}"
                );
            }
            for code in [0, 7, 255] {
                let mut other = bytes.clone();
                other[0] = code;
                assert!(Pairing::parse(&other).is_err());
            }
            let mut other = bytes.clone();
            other[2] = 1;
            assert!(Pairing::parse(&other).is_err());
        }
        let mut too_many = vec![5, 0, 0, 0, 1, 0, 0, 0];
        too_many.resize(8 + 8 * (UNANSWERED_MAX + 1), 0);
        assert!(Pairing::parse(&too_many).is_err());
    }
}
