//! Bytes and file descriptors in, typed requests out; replies to bytes. No input or output happens here.

use std::os::fd::OwnedFd;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::message::*;

/// One message as it came off the socket.
#[derive(Debug)]
pub struct Frame {
    /// Its header, already checked by [`check_header`].
    pub header: Header,
    /// Exactly `header.size` bytes.
    pub payload: Vec<u8>,
    /// What came along.
    pub fds: Vec<OwnedFd>,
}

impl Frame {
    /// Whether the sender asked for an acknowledgement.
    pub fn needs_ack(&self) -> bool {
        self.header.flags & FLAG_NEED_REPLY != 0
    }
}

/// The stream can no longer be read: where the next message begins is unknown, or the peer is not a front
/// end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FramingError {
    /// Not version 1 of the protocol.
    #[error("message with version {0}, only version 1 is known")]
    Version(u32),
    /// A reply that nobody asked for.
    #[error("reply to {0} without a request")]
    UnexpectedReply(&'static str),
    /// A payload of more than [`MAX_PAYLOAD_BYTES`].
    #[error("{name} announces {size} bytes, the limit is {MAX_PAYLOAD_BYTES}")]
    Oversize {
        /// The message.
        name: &'static str,
        /// Bytes announced.
        size: u32,
    },
    /// More than [`MAX_FDS`] descriptors with one message.
    #[error("more than {MAX_FDS} file descriptors with one message")]
    TooManyFds,
}

/// A message that cannot mean anything: its length or its descriptors are wrong. The stream itself is intact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The payload has the wrong length.
    #[error("{name} with {got} bytes of payload, it needs {want}")]
    Length {
        /// The message.
        name: &'static str,
        /// Bytes received.
        got: usize,
        /// Bytes needed.
        want: usize,
    },
    /// The wrong number of descriptors came along.
    #[error("{name} with {got} file descriptors, it needs {want}")]
    Fds {
        /// The message.
        name: &'static str,
        /// Descriptors received.
        got: usize,
        /// Descriptors needed.
        want: usize,
    },
    /// A number outside its range.
    #[error("{name}: {what} {value} is out of range")]
    Range {
        /// The message.
        name: &'static str,
        /// Which number.
        what: &'static str,
        /// Its value.
        value: u64,
    },
}

/// A request, well formed by itself. Whether it fits the session is for the machine to say.
#[derive(Debug)]
#[expect(
    missing_docs,
    reason = "each is the message of the same name in the vhost-user specification"
)]
pub enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<(Region, OwnedFd)>),
    SetLogBase(LogArea, OwnedFd),
    SetLogFd(OwnedFd),
    SetVringNum { index: u32, num: u32 },
    SetVringAddr(VringAddr),
    SetVringBase { index: u32, base: u32 },
    GetVringBase { index: u32 },
    SetVringKick { index: u32, fd: Option<OwnedFd> },
    SetVringCall { index: u32, fd: Option<OwnedFd> },
    SetVringErr { index: u32, fd: Option<OwnedFd> },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable { index: u32, enable: bool },
    SetBackendReqFd(OwnedFd),
    GetConfig(ConfigHead),
    SetConfig { head: ConfigHead, data: Vec<u8> },
    GetInflightFd(InflightArea),
    SetInflightFd(InflightArea, OwnedFd),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(Region, OwnedFd),
    RemMemReg(Region),
    Unknown(u32),
}

/// Checks a header as soon as it is complete, before its payload is read.
pub fn check_header(header: &Header) -> Result<(), FramingError> {
    let version = header.flags & FLAG_VERSION_MASK;
    if version != FLAG_VERSION {
        return Err(FramingError::Version(version));
    }
    if header.flags & FLAG_REPLY != 0 {
        return Err(FramingError::UnexpectedReply(name(header.code)));
    }
    if header.size as usize > MAX_PAYLOAD_BYTES {
        return Err(FramingError::Oversize {
            name: name(header.code),
            size: header.size,
        });
    }
    Ok(())
}

