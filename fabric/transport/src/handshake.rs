//! From a fresh connection to one that carries frames, without the socket: TLS, then a hello each way, then
//! with `wire = "crc"` the change to plain bytes.
//!
//! The border of that change is TLS's own `close_notify`: each end sends it as the last thing under TLS, and
//! takes what follows the peer's for plain. It is authenticated, so nobody else can move the border; and the
//! session says to the byte how far it read, so that nothing on either side of it is lost. The key that goes
//! into the checksums of the frames was sent before it, under TLS.

use fabric_types::{Incarnation, NodeId};

use super::frame::Key;
use super::hello::{HELLO_BYTES, Hello, HelloError, Refused, Wire};
use super::identity::{Identity, names_node};
use super::session::{Session, State};

/// Most bytes that may be waiting for a message to be complete; a peer that sends more before it is known is
/// refused. Certificates are far smaller.
pub const HANDSHAKE_BYTES_MAX: usize = 64 << 10;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// TLS refused: a certificate, most often.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// What came under TLS is no hello.
    #[error(transparent)]
    Hello(#[from] HelloError),
    /// One end does not want the other.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// More bytes than a handshake has, or other than it has.
    #[error("the peer does not follow the protocol")]
    Protocol,
}

/// Whom a connection leads to, and by what rules.
#[derive(Debug, Clone, Copy)]
pub struct Agreed {
    /// The peer.
    pub peer: NodeId,
    /// Which start of it.
    pub incarnation: Incarnation,
    /// How data travels.
    pub wire: Wire,
    /// Version of the protocol.
    pub version: u16,
    /// Requests that the side that was connected to takes unanswered.
    pub credit_requests: u32,
    /// Bytes likewise.
    pub credit_bytes: u32,
    /// Key of what is sent.
    pub send_key: Key,
    /// Key of what is received.
    pub receive_key: Key,
}

/// A connection that carries frames.
pub struct Established {
    /// The rules.
    pub agreed: Agreed,
    /// The session, if all bytes go under TLS.
    pub session: Option<Session>,
    /// Bytes that came already and are not part of the handshake.
    pub rest: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Waits for the TLS handshake and the peer's hello.
    Hello,
    /// Has heard the peer, and waits for the owner to say whether it is let in.
    ReceivedRequest,
    /// Waits for the peer's end of TLS.
    Border,
    /// All said; what is left to send must go out.
    Done,
    /// Refused, and only the answer that says so is left to send.
    Refused,
}

/// The machine, for either end.
pub struct Handshake {
    session: Session,
    ours: Hello,
    connects: bool,
    stage: Stage,
    said: bool,
    incoming: Vec<u8>,
    plain: Vec<u8>,
    outgoing: Vec<u8>,
    sent: usize,
    agreed: Option<Agreed>,
    refused: Option<Refused>,
    /// The owner decides who is let in.
    asks: bool,
    /// Who waits for that.
    asked: Option<Hello>,
}

impl Handshake {
    /// The end that connects; `ours.to` says to whom.
    pub fn connect(identity: &Identity, ours: Hello) -> Result<Self, HandshakeError> {
        let mut handshake = Self::new(
            Session::client(identity, ours.cluster, ours.to)?,
            ours,
            true,
        );
        handshake.advance()?;
        Ok(handshake)
    }

    /// The end that was connected to.
    pub fn accept(identity: &Identity, ours: Hello) -> Result<Self, HandshakeError> {
        Ok(Self::new(Session::server(identity)?, ours, false))
    }

    fn new(session: Session, ours: Hello, connects: bool) -> Self {
        Self {
            session,
            ours,
            connects,
            stage: Stage::Hello,
            said: false,
            incoming: Vec::new(),
            plain: Vec::new(),
            outgoing: Vec::new(),
            sent: 0,
            agreed: None,
            refused: None,
            asks: false,
            asked: None,
        }
    }

    /// Lets in only whom [`admit`](Self::admit) says, which is due once there is somebody that
    /// [asks](Self::asked).
    #[must_use]
    pub fn asking(self) -> Self {
        Self { asks: true, ..self }
    }

    /// Who asks to be let in: its certificate is good, and it speaks our protocol.
    pub fn asked(&self) -> Option<(NodeId, Incarnation)> {
        let theirs = self.asked.as_ref()?;
        Some((theirs.node, theirs.incarnation))
    }

    /// Lets in who asks, or refuses it. After an error what is left in [`outgoing`](Self::outgoing) tells the
    /// peer why.
    pub fn admit(&mut self, refusal: Option<Refused>) -> Result<(), HandshakeError> {
        let Some(theirs) = self.asked.take() else {
            return Ok(());
        };
        let answer = Hello {
            refusal,
            ..self.ours.answer(&theirs, |_| true)
        };
        self.send_answer(&theirs, &answer)?;
        self.advance()
    }

