//! The daemon's end.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::wire::{self, Abilities, Answer, Question, Signature, State};

/// Where the helper listens unless it is told otherwise.
pub const SOCKET: &str = "/run/penstock-nfs.sock";
/// Longest that one answer takes: to replay a log, or to unmount.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(180);

/// Why the helper did not do something.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NfsError {
    /// It says why.
    #[error("{error}")]
    Refused {
        /// Why.
        error: String,
        /// What to do about it.
        hint: String,
    },
    /// It does not answer.
    #[error("the NFS helper does not answer on {socket}: {error}")]
    Unreachable {
        /// Where it should listen.
        socket: String,
        /// Why.
        error: String,
    },
}

/// Asks the helper of this machine. Every call waits.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
}

impl Default for Client {
    fn default() -> Self {
        Self {
            socket: SOCKET.into(),
        }
    }
}

impl Client {
    /// Of a helper that listens elsewhere.
    #[must_use]
    pub fn at(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
        }
    }

    /// Has something done.
    pub fn carry_out(&self, question: &Question) -> Result<(), NfsError> {
        match self.ask(question)? {
            Answer::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// What this machine can do.
    pub fn probe(&self) -> Result<Abilities, NfsError> {
        match self.ask(&Question::Probe)? {
            Answer::Abilities(abilities) => Ok(abilities),
            other => Err(self.unexpected(&other)),
        }
    }

    /// What is mounted, published and set.
    pub fn look(&self) -> Result<State, NfsError> {
        match self.ask(&Question::Look)? {
            Answer::State(state) => Ok(state),
            other => Err(self.unexpected(&other)),
        }
    }

    /// What a volume holds.
    pub fn inspect(&self, volume: &str) -> Result<Signature, NfsError> {
        let volume = volume.to_owned();
        match self.ask(&Question::Inspect { volume })? {
            Answer::Signature(signature) => Ok(signature),
            other => Err(self.unexpected(&other)),
        }
    }

    fn ask(&self, question: &Question) -> Result<Answer, NfsError> {
        let asked = self.exchange(question);
        let answer = asked.map_err(|error| self.unreachable(&error.to_string()))?;
        match answer {
            Some(Answer::Failed { error, hint }) => Err(NfsError::Refused { error, hint }),
            Some(answer) => Ok(answer),
            None => Err(self.unreachable("it ended before it answered")),
        }
    }

    fn exchange(&self, question: &Question) -> io::Result<Option<Answer>> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(ANSWER_WAIT_MAX))?;
        stream.set_write_timeout(Some(ANSWER_WAIT_MAX))?;
        wire::write(&mut stream, question)?;
        wire::read(&stream)
    }

    fn unexpected(&self, answer: &Answer) -> NfsError {
        self.unreachable(&format!("unexpected answer {answer:?}"))
    }

    fn unreachable(&self, error: &str) -> NfsError {
        NfsError::Unreachable {
            socket: self.socket.display().to_string(),
            error: error.to_owned(),
        }
    }
}
