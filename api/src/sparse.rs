//! Reading a file without its holes, and telling zeroes from data.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;

use crate::extents::DATA_BYTES_MAX;

/// Granularity in which zeroes are left out: the store's block.
pub const BLOCK_BYTES: usize = 4096;

/// Whether all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Comparing the slice with itself, shifted by one, is a memcmp: no byte-wise loop.
    bytes.first().is_none_or(|b| *b == 0)
        && bytes[..bytes.len().max(1) - 1] == bytes[bytes.len().min(1)..]
}

/// Calls `run` with each longest run of blocks that are not all zero. `at` is the offset of `bytes`.
pub fn data_runs<E>(
    at: u64,
    bytes: &[u8],
    mut run: impl FnMut(u64, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut start = None;
    for (index, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
        let from = index * BLOCK_BYTES;
        match (is_zero(block), start) {
            (false, None) => start = Some(from),
            (true, Some(first)) => {
                run(at + first as u64, &bytes[first..from])?;
                start = None;
            }
            _ => {}
        }
    }
    match start {
        Some(first) => run(at + first as u64, &bytes[first..]),
        None => Ok(()),
    }
}

/// The next range with data at or after `from`: `None` when only a hole follows. Filesystems that know no
/// holes, and block devices, have data everywhere.
fn next_data(file: &File, from: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(from)) {
        Ok(start) => start,
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => {
            return Ok(Some((from, size)));
        }
        Err(e) => return Err(e.into()),
    };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
    Ok((start < size).then_some((start, end.min(size))))
}

/// Reads the data of `file` up to `size`, in pieces that a record can carry. `piece` gets offset and bytes,
/// and `passed` how far reading has come.
pub fn read<E: From<io::Error>>(
    file: &File,
    size: u64,
    mut piece: impl FnMut(u64, &[u8]) -> Result<(), E>,
    mut passed: impl FnMut(u64),
) -> Result<(), E> {
    let mut buffer = vec![0; DATA_BYTES_MAX];
    let mut at = 0;
    while at < size {
        let Some((start, end)) = next_data(file, at, size)? else {
            break;
        };
        // Pieces start at multiples of their size, so that the store sees aligned blocks whatever the hole's
        // end is.
        at = start - start % BLOCK_BYTES as u64;
        while at < end {
            let len = (size - at).min(DATA_BYTES_MAX as u64) as usize;
            file.read_exact_at(&mut buffer[..len], at)?;
            data_runs(at, &buffer[..len], &mut piece)?;
            at += len as u64;
            passed(at);
        }
    }
    passed(size);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(bytes: &[u8]) -> Vec<(u64, usize)> {
        let mut seen = Vec::new();
        data_runs(0, bytes, |at, run| {
            seen.push((at, run.len()));
            Ok::<(), ()>(())
        })
        .unwrap();
        seen
    }

    #[test]
    fn zero_is_recognised_at_every_length() {
        assert!(is_zero(&[]));
        for len in 1..70 {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes), "{len}");
            for at in 0..len {
                bytes[at] = 1;
                assert!(!is_zero(&bytes), "{len} {at}");
                bytes[at] = 0;
            }
        }
    }

    #[test]
    fn runs_leave_out_zero_blocks_and_nothing_else() {
        let mut bytes = vec![0; 5 * BLOCK_BYTES + 100];
        assert_eq!(runs(&bytes), []);
        bytes[BLOCK_BYTES] = 1;
        bytes[3 * BLOCK_BYTES - 1] = 1;
        bytes[5 * BLOCK_BYTES + 99] = 1;
        assert_eq!(
            runs(&bytes),
            [
                (BLOCK_BYTES as u64, 2 * BLOCK_BYTES),
                (5 * BLOCK_BYTES as u64, 100)
            ]
        );
    }

    #[test]
    fn a_sparse_file_is_read_whole_without_its_holes() {
        let file = tempfile::tempfile().unwrap();
        let size = 40 << 20;
        file.set_len(size).unwrap();
        for at in [0, 5_000_000, 33 << 20, size - 3] {
            file.write_all_at(b"xyz", at).unwrap();
        }
        let mut copy = vec![0; size as usize];
        let mut sent = 0;
        read::<io::Error>(
            &file,
            size,
            |at, bytes| {
                copy[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
                sent += bytes.len();
                Ok(())
            },
            |_| {},
        )
        .unwrap();
        let mut original = vec![0; size as usize];
        file.read_exact_at(&mut original, 0).unwrap();
        assert!(copy == original);
        assert_eq!(sent, 4 * BLOCK_BYTES);
    }
}
