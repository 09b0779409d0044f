//! Encoding of commands and replies: JSON.

use super::{Command, Reply};

/// Encodes a command for the log.
pub(crate) fn encode_command(command: &Command) -> Vec<u8> {
    serde_json::to_vec(command).expect("commands have text keys and finite numbers only")
}

/// Decodes a command.
///
/// # Errors
/// It is damaged, or a newer program wrote it.
pub(crate) fn decode_command(bytes: &[u8]) -> Result<Command, String> {
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}

/// Checks that this program knows a command.
///
/// # Errors
/// It is damaged, or a newer program wrote it.
pub(crate) fn check_command(bytes: &[u8]) -> Result<(), String> {
    decode_command(bytes).map(drop)
}

/// Encodes a reply to a command.
pub(crate) fn encode_reply(reply: &Reply) -> Vec<u8> {
    serde_json::to_vec(reply).expect("replies have text keys and finite numbers only")
}

/// Decodes a reply to a command.
///
/// # Errors
/// It is not a reply to a command.
pub(crate) fn decode_reply(bytes: &[u8]) -> Result<Reply, String> {
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}
