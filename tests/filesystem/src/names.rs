//! Names of a directory with as many as there may be.

/// Digits in front of each name.
pub const DIGITS: usize = 7;

/// Name of an index: some are no UTF-8, and some as long as can be.
pub fn name(index: u64) -> Vec<u8> {
    let mut bytes = format!("{index:0DIGITS$}").into_bytes();
    match index % 16 {
        0 => bytes.extend([0xff, 0xfe, b'\n', 0x80]),
        1 => bytes.resize(255, 0xc3),
        2 => bytes.extend("ü\\ \t*".bytes()),
        _ => {}
    }
    bytes
}