    /// Bytes came. After an error what is left in [`outgoing`](Self::outgoing) tells the peer why.
    pub fn received(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        if self.incoming.len() + bytes.len() > HANDSHAKE_BYTES_MAX {
            return Err(HandshakeError::Protocol);
        }
        self.incoming.extend_from_slice(bytes);
        self.advance()
    }

    /// Bytes to send now.
    pub fn outgoing(&self) -> &[u8] {
        &self.outgoing[self.sent..]
    }

    /// So many of them are sent.
    pub fn sent(&mut self, bytes: usize) {
        self.sent += bytes;
        assert!(self.sent <= self.outgoing.len());
    }

    /// True once all is said, heard and sent. Nothing more is to be received before [`finish`](Self::finish).
    pub fn is_done(&self) -> bool {
        self.stage == Stage::Done && self.outgoing().is_empty()
    }

    /// True if the peer was refused: what is outgoing is to be sent, and the connection closed.
    pub fn refused(&self) -> Option<Refused> {
        self.refused
    }

    /// The connection.
    ///
    /// # Panics
    /// If it [is not done](Self::is_done).
    pub fn finish(self) -> Established {
        assert!(self.is_done());
        let agreed = self.agreed.expect("done means agreed");
        Established {
            session: (agreed.wire == Wire::Tls).then_some(self.session),
            agreed,
            rest: self.incoming,
        }
    }

    fn advance(&mut self) -> Result<(), HandshakeError> {
        while matches!(self.stage, Stage::Hello | Stage::Border) {
            let plain = &mut self.plain;
            let processed =
                self.session
                    .process(&mut self.incoming, &mut self.outgoing, &mut |data| {
                        plain.extend_from_slice(data)
                    })?;
            self.incoming.drain(..processed.used);
            match processed.state {
                State::Handshake => return Ok(()),
                State::Open => {
                    self.say_hello()?;
                    return Ok(());
                }
                State::Data => {
                    self.say_hello()?;
                    self.clear()?;
                }
                State::PeerClosed if self.stage == Stage::Border => self.stage = Stage::Done,
                // Too early: what was said is not complete.
                State::PeerClosed => return Err(HandshakeError::Protocol),
            }
        }
        Ok(())
    }

    /// The end that connects speaks first, as soon as it may.
    fn say_hello(&mut self) -> Result<(), HandshakeError> {
        if self.connects && !self.said {
            self.said = true;
            let bytes = self.ours.encode();
            self.session.encrypt(&bytes, &mut self.outgoing)?;
        }
        Ok(())
    }

    fn clear(&mut self) -> Result<(), HandshakeError> {
        // Neither end speaks again before it has heard the other.
        if self.stage != Stage::Hello || self.plain.len() > HELLO_BYTES {
            return Err(HandshakeError::Protocol);
        }
        let Ok(bytes) = <&[u8; HELLO_BYTES]>::try_from(self.plain.as_slice()) else {
            return Ok(());
        };
        let theirs = Hello::parse(bytes)?;
        self.plain.clear();
        if self.connects {
            self.ours.accept(&theirs)?;
            self.agree(&theirs, &theirs)
        } else {
            self.answer(&theirs)
        }
    }

    fn answer(&mut self, theirs: &Hello) -> Result<(), HandshakeError> {
        let certificate = self.session.peer_certificate();
        let cluster = self.ours.cluster;
        let answer = self.ours.answer(theirs, |node| {
            certificate.is_some_and(|certificate| names_node(certificate, cluster, node))
        });
        if self.asks && answer.refusal.is_none() {
            self.asked = Some(*theirs);
            self.stage = Stage::ReceivedRequest;
            return Ok(());
        }
        self.send_answer(theirs, &answer)
    }

    fn send_answer(&mut self, theirs: &Hello, answer: &Hello) -> Result<(), HandshakeError> {
        let bytes = answer.encode();
        self.session.encrypt(&bytes, &mut self.outgoing)?;
        if let Some(refused) = answer.refusal {
            self.session.close(&mut self.outgoing)?;
            self.stage = Stage::Refused;
            self.refused = Some(refused);
            return Ok(());
        }
        self.agree(theirs, answer)
    }

    fn agree(&mut self, theirs: &Hello, answer: &Hello) -> Result<(), HandshakeError> {
        self.agreed = Some(Agreed {
            peer: theirs.node,
            incarnation: theirs.incarnation,
            wire: answer.wire,
            version: answer.versions.0,
            credit_requests: answer.credit_requests,
            credit_bytes: answer.credit_bytes,
            send_key: self.ours.key,
            receive_key: theirs.key,
        });
        self.stage = match answer.wire {
            Wire::Tls => Stage::Done,
            Wire::Crc => {
                self.session.close(&mut self.outgoing)?;
                Stage::Border
            }
        };
        Ok(())
    }
}
