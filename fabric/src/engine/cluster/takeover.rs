//! The shell around [`Settle`]: what a new lease does before the first I/O of its volume, in the background. Until it is done
//! guests' requests wait.

use std::sync::{Arc, Weak};

use super::requests::Requests;
use super::{Ask, Cluster};
use crate::core::membership::ReplicaSet;
use crate::core::settle::{Action, Call, PlaceOf, Settle};
use crate::core::volume::VolumeState;
use crate::proto::ids::{ChunkKey, LayerId};
use crate::proto::{
    Epoch, Generation, Incarnation, NodeId, Refusal, Request, RequestId, Sequence, placement,
};

/// A takeover and one of its calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Token {
    number: u64,
    call: u32,
}

/// A volume that is being taken over.
pub struct Takeover {
    /// Tells it from the others.
    number: u64,
    volume: Weak<VolumeState>,
    layer: LayerId,
    generation: Generation,
    /// The map under which the lease was granted: none older is acted under.
    epoch: Epoch,
    /// Those of the volume's pool. Empty before the map of `epoch` is here.
    sets: Vec<ReplicaSet>,
    machine: Option<Settle>,
}

/// Chunks of a pool of so many groups.
struct Places(u32);

impl PlaceOf for Places {
    fn set_of(&self, chunk: ChunkKey) -> usize {
        placement::group_of(chunk, self.0) as usize
    }
}

impl Takeover {
    /// Of a volume that was opened.
    pub fn new(number: u64, volume: &Arc<VolumeState>) -> Self {
        Self {
            number,
            volume: Arc::downgrade(volume),
            layer: volume.layer(),
            generation: volume.generation(),
            epoch: volume.epoch(),
            sets: Vec::new(),
            machine: None,
        }
    }

    /// The map changed.
    pub fn on_map(&mut self, map: &super::Map) {
        if map.epoch < self.epoch {
            return;
        }
        let pool = u64::from(placement::pool_of(self.layer));
        let sets = map.sets.iter().filter(|set| set.pg().0 >> 32 == pool);
        self.sets = sets.cloned().collect();
        match &mut self.machine {
            Some(machine) => machine.on_map(&self.sets),
            None if self.sets.is_empty() => {}
            None => {
                let size = self
                    .volume
                    .upgrade()
                    .map_or(0, |volume| volume.size_bytes());
                self.machine = Some(Settle::new(self.layer, size, self.sets.clone()));
            }
        }
    }

    /// Some milliseconds have passed.
    pub fn on_tick(&mut self) {
        if let Some(machine) = &mut self.machine {
            machine.on_tick();
        }
    }

    /// An answer, if it is to this one.
    pub fn on_reply(&mut self, token: Token, result: Result<(), Refusal>) {
        let places = Places(self.sets.len() as u32);
        if let Some(machine) = self
            .machine
            .as_mut()
            .filter(|_| token.number == self.number)
        {
            machine.on_reply(Call(token.call), result, &places);
        }
    }

    /// Does what is to be done now.
    pub fn go_on(&mut self, requests: &mut Requests<Token>, cluster: &Cluster) {
        // The volume was closed: what was asked is waited for, and nothing more is begun.
        if self.volume.strong_count() == 0 {
            return;
        }
        while let Some(action) = self.machine.as_mut().and_then(Settle::poll) {
            match action {
                Action::Ask {
                    call,
                    node,
                    pg,
                    epoch,
                    command,
                } => {
                    let request = Request {
                        id: RequestId(0),
                        pg,
                        epoch: epoch.max(self.epoch),
                        generation: self.generation,
                        sequence: Sequence(0),
                        watermark: Sequence(0),
                        command,
                    };
                    let token = Token {
                        number: self.number,
                        call: call.0,
                    };
                    let to = (node, self.incarnation_of(node));
                    if let Some(result) = requests.send(to, &request, token) {
                        self.on_reply(token, result);
                    }
                }
                Action::ReportFailed { pg, node, epoch } => {
                    cluster.ask(Ask::ReportFailed { pg, node, epoch });
                }
                Action::Done => self.end("taken over"),
                // Replicas refuse whatever is sent under this lease, and say why.
                Action::Fenced => self.end("there is a newer lease"),
            }
        }
    }

    fn end(&self, how: &'static str) {
        let settled = self.machine.as_ref().map_or(0, Settle::settled_blocks);
        tracing::info!(
            layer = self.layer.0,
            generation = self.generation.0,
            settled,
            how,
            "volume"
        );
        if let Some(volume) = self.volume.upgrade() {
            // Older than this they would be refused, though their own group has not changed since.
            let fenced = self.machine.as_ref().map_or(self.epoch, Settle::epoch);
            volume.set_epoch(fenced.max(self.epoch));
            volume.set_settled(true);
        }
    }

    /// Whether nothing more comes of it, and nobody uses its memory.
    pub fn is_over(&self) -> bool {
        match &self.machine {
            Some(machine) if machine.calls_due() > 0 => false,
            Some(machine) => machine.is_over() || self.volume.strong_count() == 0,
            None => self.volume.strong_count() == 0,
        }
    }

    /// The start of a node that the map knows.
    fn incarnation_of(&self, node: NodeId) -> Incarnation {
        let member = self
            .sets
            .iter()
            .find_map(|set| Some(set.members()[set.index_of(node)?]));
        member.map_or(Incarnation(0), |member| member.incarnation)
    }
}
