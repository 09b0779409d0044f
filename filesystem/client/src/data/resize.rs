//! Giving a file another size.

use std::sync::Arc;

use namespace::{Attributes, BLOCK, Ino, Operation, Outcome, SIZE_MAX, SetAttributes};

use super::staging::{Staged, refused, stage};
use super::tries::Tries;
use super::{EXTENTS_MAX, block_begin, block_end, write};
use crate::backend::Backend;
use crate::caller::Caller;
use crate::client::Client;
use crate::failure::Failure;
use crate::questions::Look;
use crate::session::Session;
use crate::sync::Mode;

/// Changes a file's size, with other attributes.
pub(crate) async fn resize<B: Backend>(
    client: Caller<'_, B>,
    change: SetAttributes,
    size: u64,
) -> Result<Attributes, Failure> {
    if size > SIZE_MAX {
        return Err(Failure::Refused(namespace::Error::TooLarge));
    }
    let change = SetAttributes {
        size: Some(size),
        ..change
    };
    let resize = || resize_in_turn(client, &change, size);
    client.as_space_returns(resize).await
}

async fn resize_in_turn<B: Backend>(
    client: Caller<'_, B>,
    change: &SetAttributes,
    size: u64,
) -> Result<Attributes, Failure> {
    let _turn = client.turn(change.ino, Mode::Exclusive).await;
    let mut tries = Tries::default();
    loop {
        match resize_once(client, change.clone(), size).await {
            Ok(attributes) => return Ok(attributes),
            Err(failure) => tries.again(&client, failure).await?,
        }
    }
}

async fn resize_once<B: Backend>(
    client: Caller<'_, B>,
    mut change: SetAttributes,
    size: u64,
) -> Result<Attributes, Failure> {
    // Where a block is cut it matters what the file holds.
    let cut = match size % BLOCK {
        0 => None,
        _ => {
            let block = (block_begin(size), block_end(size));
            Some(client.look(change.ino, block, EXTENTS_MAX).await?)
        }
    };
    let session = client.session().await?;
    let mut staged = None;
    if let Some(look) = &cut {
        change.expected = Some(look.inode.change);
        if size < look.inode.size && !look.extents.is_empty() {
            let tail = zeroed_tail(&client, change.ino, look, size).await?;
            staged = Some(stage(&client, &session, change.ino, tail).await?);
        }
    }
    let Some(mut staged) = staged else {
        return in_steps(client, &session, change).await;
    };
    change.tail = Some(staged.allocation.tail(staged.epoch));
    staged.allocation.commit_begins();
    match in_steps(client, &session, change).await {
        Ok(attributes) => {
            let Staged { allocation, .. } = staged;
            allocation.committed();
            Ok(attributes)
        }
        Err(failure) => Err(refused(&session, staged, failure)),
    }
}

/// The last block of a file that is cut within it: zero behind the new end.
async fn zeroed_tail<B: Backend>(
    client: &Client<B>,
    ino: Ino,
    look: &Look,
    size: u64,
) -> Result<Vec<u8>, Failure> {
    let range = (block_begin(size), size);
    let mut block = write::present(client, ino, look, range).await?;
    block.resize(BLOCK as usize, 0);
    Ok(block)
}

/// A file with many extents shrinks in steps; the last one takes the tail.
async fn in_steps<B: Backend>(
    client: Caller<'_, B>,
    session: &Arc<Session>,
    mut change: SetAttributes,
) -> Result<Attributes, Failure> {
    loop {
        let step = Operation::SetAttributes(change.clone());
        match client.apply_in(session, step).await? {
            Outcome::Changed {
                attributes,
                done: true,
            } => return Ok(attributes),
            Outcome::Changed { attributes, .. } => {
                // The step itself was a change.
                let expected = &mut change.expected;
                *expected = expected.map(|_| attributes.change);
            }
            other => return Err(Failure::unfit(&other)),
        }
    }
}
