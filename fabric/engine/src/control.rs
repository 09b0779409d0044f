//! The control plane's side of the stores: blocking calls, executed by the maintenance thread.

use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use fabric_store::api::{DeviceLabel, Fence, RecoveryReport, StoreCore, StoreResult};
use fabric_store::metrics::StoreMetrics;
use fabric_types::ids::{ChunkKey, LayerId};
use fabric_types::{Epoch, PgId, placement};

use super::config::{CleanConfig, FabricError, ScrubConfig};
use super::damage::ScrubStatus;
use super::maintenance::{COMMANDS_MAX, Command, Maintenance};
use super::scrub::{ScrubOrder, ScrubPass};
use super::stores::{MAINTENANCE_LANE, OpenStore, Stores};
use super::strays::Stray;

/// What is known of one device.
#[derive(Debug, Clone)]
pub struct DeviceStatus {
    /// Where it is.
    pub path: PathBuf,
    /// Its identity.
    pub label: DeviceLabel,
    /// Space for data.
    pub total_bytes: u64,
    /// In use.
    pub used_bytes: u64,
    /// Free.
    pub free_bytes: u64,
    /// It refuses writes for want of room: one of its shards is [full](fabric_store::api::Space::is_full),
    /// and chunks do not choose theirs.
    pub is_full: bool,
    /// RAM that its map takes: chunk table, space bitmaps and cached map pages.
    pub memory_bytes: u64,
    /// Counters of each shard.
    pub shards: Vec<StoreMetrics>,
    /// What opening did.
    pub report: RecoveryReport,
    /// How scrubbing stands.
    pub scrub: ScrubStatus,
    /// Where the scrubber is.
    pub scrub_pass: ScrubPass,
}

