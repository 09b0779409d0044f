//! What a new lease does before the first I/O of its volume: it waits for a map no older than its grant, has
//! [`LeaseRecovery`] make the replicas agree under it, and says from which map on the volume's requests are
//! to go.
//!
//! Events in: [`Takeover::on_map`], [`Takeover::on_reply`], [`Takeover::on_tick`]. Actions out:
//! [`Takeover::poll`].

use fabric_types::ids::{ChunkKey, LayerId};
use fabric_types::membership::ReplicaSet;
use fabric_types::{Epoch, Generation, Incarnation, NodeId, PgId, Refusal, Request, placement};

use super::{Action as RecoveryAction, Call, LeaseRecovery, PlaceOf};

/// What the shell is to do.
#[derive(Debug, Clone, Copy)]
pub enum Action {
    /// Send the request.
    Ask {
        /// Names the answer.
        call: Call,
        /// To whom. An answer of another start of that node is none.
        to: (NodeId, Incarnation),
        /// What.
        request: Request,
    },
    /// Ask meta for a map without this replica; once per map and replica.
    ReportFailed {
        /// Group.
        pg: PgId,
        /// Replica.
        node: NodeId,
        /// Map under which it failed.
        epoch: Epoch,
    },
    /// The volume can be used, under no map older than this one: replicas would refuse it, though their own
    /// group may not have changed since.
    Done(Epoch),
    /// A newer lease exists: this one is worth nothing.
    Fenced,
}

/// Chunks of a pool of so many groups.
struct Places(u32);

impl PlaceOf for Places {
    fn set_of(&self, chunk: ChunkKey) -> usize {
        placement::group_of(chunk, self.0) as usize
    }
}

/// See the module.
#[derive(Debug)]
pub struct Takeover {
    layer: LayerId,
    generation: Generation,
    /// The map under which the lease was granted: none older is acted under.
    granted: Epoch,
    /// Of the volume's pool.
    groups: u32,
    /// `None` before the map of the grant is here.
    machine: Option<LeaseRecovery>,
}

impl Takeover {
    /// Of the volume that writes this layer, under a lease that was granted by this map.
    pub fn new(layer: LayerId, generation: Generation, granted: Epoch) -> Self {
        Self {
            layer,
            generation,
            granted,
            groups: 0,
            machine: None,
        }
    }

    /// The lease.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The newest map: its version, and its groups in order. `size_bytes` is the volume's.
    pub fn on_map(&mut self, epoch: Epoch, sets: &[ReplicaSet], size_bytes: u64) {
        if epoch < self.granted {
            return;
        }
        let pool = u64::from(placement::pool_of(self.layer));
        let sets = sets.iter().filter(|set| set.pg().0 >> 32 == pool);
        let sets: Vec<ReplicaSet> = sets.cloned().collect();
        if sets.is_empty() {
            return;
        }
        self.groups = sets.len() as u32;
        match &mut self.machine {
            Some(machine) => machine.on_map(&sets),
            None => self.machine = Some(LeaseRecovery::new(self.layer, size_bytes, sets)),
        }
    }

    /// A [`TICK`](super::TICK) has passed.
    pub fn on_tick(&mut self) {
        if let Some(machine) = &mut self.machine {
            machine.on_tick();
        }
    }

    /// Whether something waits for the next tick.
    pub fn needs_tick(&self) -> bool {
        self.machine.as_ref().is_some_and(LeaseRecovery::needs_tick)
    }

    /// A replica answered, or is lost ([`Refusal::Unreachable`]).
    pub fn on_reply(&mut self, call: Call, result: Result<(), Refusal>) {
        let places = Places(self.groups);
        if let Some(machine) = &mut self.machine {
            machine.on_reply(call, result, &places);
        }
    }

    /// Next thing to do.
    pub fn poll(&mut self) -> Option<Action> {
        let machine = self.machine.as_mut()?;
        let action = match machine.poll()? {
            RecoveryAction::Ask {
                call,
                to,
                pg,
                epoch,
                command,
            } => Action::Ask {
                call,
                to,
                request: Request {
                    pg,
                    epoch: epoch.max(self.granted),
                    generation: self.generation,
                    command,
                    ..Request::NOTHING
                },
            },
            RecoveryAction::ReportFailed { pg, node, epoch } => {
                Action::ReportFailed { pg, node, epoch }
            }
            RecoveryAction::Done => Action::Done(machine.epoch().max(self.granted)),
            RecoveryAction::Fenced => Action::Fenced,
        };
        Some(action)
    }

    /// Blocks that were made to agree.
    pub fn recovered_blocks(&self) -> u64 {
        self.machine
            .as_ref()
            .map_or(0, LeaseRecovery::recovered_blocks)
    }

    /// Whether it has ended, well or not.
    pub fn is_over(&self) -> bool {
        self.machine.as_ref().is_some_and(LeaseRecovery::is_over)
    }

    /// Calls whose answers are due: until they are, the machine's memory is in use.
    pub fn calls_due(&self) -> usize {
        self.machine.as_ref().map_or(0, LeaseRecovery::calls_due)
    }
}

#[cfg(test)]
mod tests;
