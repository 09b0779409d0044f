//! TLS without the socket: records in, plaintext out, and the other way round.
//!
//! rustls decrypts a record in place and hands out a copy; that one is copied to its destination. Sending,
//! what is large is encrypted straight from where it lies.

use std::sync::Arc;

use fabric_types::NodeId;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::CertificateDer;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncryptError, InsufficientSizeError, UnbufferedStatus,
};

use super::identity::{Identity, server_name};

/// What a record adds to its plaintext, rounded up.
const RECORD_OVERHEAD: usize = 64;

/// Plaintext of one record.
pub const PLAINTEXT_BYTES: usize = 16 << 10;

/// Largest record on the wire, with its header; so many bytes of room always hold a whole one.
pub const RECORD_BYTES_MAX: usize = PLAINTEXT_BYTES + 256 + 5;

/// Bytes of a record's header.
const HEADER_BYTES: usize = 5;

/// One end of a TLS connection.
pub struct Session {
    side: Side,
    /// Bytes at the beginning of the input that rustls has seen and wants to see again: a message of the
    /// handshake that goes on in the next record.
    offered: usize,
}

enum Side {
    /// The end that connected.
    Client(Box<UnbufferedClientConnection>),
    /// The end that was connected to.
    Server(Box<UnbufferedServerConnection>),
}

/// How far processing came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processed {
    /// Bytes of the input that are used up. What follows is to be given again, with more.
    pub used: usize,
    /// What follows from it.
    pub state: State,
}

/// Where a session is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// In its handshake.
    Handshake,
    /// Data may be sent, and may come.
    Open,
    /// There was data; there may be more in the same input.
    Data,
    /// The peer will send no more under TLS: what follows its last record is not TLS.
    PeerClosed,
}

enum Step {
    Again,
    Done(State),
}

impl Session {
    /// The end that connects to `node` of `cluster`, which its certificate must name.
    pub fn client(
        identity: &Identity,
        cluster: [u8; 16],
        node: NodeId,
    ) -> Result<Self, rustls::Error> {
        let name = server_name(cluster, node);
        let session = UnbufferedClientConnection::new(Arc::clone(&identity.client), name)?;
        Ok(Self::new(Side::Client(Box::new(session))))
    }

    /// The end that was connected to.
    pub fn server(identity: &Identity) -> Result<Self, rustls::Error> {
        let session = UnbufferedServerConnection::new(Arc::clone(&identity.server))?;
        Ok(Self::new(Side::Server(Box::new(session))))
    }

    fn new(side: Side) -> Self {
        Self { side, offered: 0 }
    }

    /// The peer's certificate, whose chain has been verified.
    pub fn peer_certificate(&self) -> Option<&CertificateDer<'_>> {
        let chain = match &self.side {
            Side::Client(session) => session.peer_certificates(),
            Side::Server(session) => session.peer_certificates(),
        };
        chain?.first()
    }

    /// Processes what came, up to the end of the first record with data. What is to be sent is appended to
    /// `out`; after an error, too: it tells the peer why.
    ///
    /// rustls is given one record after the other, and is to use it up. It is not when a message of the
    /// handshake goes on in the next one; once the handshake is over nobody sends such, and rustls could then
    /// not be asked to encrypt in between.
    pub fn process(
        &mut self,
        incoming: &mut [u8],
        out: &mut Vec<u8>,
        plain: &mut dyn FnMut(&[u8]),
    ) -> Result<Processed, rustls::Error> {
        let mut used = 0;
        loop {
            let rest = &mut incoming[used..];
            let end = match record_bytes(&rest[self.offered..])? {
                Some(bytes) => self.offered + bytes,
                None if self.offered > 0 => {
                    let state = State::Handshake;
                    return Ok(Processed { used, state });
                }
                None => 0,
            };
            let (taken, state) = self.offer(&mut rest[..end], out, plain)?;
            used += taken;
            self.offered = end - taken;
            if self.offered > 0 && state != State::Handshake {
                return Err(rustls::Error::General("a record within another".into()));
            }
            if end == 0 || matches!(state, State::Data | State::PeerClosed) {
                return Ok(Processed { used, state });
            }
        }
    }

    /// Lets rustls work on this input until it has nothing to say to it.
    fn offer(
        &mut self,
        input: &mut [u8],
        out: &mut Vec<u8>,
        plain: &mut dyn FnMut(&[u8]),
    ) -> Result<(usize, State), rustls::Error> {
        let mut taken = 0;
        let mut failed = None;
        loop {
            let rest = &mut input[taken..];
            let (discard, step) = match &mut self.side {
                Side::Client(session) => step(session.process_tls_records(rest), out, plain),
                Side::Server(session) => step(session.process_tls_records(rest), out, plain),
            };
            taken += discard;
            match (step, failed.take()) {
                (Ok(Step::Again), known) => failed = known,
                (Ok(Step::Done(state)), None) => return Ok((taken, state)),
                // What tells the peer the reason is yet to be fetched.
                (Err(error), None) => failed = Some(error),
                (_, Some(error)) => return Err(error),
            }
        }
    }

    /// Encrypts `data`, which may be longer than a record, and appends it to `out`.
    pub fn encrypt(&mut self, data: &[u8], out: &mut Vec<u8>) -> Result<(), rustls::Error> {
        self.write(out, data.len(), |writer, room| writer.data(data, room))
    }

    /// Says that no more data follow under TLS.
    pub fn close(&mut self, out: &mut Vec<u8>) -> Result<(), rustls::Error> {
        self.write(out, 0, |writer, room| writer.close(room))
    }

    fn write(
        &mut self,
        out: &mut Vec<u8>,
        len: usize,
        mut act: impl FnMut(&mut dyn Writer, &mut [u8]) -> Result<usize, EncryptError>,
    ) -> Result<(), rustls::Error> {
        let at = out.len();
        let mut room = len + (len / PLAINTEXT_BYTES + 1) * RECORD_OVERHEAD;
        loop {
            out.resize(at + room, 0);
            let to = &mut out[at..];
            let written = match &mut self.side {
                Side::Client(session) => match session.process_tls_records(&mut []).state? {
                    ConnectionState::WriteTraffic(mut writer) => Some(act(&mut writer, to)),
                    _ => None,
                },
                Side::Server(session) => match session.process_tls_records(&mut []).state? {
                    ConnectionState::WriteTraffic(mut writer) => Some(act(&mut writer, to)),
                    _ => None,
                },
            };
            let Some(written) = written else {
                return Err(rustls::Error::HandshakeNotComplete);
            };
            match written {
                Ok(bytes) => {
                    out.truncate(at + bytes);
                    return Ok(());
                }
                Err(EncryptError::InsufficientSize(InsufficientSizeError { required_size })) => {
                    room = required_size;
                }
                Err(EncryptError::EncryptExhausted) => return Err(rustls::Error::EncryptError),
            }
        }
    }
}