/// A reply to `request` with this payload.
pub fn encode_reply(request: u32, payload: &[u8]) -> Vec<u8> {
    encode(request, FLAG_VERSION | FLAG_REPLY, payload)
}

/// A message of ours that wants no answer.
pub fn encode_request(request: u32) -> Vec<u8> {
    encode(request, FLAG_VERSION, &[])
}

fn encode(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        code,
        flags,
        size: payload.len() as u32,
    };
    [header.as_bytes(), payload].concat()
}

/// Takes a frame apart.
pub fn decode(frame: Frame) -> Result<Request, DecodeError> {
    let parts = Parts {
        name: name(frame.header.code),
        payload: &frame.payload,
        fds: frame.fds,
    };
    let request = match frame.header.code {
        code::GET_FEATURES => parts.bare(Request::GetFeatures)?,
        code::SET_OWNER => parts.bare(Request::SetOwner)?,
        code::RESET_OWNER => parts.bare(Request::ResetOwner)?,
        code::GET_PROTOCOL_FEATURES => parts.bare(Request::GetProtocolFeatures)?,
        code::GET_QUEUE_NUM => parts.bare(Request::GetQueueNum)?,
        code::RESET_DEVICE => parts.bare(Request::ResetDevice)?,
        code::GET_MAX_MEM_SLOTS => parts.bare(Request::GetMaxMemSlots)?,
        code::SET_FEATURES => Request::SetFeatures(parts.plain()?),
        code::SET_PROTOCOL_FEATURES => Request::SetProtocolFeatures(parts.plain()?),
        code::SET_MEM_TABLE
        | code::ADD_MEM_REG
        | code::REM_MEM_REG
        | code::SET_LOG_BASE
        | code::SET_LOG_FD
        | code::SET_BACKEND_REQ_FD
        | code::GET_INFLIGHT_FD
        | code::SET_INFLIGHT_FD => parts.shared(frame.header.code)?,
        code::SET_VRING_NUM..=code::SET_VRING_ERR | code::SET_VRING_ENABLE => {
            parts.vring(frame.header.code)?
        }
        code::GET_CONFIG | code::SET_CONFIG => parts.config(frame.header.code)?,
        other => Request::Unknown(other),
    };
    Ok(request)
}

/// A frame on its way to a request.
struct Parts<'a> {
    name: &'static str,
    payload: &'a [u8],
    fds: Vec<OwnedFd>,
}

