//! FALLOCATE: space is not allocated ahead, so this makes files longer, and holes.

use fuse_codec::{AccessMode, Errno, Fallocate, FallocateMode};
use namespace::{BLOCK, Body, Commit, Error, Ino, Operation, Outcome, Punch, SIZE_MAX};

use super::staging::{commit, stage};
use super::tries::Tries;
use super::{EXTENTS_MAX, block_begin, block_end, write};
use crate::backend::Backend;
use crate::caller::Caller;
use crate::client::Client;
use crate::failure::Failure;
use crate::mount::{Call, Served};
use crate::reply::OwnedReply;
use crate::sync::Mode;

pub(crate) async fn serve<B: Backend>(call: &Call<'_, B>, fallocate: &Fallocate) -> Served {
    let client = call.client;
    let file = call.file(fallocate.handle, call.header.nodeid)?;
    if file.access == AccessMode::Read {
        return Err(Errno::EBADF);
    }
    let (ino, from) = (file.ino, fallocate.offset);
    let to = from.checked_add(fallocate.length);
    let to = to.filter(|to| *to <= SIZE_MAX).ok_or(Errno::EFBIG)?;
    let keep_size = match fallocate.mode {
        FallocateMode::Allocate { keep_size } => keep_size,
        FallocateMode::PunchHole => {
            zero(client, ino, (from, to)).await?;
            true
        }
        FallocateMode::Zero { keep_size } => {
            zero(client, ino, (from, to)).await?;
            keep_size
        }
    };
    match keep_size {
        true => check_is_file(&client, ino).await?,
        false => extend(client, ino, to).await?,
    }
    Ok(OwnedReply::Done)
}

async fn check_is_file<B: Backend>(client: &Client<B>, ino: Ino) -> Result<(), Errno> {
    match client.inode(ino).await?.body {
        Body::File(_) => Ok(()),
        _ => Err(Errno::ENODEV),
    }
}

/// Makes a file longer, unless it is long enough.
async fn extend<B: Backend>(client: Caller<'_, B>, ino: Ino, size: u64) -> Result<(), Failure> {
    let _turn = client.turn(ino, Mode::Exclusive).await;
    let longer = Operation::Commit(Commit {
        ino,
        expected: None,
        extents: Vec::new(),
        size,
        mtime: client.backend.now(),
        clear_privileges: true,
    });
    client.apply(longer).await.map(|_| ())
}

/// Makes a range read as zeroes, by a hole and zeroes in the blocks at its ends.
async fn zero<B: Backend>(
    client: Caller<'_, B>,
    ino: Ino,
    range: (u64, u64),
) -> Result<(), Failure> {
    let zero = || zero_in_turn(client, ino, range);
    client.as_space_returns(zero).await
}

async fn zero_in_turn<B: Backend>(
    client: Caller<'_, B>,
    ino: Ino,
    (from, to): (u64, u64),
) -> Result<(), Failure> {
    let _turn = client.turn(ino, Mode::Exclusive).await;
    let mut tries = Tries::default();
    loop {
        match zero_once(client, ino, (from, to)).await {
            Ok(()) => return Ok(()),
            Err(failure) => tries.again(&client, failure).await?,
        }
    }
}

async fn zero_once<B: Backend>(
    client: Caller<'_, B>,
    ino: Ino,
    (from, to): (u64, u64),
) -> Result<(), Failure> {
    let size = client.inode(ino).await?.size;
    if from >= size {
        return Ok(());
    }
    let hole = block_end(from);
    // The rest of the file's last block is zero already, so that the hole may have all of it.
    let reaches_end = to >= size;
    let hole_end = if reaches_end { to } else { block_begin(to) };
    if from < hole {
        zero_in_block(client, ino, (from, to.min(hole))).await?;
    }
    if hole <= hole_end && hole_end < to {
        zero_in_block(client, ino, (hole_end, to)).await?;
    }
    if hole >= hole_end {
        return Ok(());
    }
    match punch(client, ino, (hole, hole_end)).await {
        // The file became longer: the hole would end within a block of it.
        Err(Failure::Refused(Error::Invalid)) if reaches_end => {
            Err(Failure::Refused(Error::Changed))
        }
        done => done,
    }
}

async fn punch<B: Backend>(
    client: Caller<'_, B>,
    ino: Ino,
    (from, to): (u64, u64),
) -> Result<(), Failure> {
    loop {
        let punch = Operation::Punch(Punch {
            ino,
            offset: from,
            length: to - from,
            extend: false,
            clear_privileges: true,
        });
        match client.apply(punch).await? {
            Outcome::Changed { done: true, .. } => return Ok(()),
            Outcome::Changed { .. } => {}
            other => return Err(Failure::unfit(&other)),
        }
    }
}

/// Zeroes within one block, as far as the file goes and has data there.
async fn zero_in_block<B: Backend>(
    client: Caller<'_, B>,
    ino: Ino,
    (from, to): (u64, u64),
) -> Result<(), Failure> {
    let begin = block_begin(from);
    let look = client
        .look(ino, (begin, begin + BLOCK), EXTENTS_MAX)
        .await?;
    if look.extents.is_empty() || from >= look.inode.size {
        return Ok(());
    }
    let mut block = write::present(&client, ino, &look, (begin, begin + BLOCK)).await?;
    block[(from - begin) as usize..(to - begin) as usize].fill(0);
    let session = client.session().await?;
    let staged = stage(&client, &session, ino, block).await?;
    let request = Commit {
        ino,
        expected: Some(look.inode.change),
        extents: Vec::new(),
        // As long as it is.
        size: 0,
        mtime: client.backend.now(),
        clear_privileges: true,
    };
    commit(client, &session, staged, begin, request).await?;
    Ok(())
}
