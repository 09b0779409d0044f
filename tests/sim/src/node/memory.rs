//! The memory that a command names, wherever it is.

use fabric_types::Command;
use fabric_types::iov::IoVecs;

/// What a command does with its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// It has none.
    None,
    /// It is read.
    Source(usize),
    /// It is filled.
    Destination(usize),
}

/// What a command does with its memory.
pub fn usage(command: &Command) -> Use {
    match *command {
        Command::Write { len, .. } | Command::Restore { len, .. } => Use::Source(len as usize),
        Command::Read { len, .. }
        | Command::Inspect { len, .. }
        | Command::ListChunks { len, .. }
        | Command::Fence { len, .. }
        | Command::TellFence { len, .. } => Use::Destination(len as usize),
        Command::Zero { .. } | Command::Flush { .. } | Command::Join => Use::None,
    }
}

/// The command's list of buffers.
pub fn buffers_of(command: &mut Command) -> Option<&mut IoVecs> {
    match command {
        Command::Write { buffers, .. }
        | Command::Restore { buffers, .. }
        | Command::Read { buffers, .. }
        | Command::Inspect { buffers, .. }
        | Command::ListChunks { buffers, .. }
        | Command::Fence { buffers, .. }
        | Command::TellFence { buffers, .. } => Some(buffers),
        Command::Zero { .. } | Command::Flush { .. } | Command::Join => None,
    }
}

fn list_of(iovecs: &IoVecs) -> &[libc::iovec] {
    // SAFETY: whoever made the command keeps the list until it is answered, and the caller has not answered
    // it.
    unsafe { std::slice::from_raw_parts(iovecs.ptr, iovecs.len as usize) }
}

/// Alignment that a device may ask for.
const PAGE: usize = 4096;
/// What lies beside it is a multiple of this, as versions of blocks need.
const SKEW_BYTES: usize = 16;

/// Memory that lies at a page's begin or beside it, as the caller says. A store reads from its device
/// straight into memory that is aligned: were that left to the allocator, a run would depend on those before
/// it.
pub struct Buffer {
    memory: Box<[u8]>,
    range: std::ops::Range<usize>,
}

impl Buffer {
    /// So many bytes, each `fill`.
    pub fn new(len: usize, fill: u8, aligned: bool) -> Self {
        let memory = vec![fill; len + PAGE + SKEW_BYTES].into_boxed_slice();
        let skew = if aligned { 0 } else { SKEW_BYTES };
        let first = memory.as_ptr().align_offset(PAGE) + skew;
        let range = first..first + len;
        Self { memory, range }
    }

    /// The same as these.
    pub fn of(bytes: &[u8], aligned: bool) -> Self {
        let mut buffer = Self::new(bytes.len(), 0, aligned);
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.range.clone()]
    }

    /// The bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.range.clone()]
    }

    /// A list that names it; it stays where it is while this lives.
    pub fn list(&mut self) -> Box<[libc::iovec; 1]> {
        let bytes = self.bytes_mut();
        Box::new([libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        }])
    }
}

/// The data that a command stores, as they are now.
pub fn pick_up(mut command: Command) -> Box<[u8]> {
    let Use::Source(len) = usage(&command) else {
        return Box::default();
    };
    let mut bytes = Vec::with_capacity(len);
    if let Some(buffers) = buffers_of(&mut command).filter(|_| len > 0) {
        for part in list_of(buffers) {
            // SAFETY: the memory stays until the command is answered.
            let part =
                unsafe { std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len) };
            bytes.extend_from_slice(part);
        }
    }
    bytes.into()
}

/// What a read that fails may leave where the data were to go.
pub fn spoil(command: Command) {
    if let Command::Read { len, .. } = command {
        put_down(command, &vec![0xbd; len as usize]);
    }
}

/// Puts what a command found where it is wanted.
pub fn put_down(mut command: Command, data: &[u8]) {
    let Use::Destination(_) = usage(&command) else {
        return;
    };
    let Some(buffers) = buffers_of(&mut command) else {
        return;
    };
    let mut rest = data;
    for part in list_of(buffers) {
        let (now, later) = rest.split_at(part.iov_len);
        // SAFETY: the memory stays until the command is answered, and nobody else looks at it meanwhile.
        let to =
            unsafe { std::slice::from_raw_parts_mut(part.iov_base.cast::<u8>(), part.iov_len) };
        to.copy_from_slice(now);
        rest = later;
    }
}