impl Parts<'_> {
    /// A message without payload. Some front ends pad such messages, which does no harm.
    fn bare(self, request: Request) -> Result<Request, DecodeError> {
        self.no_fds()?;
        Ok(request)
    }

    /// A message with a fixed payload and no descriptors.
    fn plain<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<T, DecodeError> {
        self.no_fds()?;
        self.body()
    }

    fn body<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<T, DecodeError> {
        T::read_from_bytes(self.payload).map_err(|_| self.length(size_of::<T>()))
    }

    fn no_fds(&self) -> Result<(), DecodeError> {
        if self.fds.is_empty() {
            Ok(())
        } else {
            Err(self.wrong_fds(0))
        }
    }

    fn one_fd(&mut self) -> Result<OwnedFd, DecodeError> {
        match (self.fds.len(), self.fds.pop()) {
            (1, Some(fd)) => Ok(fd),
            (got, _) => Err(DecodeError::Fds {
                name: self.name,
                got,
                want: 1,
            }),
        }
    }

    fn length(&self, want: usize) -> DecodeError {
        DecodeError::Length {
            name: self.name,
            got: self.payload.len(),
            want,
        }
    }

    fn wrong_fds(&self, want: usize) -> DecodeError {
        DecodeError::Fds {
            name: self.name,
            got: self.fds.len(),
            want,
        }
    }

    fn range(&self, what: &'static str, value: u64) -> DecodeError {
        DecodeError::Range {
            name: self.name,
            what,
            value,
        }
    }

    /// Messages about memory that is shared, and about channels.
    fn shared(mut self, request: u32) -> Result<Request, DecodeError> {
        Ok(match request {
            code::SET_MEM_TABLE => self.mem_table()?,
            code::ADD_MEM_REG => {
                let body: SingleRegion = self.body()?;
                Request::AddMemReg(body.region, self.one_fd()?)
            }
            code::REM_MEM_REG => {
                // Front ends may send the region's descriptor along; it is closed and nothing else.
                let body: SingleRegion = self.body()?;
                if self.fds.len() > 1 {
                    return Err(self.wrong_fds(0));
                }
                Request::RemMemReg(body.region)
            }
            code::SET_LOG_BASE => {
                let area = self.body()?;
                Request::SetLogBase(area, self.one_fd()?)
            }
            code::SET_LOG_FD => Request::SetLogFd(self.one_fd()?),
            code::GET_INFLIGHT_FD => Request::GetInflightFd(self.plain()?),
            code::SET_INFLIGHT_FD => {
                let area = self.body()?;
                Request::SetInflightFd(area, self.one_fd()?)
            }
            _ => Request::SetBackendReqFd(self.one_fd()?),
        })
    }

    fn mem_table(self) -> Result<Request, DecodeError> {
        let (head, rest) =
            MemoryHead::read_from_prefix(self.payload).map_err(|_| self.length(8))?;
        let count = head.count as usize;
        if count > MAX_TABLE_REGIONS {
            return Err(self.range("number of regions", u64::from(head.count)));
        }
        let want = count * size_of::<Region>();
        let bytes = rest.get(..want).ok_or_else(|| self.length(8 + want))?;
        if self.fds.len() != count {
            return Err(self.wrong_fds(count));
        }
        let region = |bytes: &[u8]| Region::read_from_bytes(bytes).expect("chunks have its size");
        let regions = bytes.chunks_exact(size_of::<Region>()).map(region);
        Ok(Request::SetMemTable(regions.zip(self.fds).collect()))
    }

    /// Messages about one ring.
    fn vring(self, request: u32) -> Result<Request, DecodeError> {
        match request {
            code::SET_VRING_ADDR => Ok(Request::SetVringAddr(self.plain()?)),
            code::SET_VRING_KICK | code::SET_VRING_CALL | code::SET_VRING_ERR => {
                self.vring_fd(request)
            }
            _ => {
                let VringState { index, num } = self.plain()?;
                Ok(match request {
                    code::SET_VRING_NUM => Request::SetVringNum { index, num },
                    code::SET_VRING_BASE => Request::SetVringBase { index, base: num },
                    code::GET_VRING_BASE => Request::GetVringBase { index },
                    _ if num > 1 => return Err(self.range("switch", u64::from(num))),
                    _ => Request::SetVringEnable {
                        index,
                        enable: num == 1,
                    },
                })
            }
        }
    }

    fn vring_fd(mut self, request: u32) -> Result<Request, DecodeError> {
        let value: u64 = self.body()?;
        if value & !(VRING_INDEX_MASK | VRING_NOFD) != 0 {
            return Err(self.range("ring", value));
        }
        let index = (value & VRING_INDEX_MASK) as u32;
        let fd = if value & VRING_NOFD != 0 {
            self.no_fds()?;
            None
        } else {
            Some(self.one_fd()?)
        };
        Ok(match request {
            code::SET_VRING_KICK => Request::SetVringKick { index, fd },
            code::SET_VRING_CALL => Request::SetVringCall { index, fd },
            _ => Request::SetVringErr { index, fd },
        })
    }

    fn config(self, request: u32) -> Result<Request, DecodeError> {
        self.no_fds()?;
        let (head, data) =
            ConfigHead::read_from_prefix(self.payload).map_err(|_| self.length(12))?;
        if head.size as usize > MAX_CONFIG_BYTES {
            return Err(self.range("size", u64::from(head.size)));
        }
        if request == code::GET_CONFIG {
            return Ok(Request::GetConfig(head));
        }
        if data.len() != head.size as usize {
            return Err(self.length(12 + head.size as usize));
        }
        let data = data.to_vec();
        Ok(Request::SetConfig { head, data })
    }
}

#[cfg(test)]
mod tests;