/// Either side's `WriteTraffic`.
trait Writer {
    fn data(&mut self, data: &[u8], to: &mut [u8]) -> Result<usize, EncryptError>;
    fn close(&mut self, to: &mut [u8]) -> Result<usize, EncryptError>;
}

impl<Data> Writer for rustls::unbuffered::WriteTraffic<'_, Data> {
    fn data(&mut self, data: &[u8], to: &mut [u8]) -> Result<usize, EncryptError> {
        self.encrypt(data, to)
    }

    fn close(&mut self, to: &mut [u8]) -> Result<usize, EncryptError> {
        self.queue_close_notify(to)
    }
}

/// Length of the record at the beginning of `bytes`, if it is complete.
fn record_bytes(bytes: &[u8]) -> Result<Option<usize>, rustls::Error> {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return Ok(None);
    };
    let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
    if !(20..=23).contains(&header[0]) {
        return Err(rustls::InvalidMessage::InvalidContentType.into());
    }
    if HEADER_BYTES + len > RECORD_BYTES_MAX {
        return Err(rustls::Error::PeerSentOversizedRecord);
    }
    Ok((rest.len() >= len).then_some(HEADER_BYTES + len))
}

fn step<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    out: &mut Vec<u8>,
    plain: &mut dyn FnMut(&[u8]),
) -> (usize, Result<Step, rustls::Error>) {
    let mut discard = status.discard;
    let step = status
        .state
        .and_then(|state| act_on(state, &mut discard, out, plain));
    (discard, step)
}

fn act_on<Data>(
    state: ConnectionState<'_, '_, Data>,
    discard: &mut usize,
    out: &mut Vec<u8>,
    plain: &mut dyn FnMut(&[u8]),
) -> Result<Step, rustls::Error> {
    Ok(match state {
        ConnectionState::EncodeTlsData(mut data) => {
            let at = out.len();
            if let Err(EncodeError::InsufficientSize(needed)) = data.encode(&mut []) {
                out.resize(at + needed.required_size, 0);
                let written = data.encode(&mut out[at..]);
                written.map_err(|error| rustls::Error::General(error.to_string()))?;
            }
            Step::Again
        }
        ConnectionState::TransmitTlsData(sent) => {
            // It is in `out`, and whoever owns that sends it before anything else.
            sent.done();
            Step::Again
        }
        ConnectionState::ReadTraffic(mut traffic) => {
            while let Some(record) = traffic.next_record() {
                let record = record?;
                *discard += record.discard;
                plain(record.payload);
            }
            Step::Done(State::Data)
        }
        ConnectionState::WriteTraffic(_) => Step::Done(State::Open),
        ConnectionState::BlockedHandshake => Step::Done(State::Handshake),
        ConnectionState::PeerClosed | ConnectionState::Closed => Step::Done(State::PeerClosed),
        // Never asked for.
        _ => return Err(rustls::Error::General("unexpected TLS state".into())),
    })
}
