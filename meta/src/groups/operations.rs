//! Commands and replies of namespace groups: a version byte, then postcard.

use namespace::{Batch, FilesystemId, Reply};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Command of a namespace group: operations on filesystems, applied in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operations(pub Vec<(FilesystemId, Batch)>);

/// Version of the encoding in the log.
const VERSION: u8 = 1;

/// Encodes operations for the log.
pub(crate) fn encode_operations(operations: &Operations) -> Vec<u8> {
    encode(operations)
}

/// Decodes operations.
///
/// # Errors
/// They are damaged, or a newer program wrote them.
pub(super) fn decode_operations(bytes: &[u8]) -> Result<Operations, String> {
    decode(bytes)
}

/// Checks that this program knows operations.
///
/// # Errors
/// They are damaged, or a newer program wrote them.
pub(crate) fn check_operations(bytes: &[u8]) -> Result<(), String> {
    decode::<Operations>(bytes).map(drop)
}

/// Encodes the replies to operations.
pub(super) fn encode_replies(replies: &Vec<Reply>) -> Vec<u8> {
    encode(replies)
}

/// Decodes the replies to operations.
///
/// # Errors
/// They are damaged.
pub(super) fn decode_replies(bytes: &[u8]) -> Result<Vec<Reply>, String> {
    decode(bytes)
}

fn encode(value: &impl Serialize) -> Vec<u8> {
    postcard::to_extend(value, vec![VERSION]).expect("a vector takes any value")
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let (version, rest) = bytes.split_first().ok_or("it is empty")?;
    if *version != VERSION {
        return Err(format!(
            "it has version {version}, and this program knows {VERSION}: it is damaged, or a newer program \
             wrote it"
        ));
    }
    match postcard::take_from_bytes(rest) {
        Ok((value, [])) => Ok(value),
        Ok(_) => Err("bytes are left over".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
