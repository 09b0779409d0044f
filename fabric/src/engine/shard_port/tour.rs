//! Requests that concern every shard (a fence) or every device (a flush) of the node: they go from one to the next, and fail
//! where one fails. They are rare, so that they are not everywhere at once costs nobody anything; and a node has one device
//! mostly.

use super::ShardPort;
use crate::core::replica::StoreFailure;
use crate::proto::Command;
use crate::store::api::{StoreError, StoreResult};

impl ShardPort {
    /// Sends a request to where it is first due.
    pub(super) fn begin_tour(&mut self, index: u32) -> Option<Result<(), StoreFailure>> {
        let request = self.slots[index as usize].request;
        if self.queues.is_empty() {
            // A node that has lost all its devices is no member of any group; a newer map says so to whoever asks.
            return Some(Err(StoreFailure::Invalid));
        }
        match request.command {
            Command::Flush { layer } if self.groups.is_none() => {
                // A node that is alone keeps a layer on one device.
                let Some(home) = self.home_of(&request, layer) else {
                    return Some(Err(StoreFailure::Invalid));
                };
                self.flushes[home as usize]
                    .waiting
                    .push(&mut self.slots, index);
            }
            Command::Flush { .. } => self.flushes[0].waiting.push(&mut self.slots, index),
            _ => self.queue(0, index),
        }
        None
    }

    /// The request is done where it was: its outcome, if that was the last place.
    #[inline]
    pub(super) fn next_stop(&mut self, index: u32, result: StoreResult) -> Option<StoreResult> {
        match self.slots[index as usize].request.command {
            Command::Flush { .. } | Command::Fence { .. } => self.go_on_tour(index, result),
            _ => Some(result),
        }
    }

    #[cold]
    fn go_on_tour(&mut self, index: u32, result: StoreResult) -> Option<StoreResult> {
        let slot = &mut self.slots[index as usize];
        let is_flush = matches!(slot.request.command, Command::Flush { .. });
        let result = match result {
            // A shard that knows a newer fence is as good as one that has this one.
            Err(StoreError::Stale { .. }) if !is_flush => Ok(()),
            result => result,
        };
        let stops = match (is_flush, &self.groups) {
            (true, None) => 1,
            (true, Some(_)) => self.flushes.len(),
            (false, _) => self.queues.len(),
        };
        if result.is_err() || slot.stop as usize + 1 >= stops {
            return Some(result);
        }
        slot.stop += 1;
        let stop = slot.stop;
        if is_flush {
            self.flushes[stop as usize]
                .waiting
                .push(&mut self.slots, index);
        } else {
            self.queue(stop, index);
        }
        self.kick();
        None
    }
}
