//! Requests that concern every shard (a fence) or every device (a flush) of the node: they go from one to the
//! next, and fail where one fails. They are rare, so that they are not everywhere at once costs nobody
//! anything; and a node has one device mostly. Which devices they go to is in [`Groups::next_stop`].
//!
//! [`Groups::next_stop`]: fabric_replication::groups::Groups::next_stop

use fabric_replication::replica::StoreFailure;
use fabric_store::api::{StoreError, StoreResult};
use fabric_types::{Command, Request};

use super::ShardPort;

impl ShardPort {
    /// Sends a request to where it is first due.
    pub(super) fn begin_tour(&mut self, index: u32) -> Option<Result<(), StoreFailure>> {
        let request = self.slots[index as usize].request;
        let first = self.next_device(&request, None);
        match first {
            Some(device) => self.call_at(index, device),
            // A node that has lost all its devices is no member of any group; a newer map says so to whoever
            // asks.
            None if self.stores.device_count() == 0 => return Some(Err(StoreFailure::Invalid)),
            None => return Some(Err(self.homeless())),
        }
        None
    }

    /// The first device that a request goes to, or the next after this one. Removed devices are left out.
    fn next_device(&self, request: &Request, after: Option<u32>) -> Option<u32> {
        let devices = self.stores.device_count();
        let mut after = after;
        loop {
            let next = self.groups.shared().next_stop(request, after, devices)?;
            if !self.stores.device(next).is_removed() {
                return Some(next);
            }
            after = Some(next);
        }
    }

    fn fails_flush(&self, request: &Request, device: u32) -> bool {
        let devices = self.stores.device_count();
        self.groups.shared().fails_flush(request, device, devices)
    }

    /// Queues a request for a device, or for the first of its shards.
    fn call_at(&mut self, index: u32, device: u32) {
        self.know_device(device);
        let slot = &mut self.slots[index as usize];
        if let Command::Flush { .. } = slot.request.command {
            slot.stop = device;
            let flush = &mut self.flushes[device as usize];
            flush.waiting.push(&mut self.slots, index);
        } else {
            let shard = self.stores.device(device).first_shard;
            slot.stop = shard;
            self.queue(shard, index);
        }
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
        let slot = &self.slots[index as usize];
        let (request, stop) = (slot.request, slot.stop);
        let is_flush = matches!(request.command, Command::Flush { .. });
        let result = match result {
            // A shard that knows a newer fence is as good as one that has this one.
            Err(StoreError::Stale { .. }) if !is_flush => Ok(()),
            Err(_) if is_flush && !self.fails_flush(&request, stop) => Ok(()),
            result => result,
        };
        if result.is_err() {
            return Some(result);
        }
        let device = match is_flush {
            true => stop,
            false => self.stores.device_of(stop),
        };
        if !is_flush
            && self
                .stores
                .device(device)
                .shard_indexes()
                .any(|s| s == stop + 1)
        {
            self.slots[index as usize].stop = stop + 1;
            self.queue(stop + 1, index);
        } else if let Some(next) = self.next_device(&request, Some(device)) {
            self.call_at(index, next);
        } else {
            return Some(result);
        }
        self.kick();
        None
    }
}