/// The running maintenance thread and the way to it.
pub struct Control {
    stores: Arc<Stores>,
    commands: SyncSender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Control {
    /// Starts the thread.
    pub fn start(
        stores: Arc<Stores>,
        paces: (ScrubConfig, CleanConfig),
    ) -> Result<Self, FabricError> {
        let (commands, receiver) = sync_channel(COMMANDS_MAX);
        let state = Maintenance::new(Arc::clone(&stores), receiver, paces)?;
        let thread = std::thread::Builder::new()
            .name("maintenance".into())
            .spawn(move || {
                // Guests go first. Raising one's own niceness is always allowed; failing costs only priority.
                let _ = rustix::process::nice(MAINTENANCE_NICENESS);
                state.run();
            })
            .map_err(FabricError::os("start the maintenance thread"))?;
        Ok(Self {
            stores,
            commands,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Frees a layer.
    pub fn drop_layer(&self, layer: LayerId) -> Result<(), FabricError> {
        // A layer's chunks lie on any of the node's devices.
        for (device, _) in self.stores.devices() {
            self.ask("delete the volume's data", |reply| Command::DropLayer {
                device,
                layer,
                reply,
            })?;
        }
        Ok(())
    }

    /// The devices and their shards.
    pub(super) fn stores(&self) -> &Stores {
        &self.stores
    }

    /// The layers that have chunks here.
    pub fn layers(&self) -> Vec<LayerId> {
        self.stores.layers().into_iter().collect()
    }

    /// Frees chunks whose groups are not here.
    pub fn drop_strays(&self, strays: &[Stray]) -> Result<(), FabricError> {
        let command = |stray: &Stray, reply| Command::DropStray {
            stray: stray.clone(),
            reply,
        };
        self.ask_each("give the space of moved data back", strays, command)
    }

    /// Persists at which epochs a device is in sync in groups.
    pub fn mark(&self, device: u32, groups: &[(PgId, Epoch)]) -> Result<(), FabricError> {
        let named = |(pg, epoch): &(PgId, Epoch)| Some((placement::mark_of(*pg)?, *epoch));
        let marks: Vec<(LayerId, Epoch)> = groups.iter().filter_map(named).collect();
        let command = |(mark, epoch): &(LayerId, Epoch), reply| Command::Mark {
            device,
            mark: *mark,
            epoch: *epoch,
            reply,
        };
        self.ask_each("note which groups it is in sync in", &marks, command)
    }

    /// Sends a command for each of these, several at a time, so that they share writes to the log.
    fn ask_each<T>(
        &self,
        verb: &'static str,
        all: &[T],
        command: impl Fn(&T, SyncSender<StoreResult>) -> Command,
    ) -> Result<(), FabricError> {
        for some in all.chunks(COMMANDS_MAX / 2) {
            let (reply, outcomes) = sync_channel(some.len());
            for one in some {
                let sent = self.commands.send(command(one, reply.clone()));
                sent.map_err(|_| FabricError::Closed)?;
            }
            drop(reply);
            self.stores.mailbox(MAINTENANCE_LANE).signal();
            for _ in some {
                let outcome = outcomes.recv().map_err(|_| FabricError::Closed)?;
                outcome.map_err(|source| FabricError::Operation { verb, source })?;
            }
        }
        Ok(())
    }

    /// Shows all chunks, with the devices that they lie on. Called under a lock of the stores.
    pub fn each_chunk(&self, show: impl FnMut(u32, ChunkKey)) {
        self.stores.each_chunk(show);
    }

    /// Shows all fences of a device. Called under a lock of the stores.
    pub fn each_fence(&self, device: u32, show: impl FnMut(LayerId, Fence)) {
        self.stores.each_fence(device, show);
    }

    /// Where a device is among those that are open.
    pub fn index_of(&self, device: &[u8; 16]) -> Option<u32> {
        self.stores.index_of(device)
    }

    /// Writes a checkpoint everywhere.
    pub fn checkpoint(&self, clean: bool) -> Result<(), FabricError> {
        self.ask("write a checkpoint", |reply| Command::Checkpoint {
            clean,
            reply,
        })
    }

    /// Writes the last checkpoint and ends the thread.
    pub fn close(&self) -> Result<(), FabricError> {
        let result = self.checkpoint(true);
        self.stop();
        result
    }

    fn stop(&self) {
        let thread = self.thread.lock().expect("no panic under this lock").take();
        if let Some(thread) = thread {
            // Both fail only if the thread has ended already.
            let _ = self.commands.send(Command::Stop);
            self.stores.mailbox(MAINTENANCE_LANE).signal();
            if thread.join().is_err() {
                tracing::error!("the maintenance thread panicked");
            }
        }
    }

    fn ask(
        &self,
        verb: &'static str,
        command: impl FnOnce(SyncSender<StoreResult>) -> Command,
    ) -> Result<(), FabricError> {
        let (reply, outcome) = sync_channel(1);
        let sent = self.commands.send(command(reply));
        self.stores.mailbox(MAINTENANCE_LANE).signal();
        sent.map_err(|_| FabricError::Closed)?;
        match outcome.recv() {
            Ok(result) => result.map_err(|source| FabricError::Operation { verb, source }),
            Err(_) => Err(FabricError::Closed),
        }
    }

    /// Begins a pass of the scrubber over a device, or ends the one that is under way; false if the device is
    /// not open.
    pub fn scrub(&self, device: &[u8; 16], order: ScrubOrder) -> bool {
        let Some(index) = self.stores.index_of(device) else {
            return false;
        };
        self.stores.scrubs.order(index as usize, order);
        self.stores.mailbox(MAINTENANCE_LANE).signal();
        true
    }

    /// Adds the store that `open` opens.
    pub fn add_device(
        &self,
        open: impl FnOnce() -> Result<OpenStore, FabricError>,
    ) -> Result<DeviceStatus, FabricError> {
        let index = self.stores.add(open)?;
        self.stores.mailbox(MAINTENANCE_LANE).signal();
        let mut scrubs = self.stores.damage.statuses();
        let scrub = scrubs.swap_remove(index as usize);
        Ok(self.status(index, scrub))
    }

    /// Gives a device no new requests, and closes it once those under way have ended.
    pub fn remove_device(&self, device: &[u8; 16]) {
        if let Some(index) = self.stores.index_of(device) {
            self.stores.remove(index);
        }
    }

    /// All devices.
    pub fn devices(&self) -> Vec<DeviceStatus> {
        // One that is added between the two is left out.
        let scrubs = self.stores.damage.statuses();
        let known = self.stores.devices();
        let known = known.filter_map(|(index, _)| Some((index, scrubs.get(index as usize)?)));
        known
            .map(|(index, scrub)| self.status(index, scrub.clone()))
            .collect()
    }

    fn status(&self, index: u32, scrub: ScrubStatus) -> DeviceStatus {
        let device = self.stores.device(index);
        let (mut total_bytes, mut used_bytes, mut is_full) = (0, 0, false);
        let mut shards = Vec::new();
        for shard in device.shard_indexes() {
            let state = self.stores.lock(shard);
            let space = state.core.space();
            total_bytes += space.total_bytes;
            used_bytes += space.used_bytes;
            is_full |= space.is_full;
            shards.push(state.core.metrics());
        }
        DeviceStatus {
            path: device.path.clone(),
            label: device.label,
            total_bytes,
            used_bytes,
            free_bytes: total_bytes.saturating_sub(used_bytes),
            is_full,
            memory_bytes: shards.iter().map(|s: &StoreMetrics| s.ram.map()).sum(),
            shards,
            report: device.report,
            scrub,
            scrub_pass: self.stores.scrubs.pass(index as usize),
        }
    }
}

/// How much the maintenance thread steps back.
const MAINTENANCE_NICENESS: i32 = 10;

impl Drop for Control {
    /// Without [`close`](Self::close) this is as a crash: the next opening recovers.
    fn drop(&mut self) {
        self.stop();
    }
}
