//! Driving the machine on a synchronous device, while nobody else works on the store.

use super::super::api::{OpId, StoreCore, StoreError, StoreResult};
use super::super::device::{DeviceAction, IoVecs, SyncDevice};
use super::super::error::OpenError;
use super::ShardCore;

impl ShardCore {
    /// Runs the machine on a synchronous device until no checkpoint is wanted.
    pub(crate) fn run_checkpoint(
        &mut self,
        dev: &mut dyn SyncDevice,
        closed: bool,
    ) -> Result<(), OpenError> {
        self.force_checkpoint(closed);
        while self.checkpoint_pending() {
            let mut idle = true;
            while let Some(action) = self.poll_action() {
                idle = false;
                execute(self, dev, &action);
            }
            let stuck = idle && self.checkpoint_pending();
            if let Some(errno) = self.res.faults.errno().or(stuck.then_some(libc::ENOSPC)) {
                return Err(OpenError::Checkpoint {
                    shard: self.res.geo.shard,
                    errno,
                });
            }
        }
        Ok(())
    }

    /// Runs the machine on a synchronous device until all submitted operations are done; their outcomes.
    ///
    /// # Errors
    /// One of them waits for what does not come, for room below a device file for example: with the errno.
    pub fn run_on(
        &mut self,
        dev: &mut dyn SyncDevice,
    ) -> Result<Vec<(OpId, StoreResult)>, StoreError> {
        let mut done = Vec::new();
        loop {
            let mut idle = true;
            while let Some(action) = self.poll_action() {
                idle = false;
                execute(self, dev, &action);
            }
            while let Some(outcome) = self.poll_completion() {
                idle = false;
                done.push(outcome);
            }
            if !idle {
                continue;
            }
            if self.in_flight() == 0 {
                return Ok(done);
            }
            let errno = self.res.faults.errno().unwrap_or(libc::ENOSPC);
            return Err(StoreError::Device(errno));
        }
    }
}

/// Executes one action at once. Discards are left out: they are advice.
fn execute(core: &mut ShardCore, dev: &mut dyn SyncDevice, action: &DeviceAction) {
    let errno =
        |result: std::io::Result<()>| result.map_err(|e| e.raw_os_error().unwrap_or(libc::EIO));
    match action {
        DeviceAction::Read { id, offset, iovecs } => {
            let result = each_buffer(*offset, iovecs, |at, buf| dev.read_at(at, buf));
            core.on_device(*id, errno(result));
        }
        DeviceAction::Write { id, offset, iovecs } => {
            let result = each_buffer(*offset, iovecs, |at, buf| dev.write_at(at, buf));
            core.on_device(*id, errno(result));
        }
        DeviceAction::Flush { id } => {
            let result = dev.flush();
            core.on_device(*id, errno(result));
        }
        DeviceAction::Discard { id, .. } => core.on_device(*id, Ok(())),
    }
}

fn each_buffer(
    offset: u64,
    iovecs: &IoVecs,
    mut f: impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let mut at = offset;
    for i in 0..iovecs.len as usize {
        // SAFETY: the core keeps its scatter lists and the shard's own buffers valid until the completion,
        // and whoever submitted an operation keeps that operation's.
        let buf = unsafe {
            let iov = &*iovecs.ptr.add(i);
            std::slice::from_raw_parts_mut(iov.iov_base.cast::<u8>(), iov.iov_len)
        };
        f(at, buf)?;
        at += buf.len() as u64;
    }
    Ok(())
}
