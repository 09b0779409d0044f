//! Putting writes into the buffer.

use futures_util::future::{Either, select};
use namespace::{BLOCK, Body, Error, Ino, SIZE_MAX};

use super::NewBlocks;
use super::room::Reservation;
use crate::backend::Backend;
use crate::caller::Caller;
use crate::client::Client;
use crate::data::tries::Tries;
use crate::data::write::{NewBytes, Place, present};
use crate::data::{EXTENTS_MAX, block_begin, block_end};
use crate::failure::Failure;
use crate::sync::Mode;

/// How long a writer waits for a file's capability. Then it goes on without.
const GRANT_WAIT_MAX: std::time::Duration = std::time::Duration::from_millis(100);

/// Buffers a write, if the file is held exclusively, or soon is. Whether it did.
pub(crate) async fn write<B: Backend>(
    client: Caller<'_, B>,
    new: &NewBytes,
) -> Result<bool, Failure> {
    // One block more, as it may begin within one.
    let bytes = (new.data.len() as u64).next_multiple_of(BLOCK) + BLOCK;
    let is_short = client.backend.space().is_some_and(|space| space.is_short());
    let now = client.backend.monotonic();
    if is_short || !client.buffer.takes(now, new.ino, bytes) {
        return Ok(false);
    }
    if !await_exclusive(&client, new.ino).await? {
        return Ok(false);
    }
    let hurry = || client.buffer.wake.notify();
    let mut room = client.buffer.room.reserve(bytes, hurry).await;
    let _turn = client.changing.lock(new.ino, Mode::Exclusive).await;
    let mut tries = Tries::default();
    loop {
        match write_once(client, new, &mut room).await {
            Ok(done) => return Ok(done),
            Err(failure) => tries.again(&client, failure).await?,
        }
    }
}

impl<B: Backend> Client<B> {
    /// A file was made in a directory, or without a name, and is likely to be written to: asks for it ahead.
    pub(crate) fn expect_writes(&self, ino: Ino, parent: Option<Ino>) {
        let now = self.backend.monotonic();
        if self.buffer.takes(now, ino, BLOCK) && self.cache.wants_exclusive(now, ino) {
            self.cache.request_exclusive(now, ino, parent);
        }
    }
}

/// Waits a short while for a file's capability.
async fn await_exclusive<B: Backend>(client: &Client<B>, ino: Ino) -> Result<bool, Failure> {
    let is_held = || {
        client
            .cache
            .exclusive(client.backend.monotonic(), ino)
            .is_some()
    };
    if is_held() {
        return Ok(true);
    }
    if !client
        .cache
        .wants_exclusive(client.backend.monotonic(), ino)
    {
        return Ok(false);
    }
    if !client.cache.is_requested(ino) {
        let inode = client.inode(ino).await?;
        let Body::File(_) = inode.body else {
            return Ok(false);
        };
        let now = client.backend.monotonic();
        client.cache.request_exclusive(now, ino, inode.parent);
    }
    let mut patience = Box::pin(client.backend.sleep(GRANT_WAIT_MAX));
    loop {
        let settled = client.cache.settled.listen();
        if is_held() || !client.cache.is_requested(ino) {
            return Ok(is_held());
        }
        if let Either::Right(_) = select(settled, &mut patience).await {
            client
                .cache
                .exclusive_is_late(client.backend.monotonic(), ino);
            return Ok(is_held());
        }
    }
}

async fn write_once<B: Backend>(
    client: Caller<'_, B>,
    new: &NewBytes,
    room: &mut Reservation,
) -> Result<bool, Failure> {
    let now = client.backend.monotonic();
    let Some(grant) = client.cache.exclusive(now, new.ino) else {
        return Ok(false);
    };
    // What may still be done to the file would be undone by a block that is completed now.
    if let Some(session) = client.sessions.current() {
        client.settle_doubts_of(&session, new.ino).await?;
    }
    let size = match client.buffer.size(new.ino) {
        Some(size) => size,
        None => {
            let inode = client.inode(new.ino).await?;
            let Body::File(_) = inode.body else {
                return Ok(false);
            };
            inode.size
        }
    };
    let offset = match new.place {
        Place::At(offset) => offset,
        Place::End => size,
    };
    let end = offset.checked_add(new.data.len() as u64);
    let end = end.filter(|end| *end <= SIZE_MAX);
    let end = end.ok_or(Failure::Refused(Error::TooLarge))?;
    let blocks = whole_blocks(&client, new, (offset, end), size).await?;
    let now = client.backend.monotonic();
    let (change, until) = client.begin_buffered(now, new.ino);
    if until > now {
        client.backend.sleep(until.since(now)).await;
    }
    let new_blocks = NewBlocks {
        blocks,
        end,
        size,
        mtime: client.backend.now(),
        clear_privileges: new.clear_privileges,
    };
    let now = client.backend.monotonic();
    let buffer = &client.buffer;
    let put = |session| buffer.insert(now, (new.ino, session, grant), new_blocks, room);
    let is_put = client.cache.while_exclusive(now, new.ino, grant, put);
    client.cache.at(client.backend.monotonic());
    drop(change);
    Ok(is_put.is_some())
}

/// The whole blocks that a range lies in, with the new bytes, by their offsets.
async fn whole_blocks<B: Backend>(
    client: &Client<B>,
    new: &NewBytes,
    (offset, end): (u64, u64),
    size: u64,
) -> Result<Vec<(u64, Vec<u8>)>, Failure> {
    let mut blocks = Vec::new();
    for begin in (block_begin(offset)..block_end(end)).step_by(BLOCK as usize) {
        let (from, to) = (offset.max(begin), end.min(begin + BLOCK));
        let part = &new.data[(from - offset) as usize..(to - offset) as usize];
        // Behind the end of the file there is nothing.
        let is_all = from == begin && to >= size.min(begin + BLOCK);
        let mut block = match is_all || begin >= size {
            true => vec![0; BLOCK as usize],
            false => present_block(client, new.ino, begin).await?,
        };
        block[(from - begin) as usize..(to - begin) as usize].copy_from_slice(part);
        blocks.push((begin, block));
    }
    Ok(blocks)
}

/// A block as it is now.
async fn present_block<B: Backend>(
    client: &Client<B>,
    ino: Ino,
    begin: u64,
) -> Result<Vec<u8>, Failure> {
    loop {
        let moment = client.buffer.moment();
        if let Some(block) = client.buffer.block(ino, begin) {
            return Ok(block);
        }
        let range = (begin, begin + BLOCK);
        let look = client.look(ino, range, EXTENTS_MAX).await?;
        let end = look.inode.size.clamp(begin, begin + BLOCK);
        let mut block = present(client, ino, &look, (begin, end)).await?;
        block.resize(BLOCK as usize, 0);
        // Else it is looked at anew: it may have been written back since.
        if !client.buffer.is_since(ino, moment) {
            return Ok(block);
        }
    }
}
