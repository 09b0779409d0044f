//! The channel into the guest: a virtio port on which the guest's first process reads scripts and answers
//! with exit status and output.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Most output of one script that the rig takes; a script that prints more is an error, not a full memory.
const OUTPUT_BYTES_MAX: usize = 16 << 20;
/// Longest reply header: three decimal numbers and two spaces.
const HEADER_BYTES_MAX: usize = 64;

/// What a script in the guest came to.
#[derive(Debug, Clone)]
pub struct Output {
    /// Exit status.
    pub code: i32,
    /// stdout and stderr, interleaved as written.
    pub text: String,
}

/// The rig's end of the channel.
#[derive(Debug)]
pub struct Agent {
    stream: UnixStream,
    last_id: u64,
}

impl Agent {
    /// Waits for the greeting that the guest sends once it can take scripts.
    pub fn greet(stream: UnixStream, limit: Duration) -> Result<Self> {
        let mut agent = Self { stream, last_id: 0 };
        let (id, ..) = agent.reply_header(Instant::now() + limit)?;
        if id != 0 {
            bail!("the guest greeted with id {id}");
        }
        Ok(agent)
    }

    /// Goes on over another channel to the same guest, which was migrated.
    pub fn replace(&mut self, stream: UnixStream) {
        self.stream = stream;
    }

    /// Runs `script` with `sh` in the guest and waits at most `limit` for its end. After a timeout the
    /// channel is no longer usable: the guest may still answer.
    pub fn run(&mut self, script: &str, limit: Duration) -> Result<Output> {
        self.last_id += 1;
        let line = format!("{} {}\n", self.last_id, base64(script.as_bytes()));
        self.stream
            .write_all(line.as_bytes())
            .context("send a script to the guest")?;
        let deadline = Instant::now() + limit;
        let (id, code, len) = self.reply_header(deadline)?;
        if id != self.last_id {
            bail!("the guest answered script {id}, asked was {}", self.last_id);
        }
        if len > OUTPUT_BYTES_MAX {
            bail!("the script printed {len} bytes, the limit is {OUTPUT_BYTES_MAX}");
        }
        let mut text = vec![0u8; len];
        self.read_exact(&mut text, deadline)?;
        Ok(Output {
            code,
            text: String::from_utf8_lossy(&text).into_owned(),
        })
    }

    fn reply_header(&mut self, deadline: Instant) -> Result<(u64, i32, usize)> {
        let mut line = Vec::with_capacity(HEADER_BYTES_MAX);
        loop {
            let mut byte = [0u8];
            self.read_exact(&mut byte, deadline)?;
            match byte[0] {
                b'\n' => break,
                _ if line.len() == HEADER_BYTES_MAX => bail!("the guest's reply has no header"),
                other => line.push(other),
            }
        }
        let line = String::from_utf8_lossy(&line);
        let mut words = line.split(' ');
        let mut word = || {
            words
                .next()
                .with_context(|| format!("short reply header {line:?}"))
        };
        Ok((word()?.parse()?, word()?.parse()?, word()?.parse()?))
    }

    fn read_exact(&mut self, mut buffer: &mut [u8], deadline: Instant) -> Result<()> {
        while !buffer.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("no answer from the guest in time");
            }
            self.stream
                .set_read_timeout(Some(left))
                .context("set a timeout on the agent's channel")?;
            match self.stream.read(buffer) {
                Ok(0) => bail!("the guest is gone"),
                Ok(count) => buffer = &mut buffer[count..],
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("read from the guest"),
            }
        }
        Ok(())
    }
}

/// Standard base64 with padding.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = chunk
            .iter()
            .fold(0u32, |word, byte| word << 8 | u32::from(*byte))
            << (8 * (3 - chunk.len()));
        for index in 0..4 {
            if index <= chunk.len() {
                text.push(char::from(
                    ALPHABET[(word >> (18 - 6 * index) & 63) as usize],
                ));
            } else {
                text.push('=');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_matches_rfc_4648_vectors() {
        let vectors = [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
        ];
        for (plain, encoded) in vectors {
            assert_eq!(base64(plain.as_bytes()), encoded, "{plain}");
        }
    }
}
